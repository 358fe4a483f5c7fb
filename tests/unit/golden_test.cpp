// Every checkpoint under tests/vectors: its logits against the golden ones, and alone against
// company, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>

#include "engine/model.h"
#include "engine/runner.h"
#include "engine/state_pool.h"

namespace weir {
namespace {

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

template <typename T>
std::vector<T> values(const Safetensors& file, const char* name) {
  const TensorView* tensor = file.find(name);
  if (!tensor) return {};
  std::vector<T> out(tensor->data.size() / sizeof(T));
  std::memcpy(out.data(), tensor->data.data(), tensor->data.size());
  return out;
}

// A model with room for several sequences, and a runner on it.
struct Bench {
  explicit Bench(const std::string& name, CpuOptions options = {})
      : folder(std::string(WEIR_SOURCE_DIR) + "/tests/vectors/" + name),
        backend(make_cpu_backend(options)),
        model(*load_model(folder, *backend)),
        limits{.slots = 6, .pages = 6 * kPagesEach, .page_tokens = 7, .step_tokens = 96,
               .chunk_tokens = 96, .prompt_tokens = 64, .new_tokens = 64,
               .vocab = model.spec.vocab},
        pool(model.spec, limits, *backend),
        runner(model, pool, limits, *backend) {}

  static constexpr int32_t kPagesEach = 10;

  std::string folder;
  std::unique_ptr<Backend> backend;
  Model model;
  Limits limits;
  StatePool pool;
  Runner runner;
};

// A sequence that is fed by hand. Its pages are not contiguous, nor in order.
struct Sequence {
  Sequence(Slot slot, std::vector<Token> tokens) : slot(slot), tokens(std::move(tokens)) {
    for (int32_t i = 0; i < Bench::kPagesEach; ++i) {
      pages.push_back((Bench::kPagesEach - 1 - i) * 6 + slot);
    }
  }
  bool done() const { return fed == int32_t(tokens.size()); }

  Slot slot = 0;
  std::vector<Token> tokens;
  std::vector<int32_t> pages;
  int32_t fed = 0;
  std::vector<float> logits;  // [fed, vocab]
};

// One step: the next counts[i] tokens of each sequence, all their logits kept.
void feed(Bench& bench, const std::vector<Sequence*>& rows, const std::vector<int32_t>& counts) {
  StepBatch batch;
  for (size_t r = 0; r < rows.size(); ++r) {
    Sequence& s = *rows[r];
    batch.rows.push_back({.id = r, .slot = s.slot, .first = s.fed, .count = counts[r],
                          .begin = int32_t(batch.tokens.size()), .pages = s.pages});
    for (int32_t i = 0; i < counts[r]; ++i) {
      batch.outputs.push_back({.id = r, .token = int32_t(batch.tokens.size()),
                               .position = s.fed + i + 1});
      batch.tokens.push_back(s.tokens[size_t(s.fed + i)]);
    }
  }
  bench.runner.step(batch);
  int32_t output = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    for (int32_t i = 0; i < counts[r]; ++i) {
      const std::vector<float> one = bench.runner.logits(output++);
      rows[r]->logits.insert(rows[r]->logits.end(), one.begin(), one.end());
    }
    rows[r]->fed += counts[r];
  }
}

std::vector<float> alone(Bench& bench, const std::vector<Token>& tokens, int32_t chunk) {
  Sequence s(3, tokens);
  while (!s.done()) feed(bench, {&s}, {std::min(chunk, int32_t(tokens.size()) - s.fed)});
  return s.logits;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return HUGE_VAL;
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double gap = std::fabs(double(a[i]) - double(b[i]));
    worst = std::isfinite(gap) ? std::max(worst, gap) : HUGE_VAL;
  }
  return worst;
}

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, LogitsAgreeWithTheReference) {
  for (const CpuOptions& options : {CpuOptions{}, CpuOptions{.threads = 1, .simd = 0},
                                    CpuOptions{.threads = 1, .simd = 1},
                                    CpuOptions{.plain = true}}) {
    if (options.simd == 1 && !__builtin_cpu_supports("avx2")) continue;
    Bench bench(GetParam(), options);
    const auto file = *Safetensors::open_file(bench.folder + "/golden.safetensors");
    const auto prompt = values<Token>(file, "prompt");
    const auto golden = values<float>(file, "logits_full");
    EXPECT_LT(difference(alone(bench, prompt, 48), golden), kTolerance)
        << bench.backend->info().name;
  }
}

TEST_P(Golden, ChunksDoNotShow) {
  Bench bench(GetParam());
  const auto file = *Safetensors::open_file(bench.folder + "/golden.safetensors");
  const auto prompt = values<Token>(file, "prompt");
  const std::vector<float> whole = alone(bench, prompt, 48);
  for (const int32_t chunk : {1, 2, 3, 7, 47}) {
    EXPECT_EQ(difference(alone(bench, prompt, chunk), whole), 0) << "chunks of " << chunk;
  }
}

TEST_P(Golden, AloneEqualsTogether) {
  Bench bench(GetParam());
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
