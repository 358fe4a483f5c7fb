#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace weir {

// Threads that share the items of one loop at a time. The calling thread works too, and waits for
// no worker that has not begun a chunk: one that the machine has put aside delays the loop by its
// own chunk at most.
//
// One thread calls parallel_for() at a time, never from within a loop. A call allocates nothing.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // >= 1, the calling thread included
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Calls fn(begin, end) on chunks of at least `grain` items that cover 0 .. items - 1, each once;
  // on the calling thread alone when one chunk covers all. Returns when all are done.
  template <typename Function>
  void parallel_for(int64_t items, Function&& fn, int64_t grain) {
    if (items <= 0) return;
    if (workers_.empty() || items <= grain) {
      fn(int64_t{0}, items);
      return;
    }
    using Plain = std::remove_reference_t<Function>;
    run(items, grain, const_cast<void*>(static_cast<const void*>(&fn)),
        [](void* context, int64_t begin, int64_t end) {
          (*static_cast<Plain*>(context))(begin, end);
        });
  }

 private:
  using Call = void (*)(void* context, int64_t begin, int64_t end);

  void run(int64_t items, int64_t grain, void* context, Call call);
  void work();
  bool claim_and_call();
  bool has_work() const;

  // The loop in progress. Written while no chunk can be claimed.
  std::atomic<Call> call_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> items_{0}, grain_{1};
  std::atomic<int32_t> chunks_{0};

  // Number of the loop << 16 | chunks left to claim: a worker that slept through the end of one
  // loop cannot claim a chunk of the next one with the old description in hand.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int32_t> finished_{0};  // chunks of this loop that are done
  alignas(64) std::atomic<int32_t> sleeping_{0};  // workers that need to be woken
  std::atomic<int32_t> wakes_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace weir
