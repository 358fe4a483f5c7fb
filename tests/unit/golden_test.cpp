// Every checkpoint under tests/vectors: its logits against the golden ones, and alone against
// company, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "tests/unit/golden_bench.h"

namespace weir {
namespace {

using test::alone;
using test::Bench;
using test::difference;
using test::feed;
using test::Sequence;
using test::values;

constexpr double kTolerance = 1e-4;

std::vector<std::string> folders() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(WEIR_SOURCE_DIR) + "/tests/vectors")) {
    if (std::filesystem::exists(entry.path() / "golden.safetensors")) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string path_of(const std::string& name) {
  return std::string(WEIR_SOURCE_DIR) + "/tests/vectors/" + name;
}

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, LogitsAgreeWithTheReference) {
  for (const CpuOptions& options : {CpuOptions{}, CpuOptions{.threads = 1, .simd = 0},
                                    CpuOptions{.threads = 1, .simd = 1},
                                    CpuOptions{.plain = true}}) {
    if (options.simd == 1 && !__builtin_cpu_supports("avx2")) continue;
    Bench bench(path_of(GetParam()), options);
    const auto file = *Safetensors::open_file(bench.folder + "/golden.safetensors");
    const auto prompt = values<Token>(file, "prompt");
    const auto golden = values<float>(file, "logits_full");
    EXPECT_LT(difference(alone(bench, prompt, 48), golden), kTolerance)
        << bench.backend->info().name;
  }
}

TEST_P(Golden, ChunksDoNotShow) {
  Bench bench(path_of(GetParam()));
  const auto file = *Safetensors::open_file(bench.folder + "/golden.safetensors");
  const auto prompt = values<Token>(file, "prompt");
  const std::vector<float> whole = alone(bench, prompt, 48);
  for (const int32_t chunk : {1, 2, 3, 7, 47}) {
    EXPECT_EQ(difference(alone(bench, prompt, chunk), whole), 0) << "chunks of " << chunk;
  }
}

TEST_P(Golden, AloneEqualsTogether) {
  Bench bench(path_of(GetParam()));
  std::mt19937 random(11);
  const auto pick = [&](int low, int high) {
    return low + int(random() % uint32_t(high - low + 1));
  };
  for (int day = 0; day < 4; ++day) {
    std::vector<Sequence> all;
    std::vector<std::vector<float>> expected;
    for (Slot slot = 0; slot < 6; ++slot) {
      std::vector<Token> tokens(size_t(pick(1, 40)));
      for (Token& token : tokens) token = pick(0, bench.model.spec.vocab - 1);
      expected.push_back(alone(bench, tokens, pick(1, 40)));
      all.emplace_back(slot, tokens);
    }
    while (!std::ranges::all_of(all, &Sequence::done)) {
      std::vector<Sequence*> rows;
      std::vector<int32_t> counts;
      for (Sequence& s : all) {
        if (s.done() || pick(0, 3) == 0) continue;
        rows.push_back(&s);
        counts.push_back(pick(1, std::min(9, int32_t(s.tokens.size()) - s.fed)));
      }
      std::shuffle(rows.begin(), rows.end(), random);
      for (size_t r = 0; r < rows.size(); ++r) {
        counts[r] = pick(1, std::min(9, int32_t(rows[r]->tokens.size()) - rows[r]->fed));
      }
      if (!rows.empty()) feed(bench, rows, counts);
    }
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(difference(all[i].logits, expected[i]), 0) << "day " << day << " sequence " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Vectors, Golden, testing::ValuesIn(folders()), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace weir
