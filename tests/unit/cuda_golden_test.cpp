// Every checkpoint under tests/vectors on a CUDA device: its logits against the golden ones and
// against company, and its greedy answers against the plain CPU backend's.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/unit/golden_bench.h"

namespace weir {
namespace {

using test::alone;
using test::Bench;
using test::difference;
using test::golden_path;
using test::Sequence;
using test::values;

constexpr double kTolerance = 1e-3;
constexpr int32_t kGreedyTokens = 200;

class CudaGolden : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "skipped: no CUDA device";
  }
  static std::unique_ptr<Bench> cuda_bench(const std::string& name) {
    std::string error;
    auto backend = make_cuda_backend(0, &error);
    EXPECT_NE(backend, nullptr) << error;
    return std::make_unique<Bench>(golden_path(name), std::move(backend));
  }
  // Prints a measured number, and keeps it in the test's report.
  static void report(const char* what, double number) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.2e", number);
    std::printf("%-28s %-24s %s\n", GetParam().c_str(), what, text);
    RecordProperty(what, text);
  }
};

// Fails on a kernel that is wrong at one of these sizes, on one that leaves a state which the next
// chunk does not find, and on rows of a step that read each other's.
TEST_P(CudaGolden, LogitsAgreeWithTheReference) {
  const auto bench = cuda_bench(GetParam());
  const auto file = *Safetensors::open_file(bench->folder + "/golden.safetensors");
  const auto prompt = values<Token>(file, "prompt");
  const auto golden = values<float>(file, "logits_full");
  double worst = 0, company = 0;
  for (const int32_t chunk : {64, 1, 7}) {
    const double found = difference(alone(*bench, prompt, chunk), golden);
    EXPECT_LE(found, kTolerance) << "chunks of " << chunk;
    worst = std::max(worst, found);
  }
  test::in_company(*bench, [&](const std::vector<float>& together, const std::vector<float>& one) {
    company = std::max(company, difference(together, one));
  });
  EXPECT_LE(company, kTolerance) << "in company";
  report("golden", worst);
  report("company", company);
}

// The same where of each step only few outputs are wanted, or none: a kernel that finds another
// number of tokens in the last layer's MLP than in its mixer.
TEST_P(CudaGolden, WhatIsNotWantedDoesNotShow) {
  const auto bench = cuda_bench(GetParam());
  const auto file = *Safetensors::open_file(bench->folder + "/golden.safetensors");
  const auto prompt = values<Token>(file, "prompt");
  double worst = 0;
  for (const int32_t chunk : {1, 2, 7, 40}) {
    test::few_wanted(*bench, prompt, chunk,
                     [&](const std::vector<float>& few, const std::vector<float>& all) {
                       worst = std::max(worst, difference(few, all));
                     });
  }
  EXPECT_LE(worst, kTolerance);
  report("few wanted", worst);
}

Token most_likely(const float* logits, int32_t vocab) {
  return Token(std::max_element(logits, logits + vocab) - logits);
}

// The device's greedy answer, and what the plain CPU makes of the same tokens: the same token each
// time, or the first that differs is a near-tie there.
TEST_P(CudaGolden, GreedyAnswersAgreeWithThePlainCpu) {
  const auto bench = cuda_bench(GetParam());
  const auto file = *Safetensors::open_file(bench->folder + "/golden.safetensors");
  const auto prompt = values<Token>(file, "prompt");
  const int32_t vocab = bench->model.spec.vocab;
  Sequence answer(3, prompt);
  test::feed(*bench, {&answer}, {int32_t(prompt.size())});
  for (int32_t i = 0; i < kGreedyTokens; ++i) {
    const float* const last = answer.logits.data() + answer.logits.size() - size_t(vocab);
    answer.tokens.push_back(most_likely(last, vocab));
    test::feed(*bench, {&answer}, {1});
  }
  Bench plain(golden_path(GetParam()), {.plain = true});
  const std::vector<float> expected = alone(plain, answer.tokens, 64);
  report("drift", difference(answer.logits, expected));
  for (size_t at = prompt.size(); at < answer.tokens.size(); ++at) {
    const float* const logits = expected.data() + (at - 1) * size_t(vocab);
    const Token best = most_likely(logits, vocab), ours = answer.tokens[at];
    if (ours == best) continue;
    const double gap = double(logits[best]) - double(logits[ours]);
    std::printf("%-28s token %zu of %d differs\n", GetParam().c_str(), at - prompt.size() + 1,
                kGreedyTokens);
    report("gap", gap);
    EXPECT_LE(gap, 2 * kTolerance) << "token " << ours << ", expected " << best;
    return;
  }
}

INSTANTIATE_TEST_SUITE_P(Vectors, CudaGolden, testing::ValuesIn(test::golden_folders()),
                         [](const auto& info) { return test::test_name(info.param); });

}  // namespace
}  // namespace weir
