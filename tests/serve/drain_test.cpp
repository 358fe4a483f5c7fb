// Going down: who is running finishes or is told so, nobody new gets in, nothing hangs.
#include <gtest/gtest.h>
#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "clients/health.h"
#include "tests/serve/client.h"

namespace weir::testing {
namespace {

// A live Watch of the health service.
class HealthWatch final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  HealthWatch(const std::shared_ptr<grpc::Channel>& channel, const std::string& service)
      : stub_(channel) {
    const grpc::Slice slice(health_request(service));
    request_ = grpc::ByteBuffer(&slice, 1);
    stub_.PrepareBidiStreamingCall(&context_, "/grpc.health.v1.Health/Watch", grpc::StubOptions(),
                                   this);
    StartWriteLast(&request_, grpc::WriteOptions());
    StartRead(&response_);
    StartCall();
  }
  ~HealthWatch() override {
    context_.TryCancel();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

  bool saw(Health health) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::find(seen_.begin(), seen_.end(), health) != seen_.end();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    grpc::Slice slice;
    const bool one = response_.TrySingleSlice(&slice).ok();
    const std::string bytes(reinterpret_cast<const char*>(slice.begin()), slice.size());
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      seen_.push_back(one ? parse_health(bytes) : Health::Unknown);
    }
    StartRead(&response_);
  }
  void OnDone(const grpc::Status&) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

 private:
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer request_, response_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Health> seen_;
  bool done_ = false;
};

constexpr char kService[] = "weir.v1.Generation";

// 8 running and 8 queued.
Calls start_sixteen(const Client& client, uint32_t tokens) {
  std::vector<v1::GenerateRequest> requests;
  for (int i = 0; i < 8; ++i) requests.push_back(greedy(random_ids(5, i), tokens));
  Calls calls = client.start_all(requests);
  for (const auto& call : calls) EXPECT_TRUE(call->has_tokens(1));
  for (Calls queued = client.start_all(requests); auto& call : queued) {
    calls.push_back(std::move(call));
  }
  EXPECT_TRUE(eventually([&] { return client.metric("weir_requests_waiting") == 8; }));
  return calls;
}

// Long enough that all 16 are still there when the test looks, short enough to wait for.
constexpr uint32_t kMinutesAtMost = 4000, kEndless = 1'000'000;

TEST(Case19, RunningCallsFinish) {
  TestServer server(vectors("gated-deltanet"), {"--slots=8", "--drain_seconds=600"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const HealthWatch watch(client.channel(), kService);
  EXPECT_TRUE(eventually([&] { return watch.saw(Health::Serving); }));
  const Calls calls = start_sixteen(client, kMinutesAtMost);

  server.signal(SIGTERM);
  EXPECT_TRUE(eventually([&] { return watch.saw(Health::NotServing); }));
  const bool drained = std::all_of(calls.begin(), calls.end(), [](auto& c) { return c->over(); });
  EXPECT_FALSE(drained) << "the new call below came too late to show anything";
  EXPECT_EQ(client.generate(greedy({5}, 1)).code(), grpc::StatusCode::UNAVAILABLE);

  for (size_t i = 0; i < 8; ++i) {
    const Answer& answer = calls[i]->answer();
    EXPECT_TRUE(answer.status.ok()) << i << ": " << answer.status.error_message();
    EXPECT_EQ(answer.ids.size(), kMinutesAtMost);
  }
  for (size_t i = 8; i < 16; ++i) {
    const Answer& answer = calls[i]->answer();
    EXPECT_TRUE(answer.status.ok() || answer.code() == grpc::StatusCode::UNAVAILABLE)
        << i << ": " << answer.status.error_message();
  }
  EXPECT_EQ(server.wait_exit(), 0) << server.output();
}

TEST(Case19, GraceEnds) {
  TestServer server(vectors("gated-deltanet"),
                       {"--slots=8", "--drain_seconds=1", "--max_new_tokens=1000000"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const Calls calls = start_sixteen(client, kEndless);
  server.signal(SIGTERM);
  for (const auto& call : calls) {
    EXPECT_EQ(call->answer().code(), grpc::StatusCode::UNAVAILABLE)
        << call->answer().status.error_message();
  }
  EXPECT_EQ(server.wait_exit(), 0) << server.output();
}

TEST(Case19, SecondSignalEndsAtOnce) {
  TestServer server(vectors("gated-deltanet"),
                       {"--slots=8", "--drain_seconds=86400", "--max_new_tokens=1000000"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const HealthWatch watch(client.channel(), kService);
  const Calls calls = start_sixteen(client, kEndless);
  server.signal(SIGTERM);
  EXPECT_TRUE(eventually([&] { return watch.saw(Health::NotServing); }));
  EXPECT_TRUE(server.running());
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // sooner it is the same wish
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait_exit(), 1) << server.output();
}

// timeout(1) sends its signal twice.
TEST(Case19, TheSameSignalTwiceIsOneWish) {
  TestServer server(vectors("gated-deltanet"),
                    {"--slots=8", "--drain_seconds=1", "--max_new_tokens=1000000"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const Calls calls = start_sixteen(client, kEndless);
  server.signal(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // pending, two would be one anyway
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait_exit(), 0) << server.output();
}

// Another signal is another wish, however soon.
TEST(Case19, AnotherSignalEndsAtOnce) {
  TestServer server(vectors("gated-deltanet"),
                    {"--slots=8", "--drain_seconds=86400", "--max_new_tokens=1000000"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const HealthWatch watch(client.channel(), kService);
  const Calls calls = start_sixteen(client, kEndless);
  server.signal(SIGTERM);
  EXPECT_TRUE(eventually([&] { return watch.saw(Health::NotServing); }));
  server.signal(SIGINT);
  EXPECT_EQ(server.wait_exit(), 1) << server.output();
}


TEST(Case19, IdleServerGoesAtOnce) {
  TestServer server(vectors("gated-deltanet"), {"--drain_seconds=86400"});
  ASSERT_TRUE(server.serving()) << server.output();
  EXPECT_EQ(check_health(Client(server).channel(), "", 10), Health::Serving);
  server.signal(SIGINT);
  EXPECT_EQ(server.wait_exit(), 0) << server.output();
}

}  // namespace
}  // namespace weir::testing
