// The 34 models with every routing scheme (routing_vectors_test.cpp) on a CUDA device: their logits
// against the float64 reference, whole and in chunks.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/unit/golden_bench.h"
#include "tests/unit/hashed_weir_model.h"
#include "tests/unit/routing_variants.h"

namespace weir {
namespace {

using test::alone;
using test::Bench;
using test::difference;
using test::routing_prompt;
using test::Variant;

constexpr double kTolerance = 1e-3;

class CudaRouting : public testing::TestWithParam<Variant> {};

// Fails on a routing kernel whose formula is not the family's, and on what leaks from one token to
// the next.
TEST_P(CudaRouting, AgreesWithTheReference) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "skipped: no CUDA device";
  const Variant& variant = GetParam();
  const test::TemporaryFolder folder;
  test::HashedWeirModel(test::config_of(variant.name)).write(folder.path());
  const std::string path = WEIR_SOURCE_DIR "/tests/reference/routing.safetensors";
  const auto file = *Safetensors::open_file(path);
  const auto golden = test::values<float>(file, variant.name);
  std::string error;
  auto backend = make_cuda_backend(0, &error);
  ASSERT_NE(backend, nullptr) << error;
  Bench bench(folder.path(), std::move(backend));
  double worst = 0, chunks = 0, company = 0;
  const std::vector<float> whole = alone(bench, routing_prompt(), 12);
  for (const int32_t chunk : {12, 1, 5, 7}) {
    const std::vector<float> logits = alone(bench, routing_prompt(), chunk);
    worst = std::max(worst, difference(logits, golden));
    chunks = std::max(chunks, difference(logits, whole));
  }
  test::in_company(bench, [&](const std::vector<float>& together, const std::vector<float>& one) {
    company = std::max(company, difference(together, one));
  });
  std::printf("%-32s golden %.2e, chunks %.2e, company %.2e\n", variant.name, worst, chunks,
              company);
  EXPECT_LE(worst, kTolerance);
  EXPECT_LE(chunks, kTolerance);
  EXPECT_LE(company, kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Variants, CudaRouting, testing::ValuesIn(test::kVariants),
                         [](const auto& info) { return test::test_name(info.param.name); });

}  // namespace
}  // namespace weir
