// A request's tokens do not depend on who else is being served.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/serve/client.h"

namespace weir::testing {
namespace {

using Requests = std::vector<v1::GenerateRequest>;

constexpr int kLengths[] = {1, 2, 3, 4, 5, 17, 31, 64, 65, 100, 129, 200, 300};

Requests thirteen() {
  Requests requests;
  for (const int length : kLengths) requests.push_back(greedy(random_ids(length, length), 40));
  return requests;
}

std::vector<Ids> alone(const Client& client, const Requests& requests) {
  std::vector<Ids> out;
  for (const v1::GenerateRequest& request : requests) {
    const Answer answer = client.generate(request);
    EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
    EXPECT_EQ(answer.ids.size(), request.stop().max_tokens());
    out.push_back(answer.ids);
  }
  return out;
}

void expect_answers(const Calls& calls, const std::vector<Ids>& expected, const char* when) {
  for (size_t i = 0; i < calls.size(); ++i) {
    const Answer& answer = calls[i]->answer();
    EXPECT_TRUE(answer.status.ok()) << when << ", request " << i << ": "
                                    << answer.status.error_message();
    EXPECT_EQ(answer.ids, expected[i]) << when << ", request " << i;
  }
}

class Case01 : public ::testing::TestWithParam<const char*> {};

TEST_P(Case01, AloneOrInCompany) {
  TestServer server(vectors(GetParam()), {"--slots=16"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  Requests requests = thirteen();
  std::vector<Ids> expected = alone(client, requests);
  expect_answers(client.start_all(requests), expected, "all at once");
  std::reverse(requests.begin(), requests.end());
  std::reverse(expected.begin(), expected.end());
  expect_answers(client.start_all(requests), expected, "in reverse order");
}

INSTANTIATE_TEST_SUITE_P(Models, Case01,
                         ::testing::Values("transformer", "delta-net", "gated-deltanet", "kda",
                                           "gdn2", "hybrid-gdn", "hybrid-kda"),
                         [](const auto& info) {
                           std::string name = info.param;
                           name.erase(std::remove(name.begin(), name.end(), '-'), name.end());
                           return name;
                         });

// Rows that are garbled only at some batch sizes, or by what stands in padding rows.
TEST(Case05, OddBatchSizes) {
  TestServer server(vectors("hybrid-gdn"), {"--slots=17"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  Requests requests;
  for (int i = 0; i < 17; ++i) requests.push_back(greedy(random_ids(3 + i, 50 + i), 24));
  const std::vector<Ids> expected = alone(client, requests);
  for (size_t k = 1; k <= requests.size(); ++k) {
    const Requests some(requests.begin(), requests.begin() + static_cast<std::ptrdiff_t>(k));
    expect_answers(client.start_all(some), expected,
                   (std::to_string(k) + " at a time").c_str());
  }
}

// Arrivals in one burst, and spread: neither may change, lose or mix answers.
TEST(Case06, Storm) {
  TestServer server(vectors("gated-deltanet"), {"--slots=8", "--queue=64"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  Requests requests;
  for (int i = 0; i < 64; ++i) requests.push_back(greedy(random_ids(5 + i % 40, 900 + i), 200));
  const std::vector<Ids> expected = alone(client, requests);

  const Calls burst = client.start_all(requests);
  double waiting = 0;
  eventually([&] {
    waiting = client.metric("weir_requests_waiting");
    const auto over = [](const auto& call) { return call->over(); };
    return waiting > 0 || std::all_of(burst.begin(), burst.end(), over);
  });
  EXPECT_GT(waiting, 0) << "the queue was never seen in the metrics";
  expect_answers(burst, expected, "burst");

  Calls spaced;
  for (const v1::GenerateRequest& request : requests) {
    spaced.push_back(client.start(request));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the case's own spacing
  }
  expect_answers(spaced, expected, "20 ms apart");
  EXPECT_TRUE(eventually([&] { return client.metric("weir_requests_waiting") == 0; }));
}

TEST(Case14, Seeds) {
  TestServer server(vectors("kda"), {"--slots=8"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const Ids prompt = random_ids(20, 1);
  const v1::GenerateRequest request = sampled(prompt, 32, 77);
  const Ids first = client.generate(request).ids;
  for (int i = 0; i < 9; ++i) EXPECT_EQ(client.generate(request).ids, first) << "alone, " << i;

  Requests mixed;
  for (int i = 0; i < 30; ++i) {
    mixed.push_back(i % 3 == 0 ? request : sampled(random_ids(1 + i, i), 20 + i, 1000 + i));
  }
  const Calls calls = client.start_all(mixed);
  for (size_t i = 0; i < calls.size(); i += 3) {
    EXPECT_EQ(calls[i]->answer().ids, first) << "in company, " << i;
  }
  EXPECT_NE(client.generate(sampled(prompt, 32, 78)).ids, first);
}

TEST(Case14, SeedThatTheServerDrewIsReturned) {
  TestServer server(vectors("kda"));
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  v1::GenerateRequest request = sampled(random_ids(20, 1), 32, 0);
  request.mutable_sampling()->clear_seed();
  const Answer drawn = client.generate(request), other = client.generate(request);
  ASSERT_TRUE(drawn.effective.sampling().has_seed());
  EXPECT_NE(drawn.effective.sampling().seed(), other.effective.sampling().seed());
  request.mutable_sampling()->set_seed(drawn.effective.sampling().seed());
  EXPECT_EQ(client.generate(request).ids, drawn.ids);
}

}  // namespace
}  // namespace weir::testing
