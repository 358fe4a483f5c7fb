#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "kernels/backend.h"
#include "kernels/op.h"

namespace weir {
namespace {

TEST(CpuBackend, SaysWhatItRunsOn) {
  EXPECT_EQ(make_cpu_backend({.plain = true})->info().name, "CPU, plain, 1 thread");
  const std::unique_ptr<Backend> backend = make_cpu_backend({.threads = 2, .simd = 0});
  EXPECT_EQ(backend->info().name, "CPU, portable, 2 threads");
  EXPECT_GT(backend->info().memory_bytes, backend->info().free_bytes);
  EXPECT_GT(backend->info().free_bytes, 0u);
}

TEST(CpuBackend, MemoryIsZeroedAndAligned) {
  const std::unique_ptr<Backend> backend = make_cpu_backend({.threads = 1});
  for (const size_t bytes : {size_t{1}, size_t{100}, size_t{1} << 20}) {
    const auto* block = static_cast<const char*>(backend->allocate(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 64, 0u);
    EXPECT_TRUE(std::all_of(block, block + bytes, [](char byte) { return byte == 0; }));
  }
}

TEST(Cost, CountsWhatAnOpCannotAvoid) {
  const Linear linear{.tokens = 3, .in = 10, .parts = 2,
                      .part = {Matrix{.rows = 4, .cols = 10, .dtype = DType::BF16},
                               Matrix{.rows = 2, .cols = 10, .dtype = DType::F32}}};
  EXPECT_EQ(cost(Op(linear)).bytes, 4u * 10 * 2 + 2 * 10 * 4);
  EXPECT_EQ(cost(Op(linear)).flops, 2u * 3 * 10 * 6);
  const DeltaMix mix{.rows = {.count = 2, .tokens = 5}, .key_heads = 1, .value_heads = 2,
                     .key_dim = 8, .value_dim = 4, .conv_width = 4};
  const size_t state = 2 * 8 * 4, channels = 2 * 8 + 8;
  const size_t inputs = 2 * 3 + 5;  // of the history read, and of five tokens written
  EXPECT_EQ(cost(Op(mix)).bytes,
            2 * 2 * state * 4 + inputs * channels * 4 + 4 * channels * 4);
  const Program program = {linear, linear};
  EXPECT_EQ(cost(program).bytes, 2 * cost(Op(linear)).bytes);
  EXPECT_STREQ(name(Op(linear)), "linear");
}

}  // namespace
}  // namespace weir
