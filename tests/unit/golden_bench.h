#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/model.h"
#include "engine/runner.h"
#include "engine/state_pool.h"

namespace weir::test {

// Feeds sequences through a checkpoint folder by hand, as tests against golden logits do.

// The names of the folders that have golden logits, and where they lie.
inline std::string golden_path(const std::string& name) {
  return std::string(WEIR_SOURCE_DIR) + "/tests/vectors/" + name;
}
inline std::vector<std::string> golden_folders() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(golden_path(""))) {
    if (std::filesystem::exists(entry.path() / "golden.safetensors")) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}
// A name as gtest allows it.
inline std::string test_name(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
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
  explicit Bench(const std::string& folder, const CpuOptions& options = {})
      : Bench(folder, make_cpu_backend(options)) {}
  Bench(const std::string& folder, std::unique_ptr<Backend> device)
      : folder(folder),
        backend(std::move(device)),
        model(*load_model(folder, *backend)),
        limits{.slots = 6, .pages = 6 * kPagesEach, .page_tokens = 7, .step_tokens = 96,
               .chunk_tokens = 96, .prompt_tokens = 64, .new_tokens = 216,
               .vocab = model.spec.vocab},
        pool(model.spec, limits, *backend),
        runner(model, pool, limits, *backend) {}

  static constexpr int32_t kPagesEach = 40;  // 280 positions

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

// One step: the next counts[i] tokens of each sequence, and the logits kept of those that are
// wanted(row, token of the row): all, as they are by default.
template <typename Wanted>
void feed(Bench& bench, const std::vector<Sequence*>& rows, const std::vector<int32_t>& counts,
          const Wanted& wanted) {
  StepBatch batch;
  for (size_t r = 0; r < rows.size(); ++r) {
    Sequence& s = *rows[r];
    batch.rows.push_back({.id = r, .slot = s.slot, .first = s.fed, .count = counts[r],
                          .begin = int32_t(batch.tokens.size()), .pages = s.pages});
    for (int32_t i = 0; i < counts[r]; ++i) {
      if (wanted(r, i)) {
        batch.outputs.push_back({.id = r, .token = int32_t(batch.tokens.size()),
                                 .position = s.fed + i + 1});
      }
      batch.tokens.push_back(s.tokens[size_t(s.fed + i)]);
    }
  }
  bench.runner.step(batch);
  int32_t output = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    for (int32_t i = 0; i < counts[r]; ++i) {
      if (!wanted(r, i)) continue;
      const std::vector<float> one = bench.runner.logits(output++);
      rows[r]->logits.insert(rows[r]->logits.end(), one.begin(), one.end());
    }
    rows[r]->fed += counts[r];
  }
}

inline void feed(Bench& bench, const std::vector<Sequence*>& rows,
                 const std::vector<int32_t>& counts) {
  feed(bench, rows, counts, [](size_t, int32_t) { return true; });
}

inline std::vector<float> alone(Bench& bench, const std::vector<Token>& tokens, int32_t chunk) {
  Sequence s(3, tokens);
  while (!s.done()) feed(bench, {&s}, {std::min(chunk, int32_t(tokens.size()) - s.fed)});
  return s.logits;
}

inline double difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return HUGE_VAL;
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double gap = std::fabs(double(a[i]) - double(b[i]));
    worst = std::isfinite(gap) ? std::max(worst, gap) : HUGE_VAL;
  }
  return worst;
}

// Two sequences side by side in chunks of `chunk`, of which step after step only some outputs are
// wanted, the last, one in the middle, none. Calls check(wanted, all) with the logits of each step,
// and those that the same step gives where all are wanted.
template <typename Check>
void few_wanted(Bench& bench, const std::vector<Token>& tokens, int32_t chunk,
                const Check& check) {
  const auto vocab = size_t(bench.model.spec.vocab);
  Sequence few[2] = {{1, tokens}, {4, {tokens.rbegin(), tokens.rend()}}};
  Sequence all[2] = {{0, tokens}, {5, {tokens.rbegin(), tokens.rend()}}};
  for (int step = 0; !few[0].done(); ++step) {
    const int32_t left = int32_t(tokens.size()) - few[0].fed, count = std::min(chunk, left);
    const auto wanted = [&](size_t row, int32_t token) {
      if (step % 3 == 2) return false;
      return token == count - 1 || (row == 1 && step % 3 == 1 && token == count / 2);
    };
    for (Sequence* rows : {few, all}) rows[0].logits.clear(), rows[1].logits.clear();
    feed(bench, {&few[0], &few[1]}, {count, count}, wanted);
    feed(bench, {&all[0], &all[1]}, {count, count});
    for (size_t r = 0; r < 2; ++r) {
      std::vector<float> expected;
      for (int32_t i = 0; i < count; ++i) {
        if (!wanted(r, i)) continue;
        const auto first = all[r].logits.begin() + ptrdiff_t(size_t(i) * vocab);
        expected.insert(expected.end(), first, first + ptrdiff_t(vocab));
      }
      check(few[r].logits, expected);
    }
  }
}

// Four random days: six sequences of random lengths, alone in chunks of a random size, and then
// side by side, cut at random. Calls check(together, alone) with the logits of each.
template <typename Check>
void in_company(Bench& bench, const Check& check) {
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
      for (Sequence& s : all) {
        if (!s.done() && pick(0, 3) > 0) rows.push_back(&s);
      }
      std::shuffle(rows.begin(), rows.end(), random);
      std::vector<int32_t> counts;
      for (const Sequence* s : rows) {
        counts.push_back(pick(1, std::min(9, int32_t(s->tokens.size()) - s->fed)));
      }
      if (!rows.empty()) feed(bench, rows, counts);
    }
    for (size_t i = 0; i < all.size(); ++i) check(all[i].logits, expected[i]);
  }
}

}  // namespace weir::test
