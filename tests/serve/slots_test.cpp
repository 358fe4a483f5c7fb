// A sequence's slot is clean when it gets it and free when it ends, however it ends.
#include <gtest/gtest.h>

#include <limits>

#include "tests/serve/client.h"

namespace weir::testing {
namespace {

constexpr uint32_t kEndless = 100'000;  // tokens; nothing here waits for that many

const std::vector<std::string> kOneSlot = {"--slots=1", "--max_new_tokens=100000"};

bool is_idle(const Client& client) {
  return client.metric("weir_state_slots", {"kind=\"used\""}) == 0 &&
         client.metric("weir_requests_running") == 0 && client.metric("weir_requests_waiting") == 0;
}

class Case03 : public ::testing::TestWithParam<const char*> {};

TEST_P(Case03, CleanSlot) {
  const v1::GenerateRequest b = greedy(random_ids(9, 2), 48);
  Ids expected;
  {
    TestServer fresh(vectors(GetParam()), kOneSlot);
    ASSERT_TRUE(fresh.serving()) << fresh.output();
    expected = Client(fresh).generate(b).ids;
    ASSERT_EQ(expected.size(), 48u);
  }
  TestServer server(vectors(GetParam()), kOneSlot);
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const Ids odd = random_ids(513, 99);

  EXPECT_TRUE(client.generate(greedy(odd, 30)).status.ok());
  EXPECT_EQ(client.generate(b).ids, expected) << "after an answer";

  const auto cancelled = client.start(greedy(odd, kEndless));
  EXPECT_TRUE(cancelled->has_tokens(5));
  cancelled->cancel();
  EXPECT_EQ(client.generate(b).ids, expected) << "after a cancelled answer";

  EXPECT_EQ(client.generate(greedy(odd, kEndless), 0.5).code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(client.generate(b).ids, expected) << "after one that was too late";

  v1::GenerateRequest failing = greedy(odd, 30);  // nothing may be drawn: no finite number is left
  for (int id = 0; id < 512; ++id) {
    (*failing.mutable_sampling()->mutable_logit_bias())[id] =
        -std::numeric_limits<float>::infinity();
  }
  EXPECT_EQ(client.generate(failing).code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(client.generate(b).ids, expected) << "after one that failed";
}

INSTANTIATE_TEST_SUITE_P(Models, Case03, ::testing::Values("gated-deltanet", "hybrid-gdn"),
                         [](const auto& info) {
                           return std::string(info.param) == "hybrid-gdn" ? "hybrid" : "recurrent";
                         });

TEST(Case07, CancelFrees) {
  TestServer server(demo_model(), {"--slots=8"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const auto request = [](int i, uint32_t tokens) {
    return greedy(random_ids(6, i, 4096), tokens);
  };

  std::vector<v1::GenerateRequest> requests;
  // The first three are cancelled and may not end by themselves; the others are compared.
  for (int i = 0; i < 8; ++i) requests.push_back(request(i, i < 3 ? 4000 : 300));
  const Calls running = client.start_all(requests);
  for (const auto& call : running) ASSERT_TRUE(call->has_tokens(1));
  const Calls queued = client.start_all({request(8, 10), request(9, 10), request(10, 10)});
  EXPECT_TRUE(eventually([&] { return client.metric("weir_requests_waiting") == 3; }));

  for (int i = 0; i < 3; ++i) running[i]->cancel();
  for (const auto& call : queued) EXPECT_TRUE(call->answer().status.ok());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(running[i]->answer().code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_EQ(client.metric("weir_requests_total", {"method=\"Generate\"", "outcome=\"cancelled\""}),
            3);
  std::vector<Ids> in_company;
  for (int i = 3; i < 8; ++i) in_company.push_back(running[i]->answer().ids);
  for (int i = 3; i < 8; ++i) {
    EXPECT_EQ(client.generate(requests[i]).ids, in_company[i - 3]) << "neighbour " << i;
  }
  EXPECT_TRUE(eventually([&] { return is_idle(client); }));
}

TEST(Case07, CancelWhileQueued) {
  TestServer server(vectors("gated-deltanet"), kOneSlot);
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const auto running = client.start(greedy(random_ids(5, 1), kEndless));
  ASSERT_TRUE(running->has_tokens(1));
  const auto queued = client.start(greedy(random_ids(5, 2), 5));
  EXPECT_TRUE(eventually([&] { return client.metric("weir_requests_waiting") == 1; }));
  queued->cancel();
  EXPECT_TRUE(eventually([&] { return client.metric("weir_requests_waiting") == 0; }));
  EXPECT_EQ(queued->answer().code(), grpc::StatusCode::CANCELLED);
  EXPECT_FALSE(running->over());
  running->cancel();
  EXPECT_TRUE(eventually([&] { return is_idle(client); }));
  EXPECT_EQ(client.metric("weir_requests_ended_early_total",
                          {"outcome=\"cancelled\"", "phase=\"queued\""}), 1);
  EXPECT_EQ(client.metric("weir_requests_ended_early_total",
                          {"outcome=\"cancelled\"", "phase=\"running\""}), 1);
}

// The tokens counted are the tokens that clients got, also for those that left early.
TEST(Case08, Deadline) {
  TestServer server(vectors("gated-deltanet"), kOneSlot);
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const auto late = [&](const char* phase) {
    return client.metric("weir_requests_ended_early_total",
                         {"outcome=\"deadline\"", std::string("phase=\"") + phase + "\""});
  };

  const Answer running = client.generate(greedy(random_ids(5, 1), kEndless), 0.5);
  EXPECT_EQ(running.code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_FALSE(running.ids.empty()) << "tokens drawn before the deadline are streamed";
  EXPECT_TRUE(eventually([&] { return is_idle(client) && late("running") == 1; }));

  const auto holder = client.start(greedy(random_ids(5, 2), kEndless));
  ASSERT_TRUE(holder->has_tokens(1));
  const Answer queued = client.generate(greedy(random_ids(5, 3), 5), 0.2);
  EXPECT_EQ(queued.code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(queued.ids.empty());
  EXPECT_TRUE(eventually([&] { return late("queued") == 1; }));
  EXPECT_FALSE(holder->over());
  holder->cancel();
  EXPECT_TRUE(eventually([&] { return is_idle(client); }));
  EXPECT_EQ(client.metric("weir_requests_total", {"outcome=\"deadline\""}), 2);
}

}  // namespace
}  // namespace weir::testing
