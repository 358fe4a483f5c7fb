// Too many requests are refused at once; too many slots are refused before anything is loaded.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/serve/client.h"

namespace weir::testing {
namespace {

TEST(Case09, FullQueue) {
  TestServer server(vectors("gated-deltanet"),
                       {"--slots=1", "--queue=4", "--max_new_tokens=100000"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const auto holder = client.start(greedy(random_ids(5, 1), 100'000));
  ASSERT_TRUE(holder->has_tokens(1));

  std::vector<v1::GenerateRequest> requests;
  for (int i = 0; i < 40; ++i) requests.push_back(greedy(random_ids(4, i), 8));
  const Calls calls = client.start_all(requests);
  const auto over = [&] {
    return std::count_if(calls.begin(), calls.end(), [](const auto& call) { return call->over(); });
  };
  EXPECT_TRUE(eventually([&] { return over() == 36; })) << over() << " were answered at once";
  EXPECT_FALSE(holder->over()) << "the refusals waited for the slot";
  holder->cancel();

  int accepted = 0;
  for (const auto& call : calls) {
    const Answer& answer = call->answer();
    if (answer.status.ok()) {
      ++accepted;
      EXPECT_EQ(answer.ids.size(), 8u);
      continue;
    }
    EXPECT_EQ(answer.code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << answer.status.error_message();
    EXPECT_NE(answer.status.error_details().find("google.rpc.RetryInfo"), std::string::npos);
  }
  EXPECT_EQ(accepted, 4);
  EXPECT_EQ(client.metric("weir_requests_rejected_total", {"reason=\"queue_full\""}), 36);
  EXPECT_EQ(client.metric("weir_requests_total", {"outcome=\"rejected\""}), 36);
}

constexpr char kManySlots[] = "--slots=10000", kLittleMemory[] = "--state_memory_mib=4";

// The line that says what was asked for, what is possible and what each costs.
std::string clamp_line(const std::string& output) {
  for (size_t at = 0; at < output.size();) {
    const size_t end = std::min(output.find('\n', at), output.size());
    const std::string line = output.substr(at, end - at);
    if (line.find("asked for 10000 slots") != std::string::npos) return line;
    at = end + 1;
  }
  return "";
}

TEST(Case10, TooManySlotsAreClamped) {
  TestServer server(vectors("gated-deltanet"), {kManySlots, kLittleMemory});
  ASSERT_TRUE(server.serving()) << server.output();
  const std::string line = clamp_line(server.output());
  EXPECT_NE(line.find("possible"), std::string::npos) << server.output();
  EXPECT_NE(line.find("bytes each"), std::string::npos) << server.output();

  const Client client(server);
  const uint32_t slots = client.model().state().slots();
  EXPECT_GT(slots, 0u);
  EXPECT_LT(slots, 10000u);
  const v1::GetModelResponse::State state = client.model().state();
  EXPECT_LE(slots * (state.recurrent_bytes() + state.conv_bytes() + state.window_bytes()),
            uint64_t{4} << 20);
  EXPECT_NE(line.find("possible " + std::to_string(slots)), std::string::npos) << line;

  // All of them can be used: nothing was promised that is not there.
  std::vector<v1::GenerateRequest> requests;
  for (uint32_t i = 0; i < slots; ++i) requests.push_back(greedy(random_ids(3, i), 4));
  for (const auto& call : client.start_all(requests)) EXPECT_TRUE(call->answer().status.ok());
}

TEST(Case10, StrictRefuses) {
  TestServer server(vectors("gated-deltanet"), {kManySlots, kLittleMemory, "--strict"});
  EXPECT_FALSE(server.serving());
  EXPECT_EQ(server.wait_exit(), 1) << server.output();
  EXPECT_NE(clamp_line(server.output()), "") << server.output();
}

// Even one sequence does not fit: there is nothing to clamp to.
TEST(Case10, NoRoomForOneSequence) {
  TestServer server(demo_model(), {"--state_memory_mib=1", "--slots=10000"});
  if (server.serving()) {
    EXPECT_GE(Client(server).model().state().slots(), 1u);
    return;
  }
  EXPECT_EQ(server.wait_exit(), 1);
  EXPECT_NE(server.output().find("one sequence needs"), std::string::npos) << server.output();
}

}  // namespace
}  // namespace weir::testing
