// Bad input is refused at the door, by name, and disturbs nobody.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tests/serve/client.h"

namespace weir::testing {
namespace {

using Change = std::function<void(v1::GenerateRequest&)>;

struct Wrong {
  std::string field;  // what the message must name
  Change change;
  grpc::StatusCode code = grpc::StatusCode::INVALID_ARGUMENT;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

Wrong ids(const Ids& wrong) {
  return {"token_ids", [wrong](v1::GenerateRequest& r) {
            r.mutable_token_ids()->mutable_ids()->Assign(wrong.begin(), wrong.end());
          }};
}
Wrong prompt(const std::string& text) {
  return {"prompt", [text](v1::GenerateRequest& r) { r.set_prompt(text); }};
}
Wrong sampling(const std::string& field, std::function<void(v1::SamplingParameters&)> change) {
  return {"sampling." + field,
          [change](v1::GenerateRequest& r) { change(*r.mutable_sampling()); }};
}
Wrong stop(const std::string& field, std::function<void(v1::StopParameters&)> change) {
  return {"stop." + field, [change](v1::GenerateRequest& r) { change(*r.mutable_stop()); }};
}

std::vector<Wrong> wrong_inputs() {
  return {ids({512}), ids({-1}), ids({5, 6, 1 << 30}), ids({}),
          {"prompt", [](v1::GenerateRequest& r) { r.clear_input(); }},
          prompt(""), prompt("\xff\xfe"), prompt("ends in half a character \xe4\xbd"),
          {"model", [](v1::GenerateRequest& r) { r.set_model("another"); },
           grpc::StatusCode::NOT_FOUND},
          {"n", [](v1::GenerateRequest& r) { r.set_n(1'000'000); }},
          {"n", [](v1::GenerateRequest& r) { r.set_n(0); }},
          {"session_id", [](v1::GenerateRequest& r) { r.set_session_id("s"); }},
          {"priority", [](v1::GenerateRequest& r) { r.set_priority(101); }},
          {"request_id",
           [](v1::GenerateRequest& r) { r.set_request_id(std::string(257, 'x')); }},
          {"output.top_logprobs",
           [](v1::GenerateRequest& r) { r.mutable_output()->set_top_logprobs(21); }},
          {"output.stream_chunk_tokens",
           [](v1::GenerateRequest& r) { r.mutable_output()->set_stream_chunk_tokens(0); }}};
}

std::vector<Wrong> wrong_sampling() {
  std::vector<Wrong> out;
  for (const float value : {-1.0f, 101.0f, kNan, kInfinity, -kInfinity}) {
    out.push_back(sampling("temperature", [value](auto& s) { s.set_temperature(value); }));
  }
  for (const float value : {0.0f, 1.5f, -0.5f, kNan}) {
    out.push_back(sampling("top_p", [value](auto& s) { s.set_top_p(value); }));
    out.push_back(sampling("typical_p", [value](auto& s) { s.set_typical_p(value); }));
  }
  for (const float value : {-0.1f, 1.1f, kNan}) {
    out.push_back(sampling("min_p", [value](auto& s) { s.set_min_p(value); }));
  }
  for (const float value : {0.0f, -1.0f, 101.0f, kNan}) {
    out.push_back(
        sampling("repetition_penalty", [value](auto& s) { s.set_repetition_penalty(value); }));
  }
  for (const float value : {-101.0f, 101.0f, kNan, kInfinity}) {
    out.push_back(
        sampling("frequency_penalty", [value](auto& s) { s.set_frequency_penalty(value); }));
    out.push_back(
        sampling("presence_penalty", [value](auto& s) { s.set_presence_penalty(value); }));
  }
  for (const uint32_t value : {513u, 1u << 31, 0xffffffffu}) {
    out.push_back(sampling("top_k", [value](auto& s) { s.set_top_k(value); }));
  }
  for (const int32_t id : {512, -1, 1 << 30}) {
    out.push_back(sampling("logit_bias", [id](auto& s) { (*s.mutable_logit_bias())[id] = 1; }));
  }
  for (const float value : {kNan, kInfinity}) {
    out.push_back(
        sampling("logit_bias", [value](auto& s) { (*s.mutable_logit_bias())[7] = value; }));
  }
  out.push_back(sampling("logit_bias", [](auto& s) {
    for (int id = 0; id < 1025; ++id) (*s.mutable_logit_bias())[id] = 1;
  }));
  return out;
}

std::vector<Wrong> wrong_stop() {
  return {stop("max_tokens", [](auto& s) { s.set_max_tokens(0); }),
          stop("max_tokens", [](auto& s) { s.set_max_tokens(8193); }),
          stop("max_tokens", [](auto& s) { s.set_max_tokens(0xffffffffu); }),
          stop("min_tokens", [](auto& s) { s.set_min_tokens(9); }),
          stop("token_ids", [](auto& s) { s.add_token_ids(512); }),
          stop("token_ids", [](auto& s) { s.add_token_ids(-5); }),
          stop("token_ids", [](auto& s) { for (int i = 0; i < 65; ++i) s.add_token_ids(i); }),
          stop("strings", [](auto& s) { s.add_strings(""); }),
          stop("strings", [](auto& s) { s.add_strings(std::string(257, 'x')); }),
          stop("strings", [](auto& s) { s.add_strings("\xc3("); }),
          stop("strings", [](auto& s) {
            for (int i = 0; i < 10'000; ++i) s.add_strings("stop " + std::to_string(i));
          })};
}

void expect_refused(const Client& client, const std::vector<Wrong>& wrongs) {
  for (size_t i = 0; i < wrongs.size(); ++i) {
    v1::GenerateRequest request = greedy(random_ids(4, 1), 8);
    wrongs[i].change(request);
    const Answer answer = client.generate(request);
    const std::string message = answer.status.error_message();
    EXPECT_EQ(answer.code(), wrongs[i].code) << wrongs[i].field << ", " << i << ": " << message;
    EXPECT_NE(message.find(wrongs[i].field), std::string::npos)
        << wrongs[i].field << ", " << i << ": " << message;
    EXPECT_EQ(answer.messages, 0) << wrongs[i].field;
  }
}

TEST(Case11, BadInputWall) {
  TestServer server(vectors("gated-deltanet"), {"--slots=2", "--max_new_tokens=8192"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const v1::GenerateRequest good = greedy(random_ids(30, 5), 8192);
  const auto neighbour = client.start(good);
  ASSERT_TRUE(neighbour->has_tokens(1));
  const size_t wrongs = wrong_inputs().size() + wrong_sampling().size() + wrong_stop().size();
  expect_refused(client, wrong_inputs());
  expect_refused(client, wrong_sampling());
  expect_refused(client, wrong_stop());

  const Answer& disturbed = neighbour->answer();
  EXPECT_TRUE(disturbed.status.ok()) << disturbed.status.error_message();
  EXPECT_EQ(disturbed.ids, client.generate(good).ids);
  EXPECT_EQ(client.metric("weir_requests_total", {"method=\"Generate\"", "outcome=\"invalid\""}),
            static_cast<double>(wrongs));
  EXPECT_TRUE(server.running());
}

TEST(Case11, PromptOfTooManyTokens) {
  TestServer server(vectors("gated-deltanet"), {"--max_prompt_tokens=50"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  EXPECT_TRUE(client.generate(greedy(random_ids(50, 1), 2)).status.ok());
  const Answer longer = client.generate(greedy(random_ids(51, 1), 2));
  EXPECT_EQ(longer.code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(longer.status.error_message().find("token_ids"), std::string::npos);
}

// Tokenize and Detokenize stand at the same door.
TEST(Case11, BadTokenIdsInDetokenize) {
  TestServer server(vectors("gated-deltanet"));
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  for (const int32_t id : {-1, 512, 1 << 30}) {
    grpc::ClientContext context;
    v1::DetokenizeRequest request;
    request.add_token_ids(id);
    v1::DetokenizeResponse response;
    const grpc::Status status = client.stub()->Detokenize(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << id;
    EXPECT_NE(status.error_message().find("token_ids"), std::string::npos);
  }
}

}  // namespace
}  // namespace weir::testing
