// Decode of a 1.3B-shaped random Gated DeltaNet on the CPU: what a step costs at batch 1, 4 and 16,
// beside the read bandwidth that the same threads reach in the same run.
//
//   cpu_decode_bench [--threads N] [--steps N] [--json FILE]
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/runner.h"
#include "engine/state_pool.h"
#include "kernels/backend.h"
#include "kernels/thread_pool.h"
#include "nlohmann/json.hpp"
#include "tests/bench/random_model.h"

namespace weir {
namespace {

constexpr std::array kBatches = {1, 4, 16};
constexpr int32_t kBatchMax = 16;

struct Flags {
  int threads = 0, steps = 20;
  std::string json;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Passes everything on, and counts the time and the cost of each kind of op.
class TimedBackend final : public Backend {
 public:
  explicit TimedBackend(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}

  DeviceInfo info() const override { return backend_->info(); }
  void* allocate(size_t bytes) override { return backend_->allocate(bytes); }
  const void* adopt(const void* host, size_t bytes) override {
    return backend_->adopt(host, bytes);
  }
  void upload(void* device, const void* host, size_t bytes) override {
    backend_->upload(device, host, bytes);
  }
  void download(void* host, const void* device, size_t bytes) override {
    backend_->download(host, device, bytes);
  }
  void copy(void* target, const void* source, size_t bytes) override {
    backend_->copy(target, source, bytes);
  }
  const char* unserved(const Program& program) const override {
    return backend_->unserved(program);
  }
  void run(const Program& program) override {
    for (const Op& op : program) {
      const Program one = {op};
      const double begin = now();
      backend_->run(one);
      seconds_[name(op)] += now() - begin;
      cost_ += cost(op);
    }
  }
  void finish() override { backend_->finish(); }

  const std::map<std::string, double>& seconds() const { return seconds_; }
  const Cost& sum() const { return cost_; }
  void reset() {
    seconds_.clear();
    cost_ = {};
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::map<std::string, double> seconds_;
  Cost cost_;
};

// Bytes a second that these threads read from a large array: the best of several passes.
class ReadBandwidth {
 public:
  explicit ReadBandwidth(int threads) : pool_(threads), data_(kWords, 1) {}

  double measure() {
    for (int pass = 0; pass < 5; ++pass) {
      std::atomic<uint64_t> sum{0};
      const double begin = now();
      pool_.parallel_for(
          int64_t(kWords / kClaimWords),
          [&](int64_t first, int64_t end) {
            sum += sum_of(data_.data() + first * kClaimWords, size_t(end - first) * kClaimWords);
          },
          1);
      const double seconds = now() - begin;
      if (sum.load() != kWords) std::abort();
      best_ = std::max(best_, double(kWords * sizeof(uint64_t)) / seconds);
    }
    return best_;
  }

 private:
  static constexpr size_t kWords = size_t{1} << 26;       // 512 MiB
  static constexpr size_t kClaimWords = size_t{1} << 18;  // 2 MiB

  static uint64_t sum_of(const uint64_t* words, size_t count) {
    uint64_t sums[32] = {};
    for (size_t i = 0; i < count; i += 32) {
      for (size_t lane = 0; lane < 32; ++lane) sums[lane] += words[i + lane];
    }
    uint64_t sum = 0;
    for (const uint64_t lane : sums) sum += lane;
    return sum;
  }

  ThreadPool pool_;
  std::vector<uint64_t> data_;
  double best_ = 0;
};

struct Result {
  int32_t batch = 0;
  double step_seconds = 0;  // median
  Cost cost;                // of a step
  std::map<std::string, double> op_seconds;  // of a step, mean

  double tokens_per_second() const { return batch / step_seconds; }
  double bytes_per_second() const { return double(cost.bytes) / step_seconds; }
};

// Sequences that decode together, each drawing its next token from its own logits.
Result measure(Runner& runner, TimedBackend& backend, int32_t batch, int steps) {
  StepBatch step;
  for (int32_t i = 0; i < batch; ++i) {
    step.rows.push_back({.id = SequenceId(i + 1), .slot = i, .count = 1, .begin = i});
    step.tokens.push_back(i + 3);
    step.outputs.push_back({.id = SequenceId(i + 1), .token = i, .position = 1});
  }
  constexpr int kWarmUp = 2;
  std::vector<double> seconds;
  for (int s = 0; s < kWarmUp + steps; ++s) {
    if (s == kWarmUp) backend.reset();
    const double begin = now();
    const std::span<const Drawn> drawn = runner.step(step);
    if (s >= kWarmUp) seconds.push_back(now() - begin);
    for (int32_t i = 0; i < batch; ++i) {
      step.tokens[size_t(i)] = drawn[size_t(i)].token;
      ++step.rows[size_t(i)].first;
      ++step.outputs[size_t(i)].position;
    }
  }
  std::sort(seconds.begin(), seconds.end());
  Result result{.batch = batch, .step_seconds = seconds[seconds.size() / 2]};
  result.cost = {.bytes = backend.sum().bytes / size_t(steps),
                 .flops = backend.sum().flops / size_t(steps)};
  for (const auto& [op, time] : backend.seconds()) result.op_seconds[op] = time / steps;
  return result;
}

void print(const std::vector<Result>& results, double read) {
  std::printf("\n%5s %9s %8s %7s %8s %9s %9s %8s\n", "batch", "ms/step", "GB/step", "GB/s",
              "of read", "GFLOP/s", "tokens/s", "speedup");
  for (const Result& r : results) {
    std::printf("%5d %9.2f %8.3f %7.1f %7.0f%% %9.1f %9.1f %7.2fx\n", r.batch,
                r.step_seconds * 1e3, double(r.cost.bytes) / 1e9, r.bytes_per_second() / 1e9,
                100 * r.bytes_per_second() / read, double(r.cost.flops) / r.step_seconds / 1e9,
                r.tokens_per_second(),
                r.tokens_per_second() / results.front().tokens_per_second());
  }
  std::printf("\nms/step by op\n");
  for (const Result& r : results) {
    std::printf("%5d ", r.batch);
    for (const auto& [op, time] : r.op_seconds) std::printf(" %s %.2f", op.c_str(), time * 1e3);
    std::printf("\n");
  }
}

void write_json(const std::string& path, const std::string& device, double read,
                const std::vector<Result>& results) {
  nlohmann::json steps = nlohmann::json::array();
  for (const Result& r : results) {
    steps.push_back({{"batch", r.batch},
                     {"step_ms", r.step_seconds * 1e3},
                     {"bytes", r.cost.bytes},
                     {"flops", r.cost.flops},
                     {"bytes_per_second", r.bytes_per_second()},
                     {"share_of_read", r.bytes_per_second() / read},
                     {"tokens_per_second", r.tokens_per_second()},
                     {"speedup",
                      r.tokens_per_second() / results.front().tokens_per_second()},
                     {"op_seconds", r.op_seconds}});
  }
  std::ofstream(path) << nlohmann::json{{"device", device},
                                        {"read_bytes_per_second", read},
                                        {"steps", steps}}
                             .dump(1)
                      << "\n";
}

int run(const Flags& flags) {
  TimedBackend backend(make_cpu_backend({.threads = flags.threads}));
  const std::string device = backend.info().name;
  const size_t at = device.rfind(", ");
  const int threads = std::atoi(device.c_str() + at + 2);
  std::printf("%s; building a random 1.3B-shaped gated_deltanet in bf16\n", device.c_str());
  const Model model = test::random_model(test::model_1_3b(), 1, backend);
  const Limits limits{.slots = kBatchMax, .step_tokens = kBatchMax, .chunk_tokens = 1,
                      .prompt_tokens = 1, .new_tokens = 1 << 20, .vocab = model.spec.vocab};
  const StatePool pool(model.spec, limits, backend);
  Runner runner(model, pool, limits, backend);

  double read = 0;
  std::vector<Result> results;
  {
    ReadBandwidth bandwidth(threads);
    for (const int batch : kBatches) {
      bandwidth.measure();
      results.push_back(measure(runner, backend, batch, flags.steps));
    }
    read = bandwidth.measure();
  }
  std::printf("read bandwidth of %d threads: %.1f GB/s\n", threads, read / 1e9);
  print(results, read);
  if (!flags.json.empty()) write_json(flags.json, device, read, results);
  return 0;
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) {
  weir::Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const char* const value = i + 1 < argc ? argv[++i] : nullptr;
    if (value != nullptr && flag == "--json") {
      flags.json = value;
    } else if (value != nullptr && flag == "--threads") {
      flags.threads = std::atoi(value);
    } else if (value != nullptr && flag == "--steps" && std::atoi(value) > 0) {
      flags.steps = std::atoi(value);
    } else {
      std::fprintf(stderr, "usage: %s [--threads N] [--steps N] [--json FILE]\n", argv[0]);
      return 2;
    }
  }
  return weir::run(flags);
}
