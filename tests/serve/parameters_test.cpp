// What a request means, and which requests are refused, field by field.
#include "server/parameters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace weir {
namespace {

class Parameters : public ::testing::Test {
 protected:
  Parameters() {
    auto opened = Tokenizer::open_folder(WEIR_SOURCE_DIR "/models/demo");
    EXPECT_TRUE(opened.ok()) << opened.status();
    tokenizer_.emplace(*std::move(opened));
    spec_ = {.vocab = tokenizer_->size() + 10, .bos = 1, .eos = {2}};
    limits_ = {.prompt_tokens = 20, .new_tokens = 300, .vocab = spec_.vocab};
    model_.emplace(ServedModel{
        .name = "demo", .spec = spec_, .tokenizer = *tokenizer_, .limits = limits_});
    request_.set_prompt("Water flows down");
  }

  std::variant<GenerateParameters, Refusal> read() {
    return read_parameters(request_, *model_, {.seed = 77, .request_id = "made"});
  }
  GenerateParameters accepted() {
    auto out = read();
    if (const Refusal* refusal = std::get_if<Refusal>(&out)) {
      ADD_FAILURE() << refusal->field << ": " << refusal->problem;
      return {};
    }
    return std::get<GenerateParameters>(out);
  }
  // Field and problem, or nothing when the request is accepted.
  std::string refused() {
    auto out = read();
    const Refusal* refusal = std::get_if<Refusal>(&out);
    return refusal == nullptr ? "" : refusal->field + ": " + refusal->problem;
  }

  std::optional<Tokenizer> tokenizer_;
  ModelSpec spec_;
  Limits limits_;
  std::optional<ServedModel> model_;
  v1::GenerateRequest request_;
};

TEST_F(Parameters, DefaultsAreFilledIn) {
  const GenerateParameters out = accepted();
  EXPECT_EQ(out.request.new_tokens, 256);
  EXPECT_EQ(out.request.stop, std::vector<Token>{2});
  EXPECT_EQ(out.request.prompt.front(), 1) << "bos";
  EXPECT_EQ(out.request.sampling.temperature, 1);
  EXPECT_EQ(out.request.sampling.seed, 77u);
  EXPECT_EQ(out.effective.request_id(), "made");
  EXPECT_EQ(out.effective.sampling().seed(), 77u);
  EXPECT_EQ(out.effective.sampling().top_p(), 1);
  EXPECT_TRUE(out.effective.sampling().has_min_p());
  EXPECT_EQ(out.effective.stop().max_tokens(), 256u);
  EXPECT_EQ(out.effective.prompt_tokens(), out.request.prompt.size());
  EXPECT_FALSE(out.answer.logprobs);
  EXPECT_TRUE(out.answer.return_token_ids);
}

// Proto3 zero is a value like another, not "unset".
TEST_F(Parameters, ZeroIsNotADefault) {
  request_.mutable_sampling()->set_temperature(0);
  request_.mutable_sampling()->set_seed(0);
  const GenerateParameters out = accepted();
  EXPECT_EQ(out.request.sampling.temperature, 0);
  EXPECT_EQ(out.request.sampling.seed, 0u);
  request_.mutable_stop()->set_max_tokens(0);
  EXPECT_EQ(refused(), "stop.max_tokens: expected [1, 300], found 0");
}

TEST_F(Parameters, TokenIdsAreTakenAsTheyAre) {
  for (const Token id : {5, 6, 7}) request_.mutable_token_ids()->add_ids(id);
  EXPECT_EQ(accepted().request.prompt, (std::vector<Token>{5, 6, 7}));
  request_.set_add_bos(true);
  EXPECT_EQ(refused().substr(0, 8), "add_bos:");
}

TEST_F(Parameters, PaddingOfTheVocabularyIsNotForClients) {
  request_.mutable_token_ids()->add_ids(tokenizer_->size() - 1);
  EXPECT_EQ(refused(), "");
  request_.mutable_token_ids()->add_ids(tokenizer_->size());
  EXPECT_EQ(refused(), "token_ids.ids[1]: expected 0..4095, found 4096");
}

TEST_F(Parameters, EmptyInputs) {
  request_.clear_input();
  EXPECT_EQ(refused(), "prompt: expected prompt or token_ids, found neither");
  request_.set_prompt("");
  EXPECT_EQ(refused().substr(0, 7), "prompt:");
  request_.mutable_token_ids();
  EXPECT_EQ(refused(), "token_ids: expected at least one token, found none");
}

TEST_F(Parameters, LongPrompts) {
  for (int i = 0; i < 20; ++i) request_.mutable_token_ids()->add_ids(5);
  EXPECT_EQ(refused(), "");
  request_.mutable_token_ids()->add_ids(5);
  EXPECT_EQ(refused(), "token_ids: expected at most 20 tokens, found 21");
}

TEST_F(Parameters, AnotherModelIsNotFound) {
  request_.set_model("demo");
  EXPECT_EQ(refused(), "");
  request_.set_model("other");
  const auto out = read();
  ASSERT_TRUE(std::holds_alternative<Refusal>(out));
  EXPECT_TRUE(std::get<Refusal>(out).not_found);
}

TEST_F(Parameters, WhatIsNotServedYetIsNamed) {
  request_.set_n(1);
  EXPECT_EQ(refused(), "");
  request_.set_n(1'000'000);
  EXPECT_EQ(refused().substr(0, 2), "n:");
  request_.clear_n();
  request_.set_session_id("s");
  EXPECT_EQ(refused().substr(0, 11), "session_id:");
}

TEST_F(Parameters, SamplingOutOfRange) {
  using Change = std::function<void(v1::SamplingParameters&)>;
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<std::string, Change>> wrong = {
      {"sampling.temperature: expected [0, 100], found -1", [](auto& s) { s.set_temperature(-1); }},
      {"sampling.temperature: expected [0, 100], found nan",
       [=](auto& s) { s.set_temperature(nan); }},
      {"sampling.temperature: expected [0, 100], found inf",
       [=](auto& s) { s.set_temperature(inf); }},
      {"sampling.top_p: expected (0, 1], found 0", [](auto& s) { s.set_top_p(0); }},
      {"sampling.top_p: expected (0, 1], found 1.5", [](auto& s) { s.set_top_p(1.5); }},
      {"sampling.top_k: expected [0, 4106], found 2147483648",
       [](auto& s) { s.set_top_k(1u << 31); }},
      {"sampling.typical_p: expected (0, 1], found 0", [](auto& s) { s.set_typical_p(0); }},
      {"sampling.repetition_penalty: expected (0, 100], found 0",
       [](auto& s) { s.set_repetition_penalty(0); }},
      {"sampling.logit_bias: expected 0..4095, found -1",
       [](auto& s) { (*s.mutable_logit_bias())[-1] = 1; }},
      {"sampling.logit_bias[3]: expected a finite number or -inf, found nan",
       [=](auto& s) { (*s.mutable_logit_bias())[3] = nan; }},
  };
  for (const auto& [expected, change] : wrong) {
    request_.clear_sampling();
    change(*request_.mutable_sampling());
    EXPECT_EQ(refused(), expected);
  }
  request_.clear_sampling();
  (*request_.mutable_sampling()->mutable_logit_bias())[3] = -inf;
  EXPECT_EQ(refused(), "");
}

TEST_F(Parameters, Stops) {
  request_.mutable_stop()->add_strings("end");
  request_.mutable_stop()->add_token_ids(9);
  request_.mutable_stop()->set_ignore_eos(true);
  const GenerateParameters out = accepted();
  EXPECT_EQ(out.request.stop, std::vector<Token>{9});
  EXPECT_EQ(out.answer.stop_strings, std::vector<std::string>{"end"});
  request_.mutable_stop()->add_strings("");
  EXPECT_EQ(refused(), "stop.strings[1]: expected 1..256 bytes, found 0");
  request_.mutable_stop()->clear_strings();
  request_.mutable_stop()->set_min_tokens(257);
  EXPECT_EQ(refused(), "stop.min_tokens: expected [0, 256], found 257");
}

TEST_F(Parameters, Outputs) {
  request_.mutable_output()->set_top_logprobs(20);
  request_.mutable_output()->set_echo(true);
  const GenerateParameters out = accepted();
  EXPECT_TRUE(out.answer.logprobs) << "implied by top_logprobs";
  EXPECT_EQ(out.answer.echo, "Water flows down");
  request_.mutable_output()->set_top_logprobs(21);
  EXPECT_EQ(refused(), "output.top_logprobs: expected [0, 20], found 21");
  request_.clear_output();
  request_.mutable_output()->set_stream_chunk_tokens(0);
  EXPECT_EQ(refused(), "output.stream_chunk_tokens: expected [1, 1024], found 0");
}

TEST_F(Parameters, DefaultsOfTheModelNameNoSeed) {
  const v1::Effective defaults = default_parameters(*model_);
  EXPECT_FALSE(defaults.sampling().has_seed());
  EXPECT_EQ(defaults.stop().max_tokens(), 256u);
}

}  // namespace
}  // namespace weir
