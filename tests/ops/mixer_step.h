#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/simd.h"

namespace weir {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline std::vector<float> normal(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

// One way to run an op on the CPU.
struct CpuKind {
  std::string name;
  CpuOptions options;
};
inline std::vector<CpuKind> cpu_kinds() {
  std::vector<CpuKind> kinds = {{"plain", {.plain = true}}};
  for (int level = 0; level < kSimdLevels; ++level) {
    if (const SimdTable* simd = simd_table(level)) {
      kinds.push_back({simd->name, {.threads = 2, .simd = level}});
    }
  }
  return kinds;
}

// A run of tokens of one sequence within a step; sequence -1 is a padding row.
struct Piece {
  int32_t sequence = -1, first = 0, count = 0;
};

// Rows of a step and where their tokens come from.
struct StepRows {
  std::vector<int32_t> slot, first, begin = {0};

  StepRows(const std::vector<Piece>& pieces, const std::vector<Slot>& slot_of) {
    for (const Piece& piece : pieces) {
      slot.push_back(piece.sequence < 0 ? kPadding : slot_of[size_t(piece.sequence)]);
      first.push_back(piece.first);
      begin.push_back(begin.back() + piece.count);
    }
  }
  int32_t tokens() const { return begin.back(); }
  Rows rows() const {
    return {.count = int32_t(slot.size()), .tokens = tokens(), .slot = slot.data(),
            .first = first.data(), .begin = begin.data()};
  }
};

// Activations of a step, gathered from sequences; what no sequence fills is NaN.
class StepActs {
 public:
  static constexpr int64_t kGap = 5;

  StepActs(int32_t tokens, int32_t dim)
      : dim_(dim), values_(size_t(tokens) * size_t(dim + kGap), kNan) {}

  // `of(sequence)` is a sequence's vectors, [its tokens, dim].
  template <typename Of>
  void gather(const std::vector<Piece>& pieces, const Of& of) {
    int64_t t = 0;
    for (const Piece& piece : pieces) {
      for (int32_t i = 0; i < piece.count; ++i, ++t) {
        if (piece.sequence < 0) continue;
        const std::vector<float>& from = of(piece.sequence);
        if (dim_ > 0) std::memcpy(acts().at(t), &from[size_t((piece.first + i) * dim_)],
                                  size_t(dim_) * sizeof(float));
      }
    }
  }
  Acts acts() { return {values_.data(), dim_ + kGap}; }
  const std::vector<float>& values() const { return values_; }

 private:
  int64_t dim_;
  std::vector<float> values_;
};

// All sequences through `count` tokens at a time, one step after another, side by side.
inline std::vector<std::vector<Piece>> cut_evenly(const std::vector<int32_t>& lengths,
                                                  int32_t count) {
  std::vector<std::vector<Piece>> steps;
  for (int32_t first = 0;; first += count) {
    std::vector<Piece> step;
    for (size_t s = 0; s < lengths.size(); ++s) {
      if (lengths[s] <= first) continue;
      step.push_back({int32_t(s), first, std::min(count, lengths[s] - first)});
    }
    if (step.empty()) return steps;
    steps.push_back(step);
  }
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  const auto same = [](float x, float y) { return std::memcmp(&x, &y, sizeof(x)) == 0; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

}  // namespace weir
