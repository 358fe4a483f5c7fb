// Every checkpoint under tests/vectors: its logits against the golden ones, and alone against
// company, bit for bit.
#include <gtest/gtest.h>

#include "tests/unit/golden_bench.h"

namespace weir {
namespace {

using test::alone;
using test::Bench;
using test::difference;
using test::golden_path;
using test::in_company;
using test::values;

constexpr double kTolerance = 1e-4;

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, LogitsAgreeWithTheReference) {
  for (const CpuOptions& options : {CpuOptions{}, CpuOptions{.threads = 1, .simd = 0},
                                    CpuOptions{.threads = 1, .simd = 1},
                                    CpuOptions{.plain = true}}) {
    if (options.simd == 1 && !__builtin_cpu_supports("avx2")) continue;
    Bench bench(golden_path(GetParam()), options);
    const auto file = *Safetensors::open_file(bench.folder + "/golden.safetensors");
    const auto prompt = values<Token>(file, "prompt");
    const auto golden = values<float>(file, "logits_full");
    EXPECT_LT(difference(alone(bench, prompt, 48), golden), kTolerance)
        << bench.backend->info().name;
  }
}

TEST_P(Golden, ChunksDoNotShow) {
  Bench bench(golden_path(GetParam()));
  const auto file = *Safetensors::open_file(bench.folder + "/golden.safetensors");
  const auto prompt = values<Token>(file, "prompt");
  const std::vector<float> whole = alone(bench, prompt, 48);
  for (const int32_t chunk : {1, 2, 3, 7, 47}) {
    EXPECT_EQ(difference(alone(bench, prompt, chunk), whole), 0) << "chunks of " << chunk;
  }
}

// A last layer that picks other tokens than are wanted, or leaves a state that is not the step's
// where it computes the output of few of them, or of none.
TEST_P(Golden, WhatIsNotWantedDoesNotShow) {
  Bench bench(golden_path(GetParam()));
  const auto file = *Safetensors::open_file(bench.folder + "/golden.safetensors");
  const auto prompt = values<Token>(file, "prompt");
  for (const int32_t chunk : {1, 5, 17}) {
    test::few_wanted(bench, prompt, chunk,
                     [](const std::vector<float>& few, const std::vector<float>& all) {
                       EXPECT_EQ(difference(few, all), 0);
                     });
  }
}

TEST_P(Golden, AloneEqualsTogether) {
  Bench bench(golden_path(GetParam()));
  in_company(bench, [](const std::vector<float>& together, const std::vector<float>& alone) {
    EXPECT_EQ(difference(together, alone), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Vectors, Golden, testing::ValuesIn(test::golden_folders()),
                         [](const auto& info) { return test::test_name(info.param); });

}  // namespace
}  // namespace weir
