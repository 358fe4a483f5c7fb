// The history of the short convolutions: however a sequence is cut into rows, an input lies in the
// ring's row of its position, and what comes out is the same. Fails on a history that is shifted,
// on a row that is taken for another age, on what lies before a sequence not being zero.
#include "kernels/ring.h"

#include <gtest/gtest.h>

#include "kernels/op.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

constexpr int32_t kTokens = 8;
constexpr int32_t kQ = 4, kChannels = 3 * kQ;  // queries, keys, values: a history row's order
constexpr int32_t kStateMost = 64, kStride = kStateMost + 4 * kChannels + 5;
constexpr Slot kSlot = 1;  // of three

// What the ops read beside their inputs; the same for all tokens.
struct Weights {
  std::vector<float> taps = normal(kChannels * 5, 1), some = normal(64, 2);
  Acts acts() { return {some.data(), 0}; }
};

enum class Kind { Conv, Delta, Swila };

Op make_op(Kind kind, int32_t width, const Rows& rows, Acts in, Acts out, float* memory,
           Weights& w) {
  const SlotState state{memory, kStride}, history = state.from(kStateMost);
  if (kind == Kind::Conv) {
    return Conv1d{.rows = rows, .channels = kChannels, .width = width, .taps = w.taps.data(),
                  .in = in, .out = out, .history = history};
  }
  if (kind == Kind::Delta) {
    return DeltaMix{.rows = rows, .key_heads = 1, .value_heads = 1, .key_dim = kQ,
                    .value_dim = kQ, .q = in, .k = in.from(kQ), .v = in.from(2 * kQ),
                    .conv_width = width, .conv_q = w.taps.data(),
                    .conv_k = w.taps.data() + kQ * width, .conv_v = w.taps.data() + 2 * kQ * width,
                    .beta = w.acts(), .norm_weight = w.some.data(), .norm_eps = 1e-5f, .out = out,
                    .state = state, .history = history};
  }
  return SwilaMix{.rows = rows, .heads = 1, .mixtures = 2, .dim = kQ, .q = in, .k = in.from(kQ),
                  .v = in.from(2 * kQ), .conv_width = width, .conv_q = w.taps.data(),
                  .conv_k = w.taps.data() + kQ * width, .conv_v = w.taps.data() + 2 * kQ * width,
                  .key_router = w.acts(), .query_router = w.acts(), .beta = w.acts(),
                  .norm_weight = w.some.data(), .norm_eps = 1e-5f, .out = out, .state = state,
                  .history = history};
}

// A sequence through one op, row by row, among padding and empty rows.
struct Sequence {
  Sequence(Kind kind, int32_t width, Backend& backend)
      : kind(kind), width(width), backend(backend) {}

  void step(int32_t count) {
    const StepRows rows({{-1, next, 2}, {0, next, count}, {1, next, 0}, {-1, 0, 1}}, {kSlot, 2});
    const int32_t tokens = rows.tokens(), out_dim = kind == Kind::Conv ? kChannels : kQ;
    std::vector<float> x(size_t(tokens * kChannels), kNan), y(size_t(tokens * out_dim), kNan);
    std::copy_n(&in[size_t(next * kChannels)], count * kChannels, &x[2 * kChannels]);
    backend.run({make_op(kind, width, rows.rows(), {x.data(), kChannels}, {y.data(), out_dim},
                         memory.data(), weights)});
    backend.finish();
    out.insert(out.end(), y.begin() + 2 * out_dim, y.begin() + (2 + count) * out_dim);
    next += count;
  }
  // The history as it should be.
  std::vector<float> ring() const {
    const int32_t kept = width - 1;
    std::vector<float> rows(size_t(kept * kChannels), 0.0f);
    for (int32_t p = std::max(0, next - kept); p < next; ++p) {
      std::copy_n(&in[size_t(p * kChannels)], kChannels, &rows[size_t(p % kept * kChannels)]);
    }
    return rows;
  }
  std::vector<float> history() const {
    const float* const from = &memory[kSlot * kStride + kStateMost];
    return {from, from + (width - 1) * kChannels};
  }
  bool other_memory_untouched() const {
    const auto untouched = [&](int32_t begin, int32_t end) {
      return std::all_of(memory.begin() + begin, memory.begin() + end,
                         [](float x) { return std::isnan(x); });
    };
    const int32_t slot = kSlot * kStride;
    return untouched(0, slot) && untouched(slot + kStride - 5, 3 * kStride);
  }

  Kind kind;
  int32_t width, next = 0;
  Backend& backend;
  Weights weights;
  std::vector<float> in = normal(kTokens * kChannels, 3), out;
  std::vector<float> memory = std::vector<float>(3 * kStride, kNan);
};

TEST(Ring, ARowForEachPositionOldestFirst) {
  for (int32_t kept = 1; kept <= 6; ++kept) {
    for (int32_t next = 0; next < 50; ++next) {
      for (int32_t i = 0; i < kept; ++i) {
        const int32_t row = ring_row(next - kept + i, kept);
        EXPECT_EQ(row, (next + i) % kept);
        EXPECT_EQ(row, ring_row_of_age(ring_row(next, kept), i, kept));
      }
    }
  }
}

TEST(Ring, AnyCutOfASequenceGivesTheSame) {
  for (const CpuKind& how : cpu_kinds()) {
    const std::unique_ptr<Backend> backend = make_cpu_backend(how.options);
    for (const Kind kind : {Kind::Conv, Kind::Delta, Kind::Swila}) {
      for (int32_t width = 1; width <= 5; ++width) {
        Sequence whole(kind, width, *backend);
        whole.step(kTokens);
        for (int32_t cuts = 0; cuts < 1 << (kTokens - 1); ++cuts) {
          Sequence cut(kind, width, *backend);
          for (int32_t t = 0, begin = 0; t < kTokens; ++t) {
            if (t + 1 < kTokens && (cuts >> t & 1) == 0) continue;
            cut.step(t + 1 - begin);
            begin = t + 1;
            ASSERT_TRUE(same_bits(cut.history(), cut.ring()))
                << how.name << ", op " << int(kind) << ", width " << width << ", cuts " << cuts
                << ", after token " << t;
          }
          ASSERT_TRUE(same_bits(cut.out, whole.out) && cut.other_memory_untouched())
              << how.name << ", op " << int(kind) << ", width " << width << ", cuts " << cuts;
        }
      }
    }
  }
}

TEST(Ring, ASequenceThatBeginsAgainForgets) {
  const std::unique_ptr<Backend> backend = make_cpu_backend({});
  for (const Kind kind : {Kind::Conv, Kind::Delta, Kind::Swila}) {
    for (int32_t width = 2; width <= 5; ++width) {
      Sequence twice(kind, width, *backend), once(kind, width, *backend);
      twice.step(5);
      twice.next = 0;
      twice.out.clear();
      for (Sequence* sequence : {&twice, &once}) {
        for (const int32_t count : {1, 1, 2}) sequence->step(count);
      }
      EXPECT_TRUE(same_bits(twice.out, once.out) && same_bits(twice.history(), once.history()))
          << "op " << int(kind) << ", width " << width;
    }
  }
}

}  // namespace
}  // namespace weir
