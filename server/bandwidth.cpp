#include "server/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

namespace weir {
namespace {

constexpr size_t kWordsPerThread = size_t(8) << 20;  // 64 MiB: beyond the caches, soon read
constexpr int kRounds = 3;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

double measure_read_bandwidth(int threads) {
  const std::vector<uint64_t> words(kWordsPerThread * size_t(threads), 1);
  std::atomic<uint64_t> sum{0};  // so that reading cannot be left out
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> readers;
    for (int reader = 0; reader < threads; ++reader) {
      readers.emplace_back([&, first = words.data() + size_t(reader) * kWordsPerThread] {
        sum += std::accumulate(first, first + kWordsPerThread, uint64_t(0));
      });
    }
    for (std::thread& reader : readers) reader.join();
    best = std::max(best, double(words.size() * sizeof(uint64_t)) / seconds_since(begin));
  }
  return best;
}

double measure_copy_bandwidth(Backend& backend) {
  constexpr size_t kBytes = size_t(128) << 20;  // beyond the caches
  void* from = backend.allocate(kBytes);
  void* to = backend.allocate(kBytes);
  backend.finish();
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    backend.copy(to, from, kBytes);
    backend.finish();
    best = std::max(best, 2.0 * double(kBytes) / seconds_since(begin));
  }
  return best;
}

}  // namespace weir
