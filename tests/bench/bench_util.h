#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "nlohmann/json.hpp"

namespace weir {

// What every benchmark here takes: --device cuda|cpu, --json FILE, --only TEXT, and on CUDA
// --vectors split|bf16: how Linear multiplies its vectors, and --writes deferred|each: which tokens
// write states back. step_bench --most N: steps of more sequences are left out, and prompts.
struct BenchOptions {
  std::string device = cuda_device_count() > 0 ? "cuda" : "cpu";
  std::string json, only, vectors = "split", writes = "deferred", most;
};

inline void expect_one_of(const char* flag, const std::string& value,
                          const std::vector<std::string>& choices) {
  if (std::ranges::find(choices, value) != choices.end()) return;
  std::fprintf(stderr, "%s: expected %s or %s, found \"%s\"\n", flag, choices[0].c_str(),
               choices[1].c_str(), value.c_str());
  std::exit(2);
}

inline BenchOptions bench_options(int argc, char** argv) {
  BenchOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    std::string* value = flag == "--device" ? &options.device
                         : flag == "--json" ? &options.json
                         : flag == "--only" ? &options.only
                         : flag == "--vectors" ? &options.vectors
                         : flag == "--writes"  ? &options.writes
                         : flag == "--most"    ? &options.most
                                               : nullptr;
    if (value == nullptr || i + 1 == argc) {
      std::fprintf(stderr,
                   "usage: %s [--device cuda|cpu] [--json FILE] [--only TEXT] "
                   "[--vectors split|bf16] [--writes deferred|each] [--most SEQUENCES]\n",
                   argv[0]);
      std::exit(2);
    }
    *value = argv[++i];
  }
  expect_one_of("--device", options.device, {"cuda", "cpu"});
  expect_one_of("--vectors", options.vectors, {"split", "bf16"});
  expect_one_of("--writes", options.writes, {"deferred", "each"});
  if (options.device == "cpu" && options.vectors == "bf16") {
    std::fprintf(stderr, "--vectors bf16: on CUDA alone, the CPU's are float32\n");
    std::exit(2);
  }
  if (options.most.find_first_not_of("0123456789") != std::string::npos) {
    std::fprintf(stderr, "--most: expected a number of sequences, found \"%s\"\n",
                 options.most.c_str());
    std::exit(2);
  }
  return options;
}

inline std::unique_ptr<Backend> bench_backend(const BenchOptions& options) {
  if (options.device == "cpu") return make_cpu_backend();
  std::string error;
  auto backend = make_cuda_backend(0, &error, {.bf16_vectors = options.vectors == "bf16",
                                               .defer_writes = options.writes == "deferred"});
  if (backend == nullptr) {
    std::fprintf(stderr, "%s\n", error.c_str());
    std::exit(1);
  }
  return backend;
}

// The median seconds of `work`, which ends with finish(), after `warm` unmeasured calls.
template <typename Work>
double median_seconds(int warm, int times, const Work& work) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < warm; ++i) work();
  std::vector<double> seconds;
  for (int i = 0; i < times; ++i) {
    const auto start = Clock::now();
    work();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::ranges::nth_element(seconds, seconds.begin() + times / 2);
  return seconds[size_t(times / 2)];
}

// Bytes a second of a copy inside the device, counting those read and those written.
inline double copy_rate(Backend& backend, size_t bytes) {
  auto* from = static_cast<char*>(backend.allocate(bytes));
  auto* to = static_cast<char*>(backend.allocate(bytes));
  constexpr int kCopies = 8;
  const double seconds = median_seconds(2, 7, [&] {
    for (int i = 0; i < kCopies; ++i) backend.copy(to, from, bytes);
    backend.finish();
  });
  return 2.0 * kCopies * double(bytes) / seconds;
}

// Numbers of about the size of trained weights.
inline std::vector<uint16_t> random_bf16(size_t count) {
  std::vector<uint16_t> values(count);
  uint64_t x = 0x9E3779B97F4A7C15ull;
  for (uint16_t& value : values) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    // Sign, exponent 119 .. 122 (2^-8 .. 2^-5), seven bits of mantissa.
    value = uint16_t((x >> 63) << 15 | (119 + (x >> 61 & 3)) << 7 | (x >> 40 & 127));
  }
  return values;
}

inline std::vector<float> random_floats(size_t count, float scale) {
  std::vector<float> values(count);
  uint64_t x = 0xD1B54A32D192ED03ull;
  for (float& value : values) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    value = scale * (float(x >> 40) * 0x1p-23f - 1.0f);
  }
  return values;
}

inline void write_json(const BenchOptions& options, const nlohmann::json& results) {
  if (!options.json.empty()) std::ofstream(options.json) << results.dump(1) << "\n";
}

}  // namespace weir
