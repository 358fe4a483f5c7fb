#include "kernels/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

namespace weir {
namespace {

// An item skipped, or given to two threads.
TEST(ThreadPool, EveryItemOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const int64_t items : {0, 1, 2, 7, 64, 1000, 70001}) {
      for (const int64_t grain : {1, 3, 64, 100000}) {
        std::vector<int> visits(size_t(items), 0);
        pool.parallel_for(
            items,
            [&](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) ++visits[size_t(i)];
            },
            grain);
        for (const int count : visits) ASSERT_EQ(count, 1) << threads << " threads, " << items;
      }
    }
  }
}

// A claim smaller than asked for, other than the last: work handed out in crumbs.
TEST(ThreadPool, ChunksAreAsLargeAsAskedFor) {
  ThreadPool pool(4);
  constexpr int64_t kItems = 1003, kGrain = 10;
  std::atomic<int> small{0};
  pool.parallel_for(
      kItems,
      [&](int64_t begin, int64_t end) {
        if (end - begin < kGrain) ++small;
      },
      kGrain);
  EXPECT_LE(small.load(), 1);
}

// A worker that wakes late takes a chunk of the next loop with the last one's function, or the
// caller returns before a chunk is done. Plain memory is written: thread sanitizer sees a missing
// order between loops.
TEST(ThreadPool, LoopsDoNotMix) {
  ThreadPool pool(4);
  std::vector<int64_t> values(97, 0);
  for (int64_t loop = 1; loop <= 20000; ++loop) {
    const int64_t items = 1 + loop % int64_t(values.size());
    pool.parallel_for(
        items,
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) values[size_t(i)] += loop;
        },
        1 + loop % 3);
    if (loop % 64 == 0) std::this_thread::yield();
    values[size_t(items - 1)] += 1;
  }
  int64_t expected = 0;
  for (int64_t loop = 1; loop <= 20000; ++loop) {
    expected += loop * (1 + loop % int64_t(values.size())) + 1;
  }
  EXPECT_EQ(std::accumulate(values.begin(), values.end(), int64_t{0}), expected);
}

// Workers that have gone to sleep are not woken, and the caller does all the work.
TEST(ThreadPool, SleepingWorkersWake) {
  ThreadPool pool(2);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> met{0};
    // Two chunks that wait for each other need two threads.
    pool.parallel_for(
        2,
        [&](int64_t, int64_t) {
          ++met;
          while (met.load() < 2) std::this_thread::yield();
        },
        1);
    EXPECT_EQ(met.load(), 2);
  }
}

// A pool that hangs when it is destroyed while its workers start, spin or sleep.
TEST(ThreadPool, StopsAtAnyTime) {
  for (int round = 0; round < 200; ++round) {
    ThreadPool pool(3);
    if (round % 2 == 0) pool.parallel_for(5, [](int64_t, int64_t) {}, 1);
    if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace
}  // namespace weir
