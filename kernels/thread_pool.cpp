#include "kernels/thread_pool.h"

#include <algorithm>
#include <chrono>

#include "kernels/check.h"

namespace weir {
namespace {

constexpr int kChunkBits = 16;
constexpr uint64_t kChunkMask = (uint64_t{1} << kChunkBits) - 1;
constexpr int64_t kChunksMax = int64_t(kChunkMask);

// The pause between two ops of a step is shorter than this; waking a sleeping thread takes longer.
constexpr std::chrono::microseconds kSpin{30};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Whether `ready` came true before the time to spin was over.
template <typename Ready>
bool spin_until(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  WEIR_CHECK(threads >= 1);
  workers_.reserve(size_t(threads - 1));
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  wakes_.fetch_add(1);
  wakes_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t items, int64_t grain, void* context, Call call) {
  grain = std::max({grain, int64_t{1}, (items + kChunksMax - 1) / kChunksMax});
  const auto chunks = int32_t((items + grain - 1) / grain);

  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  items_.store(items, std::memory_order_relaxed);
  grain_.store(grain, std::memory_order_relaxed);
  chunks_.store(chunks, std::memory_order_relaxed);
  finished_.store(0, std::memory_order_relaxed);
  const uint64_t loop = (ticket_.load(std::memory_order_relaxed) >> kChunkBits) + 1;
  ticket_.store(loop << kChunkBits | uint64_t(chunks));  // publishes the description

  if (sleeping_.load() > 0) {
    wakes_.fetch_add(1);
    wakes_.notify_all();
  }
  while (claim_and_call()) {
  }

  const auto done = [&] { return finished_.load(std::memory_order_acquire) == chunks; };
  if (spin_until(done)) return;
  for (;;) {
    const int32_t finished = finished_.load(std::memory_order_acquire);
    if (finished == chunks) return;
    finished_.wait(finished, std::memory_order_acquire);
  }
}

bool ThreadPool::has_work() const {
  return (ticket_.load() & kChunkMask) != 0;
}

// The description is read before the claim. A claim succeeds only if the ticket has not changed
// since, and a ticket that still holds chunks keeps its description: what was read belongs to it.
bool ThreadPool::claim_and_call() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    const Call call = call_.load(std::memory_order_relaxed);
    void* const context = context_.load(std::memory_order_relaxed);
    const int64_t items = items_.load(std::memory_order_relaxed);
    const int64_t grain = grain_.load(std::memory_order_relaxed);
    const int32_t chunks = chunks_.load(std::memory_order_relaxed);
    const auto left = int32_t(ticket & kChunkMask);
    if (left == 0) return false;
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    const int64_t chunk = chunks - left;
    call(context, chunk * grain, std::min(items, (chunk + 1) * grain));
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) finished_.notify_one();
    return true;
  }
}

void ThreadPool::work() {
  const auto ready = [this] { return stopping_.load(std::memory_order_relaxed) || has_work(); };
  while (!stopping_.load()) {
    while (claim_and_call()) {
    }
    if (spin_until(ready)) continue;
    // Either run() sees this worker asleep, or this worker sees run()'s ticket.
    const int32_t wakes = wakes_.load();
    sleeping_.fetch_add(1);
    if (!ready()) wakes_.wait(wakes);
    sleeping_.fetch_sub(1);
  }
}

}  // namespace weir
