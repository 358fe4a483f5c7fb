// The engine's own tokens per second, with no gRPC and no text: what a server can deliver at most.
// Compare with weir-load on a weir-server of the same model, in the same hour.
//
//   engine_bench MODEL_DIR [STREAMS] [PROMPT_TOKENS] [ANSWER_TOKENS] [SECONDS] [DEVICE]
//                [VECTORS]
//
// STREAMS: how many at a time, or several such numbers, one after the other: 1,32,128.
// VECTORS: split or bf16, as weir-server's flag of that name.
//
// All streams begin together, and as all their requests are alike, they stay together: a step of
// prompts is followed by steps in which all decode.
//
// Also what a step costs the engine's thread; where the device is asked ahead, that is hidden as
// long as the thread has to wait for it at all.
//
// MODEL_DIR random-1.3b is a Gated DeltaNet of random weights: 24 layers, 16 heads of 128x128.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/device.h"
#include "engine/engine.h"
#include "engine/runner.h"
#include "tests/bench/random_model.h"

namespace weir {
namespace {

// Of steps so far.
struct Totals {
  int64_t steps = 0, late = 0;
  double waited = 0;
};

class Totalling final : public Observer {
 public:
  void on_step(const StepReport& report) override {
    const std::lock_guard lock(mutex_);
    ++totals_.steps;
    totals_.waited += report.waited;
    // The answers were there before the engine's thread came for them.
    constexpr double kAtOnce = 10e-6;
    totals_.late += report.waited < kAtOnce;
  }
  // The engine's thread tells of its occupancy before it reads its first request: there it waits
  // until all are in, else the first few would be a step ahead of the others for ever.
  void on_occupancy(const Occupancy&) override { all_in_.wait(false); }
  void begin() {
    all_in_ = true;
    all_in_.notify_all();
  }
  Totals totals() const {
    const std::lock_guard lock(mutex_);
    return totals_;
  }

 private:
  mutable std::mutex mutex_;
  Totals totals_;
  std::atomic<bool> all_in_{false};
};

struct Load {
  int32_t streams = 32, prompt_tokens = 64, answer_tokens = 128;
  double seconds = 10;
  std::string device = "cpu", vectors = "split";
};

// A closed loop of one stream: the next request goes in when the last answer has ended.
class Stream final : public TokenSink {
 public:
  Stream(Engine& engine, const Load& load, int32_t vocab, uint64_t seed)
      : engine_(engine), load_(load), vocab_(vocab), seed_(seed) {}

  void submit() {
    Request request{.new_tokens = load_.answer_tokens};
    request.sampling = {.temperature = 1, .seed = ++seed_};
    for (int32_t i = 0; i < load_.prompt_tokens; ++i) {
      request.prompt.push_back(Token((seed_ * 7919 + uint64_t(i) * 104729) % uint64_t(vocab_)));
    }
    if (engine_.submit(std::move(request), *this).admission != Admission::Accepted) std::abort();
  }
  void emit(const Emission& emission) override {
    tokens += emission.token.has_value();
    if (!emission.finish) return;
    if (stopping) {
      ended = true;
    } else {
      submit();
    }
  }

  std::atomic<int64_t> tokens{0};
  std::atomic<bool> stopping{false}, ended{false};

 private:
  Engine& engine_;
  const Load& load_;
  const int32_t vocab_;
  uint64_t seed_;
};

void wait(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

void measure(const Model& model, const Load& load, Backend& backend) {
  const Limits limits{.slots = load.streams,
                      .step_tokens = std::max(load.device == "cpu" ? 512 : 4096, load.streams),
                      .chunk_tokens = load.device == "cpu" ? 256 : 2048,
                      .queued = load.streams,
                      .prompt_tokens = load.prompt_tokens,
                      .new_tokens = load.answer_tokens,
                      .vocab = model.spec.vocab};
  const StatePool pool(model.spec, limits, backend);
  Runner runner(model, pool, limits, backend);
  Totalling observer;
  std::vector<std::unique_ptr<Stream>> streams;
  Engine engine(limits, runner, observer);
  for (int32_t i = 0; i < load.streams; ++i) {
    streams.push_back(std::make_unique<Stream>(engine, load, limits.vocab, uint64_t(i) << 32));
    streams.back()->submit();
  }
  observer.begin();
  const auto sum = [&streams] {
    int64_t tokens = 0;
    for (const auto& stream : streams) tokens += stream->tokens;
    return tokens;
  };
  wait(1);  // past the first prompts
  const auto begin = std::chrono::steady_clock::now();
  const int64_t tokens_before = sum();
  const Totals before = observer.totals();
  wait(load.seconds);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const double rate = double(sum() - tokens_before) / took.count();
  const Totals after = observer.totals();
  for (const auto& stream : streams) stream->stopping = true;
  for (const auto& stream : streams) {
    while (!stream->ended) wait(0.001);
  }
  std::printf("%s: %d streams, prompts of %d, answers of %d: %.0f tokens/s\n",
              backend.info().name.c_str(), load.streams, load.prompt_tokens, load.answer_tokens,
              rate);
  const auto steps = double(after.steps - before.steps);
  const double waited = after.waited - before.waited;
  std::printf("a step: %.3f ms, of which the engine's thread works %.0f us and waits %.0f us; "
              "%.1f %% of the steps were done before it came\n",
              took.count() / steps * 1e3, (took.count() - waited) / steps * 1e6,
              waited / steps * 1e6, 100 * double(after.late - before.late) / steps);
}

int run(const char* folder, Load load, const std::vector<int32_t>& streams) {
  const auto opened = open_device(load.device, {}, load.vectors);
  if (!opened.ok()) {
    std::fprintf(stderr, "%s\n", std::string(opened.status().message()).c_str());
    return 1;
  }
  const std::unique_ptr<Backend>& backend = *opened;
  absl::StatusOr<Model> model = absl::UnknownError("");
  if (std::string(folder) == "random-1.3b") {
    model = test::random_model(test::model_1_3b(), 1, *backend);
  } else {
    model = load_model(folder, *backend);
  }
  if (!model.ok()) {
    std::fprintf(stderr, "%s\n", std::string(model.status().message()).c_str());
    return 1;
  }
  for (const int32_t count : streams) {
    load.streams = count;
    measure(*model, load, *backend);
  }
  return 0;
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: engine_bench MODEL_DIR [STREAMS,..] [PROMPT] [ANSWER] [SECONDS] "
                         "[DEVICE] [VECTORS]\n");
    return 2;
  }
  weir::Load load;
  std::vector<int32_t> streams;
  for (const char* at = argc > 2 ? argv[2] : "32"; at != nullptr; at = std::strchr(at, ',')) {
    at += *at == ',' ? 1 : 0;
    streams.push_back(std::atoi(at));
    if (streams.back() < 1) {
      std::fprintf(stderr, "STREAMS %s: expected numbers of 1 or more, as in 1,32,128\n", argv[2]);
      return 2;
    }
  }
  if (argc > 3) load.prompt_tokens = std::atoi(argv[3]);
  if (argc > 4) load.answer_tokens = std::atoi(argv[4]);
  if (argc > 5) load.seconds = std::atof(argv[5]);
  if (argc > 6) load.device = argv[6];
  if (argc > 7) load.vectors = argv[7];
  return weir::run(argv[1], load, streams);
}
