// Many threads submit to one engine and cancel, on the hash model: what each client gets must be
// what the model answers alone, or a beginning of it when it was cut.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "tests/sim/engine_fakes.h"
#include "tests/sim/random_request.h"

namespace weir {
namespace {

// A hash model that takes its time now and then, so that other threads get between its steps.
class UnevenModel final : public StepRunner {
 public:
  UnevenModel(const Limits& limits, size_t steps_out, uint64_t seed)
      : model_(limits, steps_out), chance_(seed) {}
  size_t steps_out() const override { return model_.steps_out(); }
  void begin(const StepBatch& batch) override { model_.begin(batch); }
  std::span<const Drawn> finish() override {
    for (int32_t i = chance_.pick(-20, 20); i > 0; --i) std::this_thread::yield();
    return model_.finish();
  }
  size_t step_bytes() const override { return model_.step_bytes(); }

 private:
  HashModel model_;
  Chance chance_;
};

// A client that may cancel, from inside an emission or from its own thread.
struct Client final : Collector {
  void emit(const Emission& emission) override {
    const bool cancels = emission.token && ++seen == cancel_at && id.load() != 0;
    if (cancels) {
      cancelled = true;
      engine->cancel(id);
    }
    Collector::emit(emission);
  }

  Engine* engine = nullptr;
  Request request;
  std::atomic<SequenceId> id = 0;
  std::atomic<bool> cancelled = false;
  int32_t cancel_at = 0, seen = 0;
};

using Clients = std::vector<std::unique_ptr<Client>>;

Limits random_limits(Chance& chance) {
  Limits limits;
  limits.slots = chance.pick(1, 6);
  limits.pages = chance.percent(50) ? chance.pick(10, 40) : 0;
  limits.page_tokens = chance.pick(4, 16);
  limits.step_tokens = limits.slots + chance.pick(0, 20);
  limits.padding = chance.pick(0, 12);
  limits.chunk_tokens = chance.pick(1, limits.step_tokens);
  limits.queued = chance.pick(0, 6);
  limits.prompt_tokens = 30;
  limits.new_tokens = 30;
  limits.vocab = 40;
  return limits;
}

// One thread's life: submits, waits for some, cancels some; goes on when the queue is full.
void run_clients(Engine& engine, const Limits& limits, uint64_t seed, Clients& clients) {
  Chance chance(seed);
  for (int i = 0; i < 25; ++i) {
    auto client = std::make_unique<Client>();
    client->engine = &engine;
    client->request = random_request(chance, limits);
    if (chance.percent(15)) {
      client->request.deadline = Engine::now() + chance.pick(0, 3'000'000);
    }
    if (chance.percent(20)) client->cancel_at = chance.pick(1, 10);
    const Engine::Submitted submitted = engine.submit(client->request, *client);
    if (submitted.admission != Admission::Accepted) {
      ASSERT_TRUE(submitted.admission == Admission::QueueFull ||
                  submitted.admission == Admission::TooManyPages);
      if (!clients.empty() && submitted.admission == Admission::QueueFull) clients.back()->wait();
      continue;
    }
    client->id = submitted.id;
    clients.push_back(std::move(client));
    if (chance.percent(20)) {
      Client& victim = *clients[size_t(chance.pick(0, int32_t(clients.size()) - 1))];
      victim.cancelled = true;
      engine.cancel(victim.id);
    }
    if (chance.percent(30)) clients.back()->wait_for_tokens(size_t(chance.pick(1, 5)));
  }
}

// Returns the tokens that the client got.
size_t check_client(const Client& client, const Limits& limits, bool cut) {
  const HashModel::Answer expected = HashModel::alone(client.request, limits);
  const std::vector<Token> got = client.tokens();
  EXPECT_LE(got.size(), expected.tokens.size());
  for (size_t i = 0; i < std::min(got.size(), expected.tokens.size()); ++i) {
    EXPECT_EQ(got[i], expected.tokens[i].token);
  }
  EXPECT_TRUE(client.finish());
  if (client.finish() == Finish::Cancelled) {
    EXPECT_TRUE(client.cancelled || cut);
  } else if (client.finish() == Finish::Deadline) {
    EXPECT_LE(client.request.deadline, Engine::now());
  } else {
    EXPECT_EQ(client.finish(), expected.finish);
    EXPECT_EQ(got.size(), expected.tokens.size());
    EXPECT_EQ(client.prompt_scores(), expected.prompt.size());
  }
  return got.size();
}

void simulate(uint64_t seed) {
  constexpr size_t kThreads = 6;
  Chance chance(seed);
  const Limits limits = random_limits(chance);
  UnevenModel model(limits, size_t(chance.pick(1, 2)), chance.bits());
  RecordingObserver observer;
  const bool stops_early = chance.percent(50);  // the engine goes while sequences still run
  const bool cancels_all = chance.percent(20);
  Clients clients[kThreads];
  {
    Engine engine(limits, model, observer);
    std::vector<std::thread> threads;
    for (Clients& own : clients) {
      threads.emplace_back([&engine, &limits, &own, seed = chance.bits()] {
        run_clients(engine, limits, seed, own);
      });
    }
    if (cancels_all) engine.cancel_all();
    for (std::thread& thread : threads) thread.join();
    for (const Clients& own : clients) {
      for (const auto& client : own) {
        if (!stops_early) client->wait();
      }
    }
  }
  const bool cut = stops_early || cancels_all;
  size_t tokens = 0;
  for (const Clients& own : clients) {
    for (const auto& client : own) tokens += check_client(*client, limits, cut);
  }
  EXPECT_EQ(size_t(observer.total().drawn), tokens);
  const Occupancy last = observer.seen().back();
  EXPECT_EQ(last.waiting + last.running, 0);
  EXPECT_EQ(last.free_slots, limits.slots);
  EXPECT_EQ(last.free_pages, limits.pages);
}

TEST(EngineSim, EveryClientOfManyThreadsGetsItsOwnAnswer) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    simulate(seed);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace weir
