// MemoryRoute and MemoryMerge, and what else a mixture of memories asks of other ops.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

std::vector<float> normal(std::mt19937& random, size_t count) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

// A route and everything it writes, filled with what no route would leave there.
struct Routed {
  static constexpr int64_t kGap = 2;

  int32_t memories, chosen;
  std::vector<int32_t> token, memory_begin, row_begin, row_first, pair;
  std::vector<float> weight;

  Routed(const Rows& rows, int32_t memories, int32_t chosen)
      : memories(memories),
        chosen(chosen),
        token(size_t(rows.tokens * chosen), -7),
        memory_begin(size_t(memories + 1), -7),
        row_begin(size_t(memories * (rows.count + 1)), -7),
        row_first(size_t(memories * rows.count), -7),
        pair(size_t(rows.tokens * chosen), -7),
        weight(size_t(rows.tokens * (chosen + kGap)), kNan) {}

  MemoryRoute op(const Rows& rows, std::vector<float>& logits, std::vector<float>& slots,
                 int64_t stride) {
    return {.rows = rows, .memories = memories, .chosen = chosen,
            .logits = {logits.data(), memories}, .seen = {slots.data(), stride},
            .token = token.data(), .memory_begin = memory_begin.data(),
            .row_begin = row_begin.data(), .row_first = row_first.data(), .pair = pair.data(),
            .weight = {weight.data(), chosen + kGap}};
  }
  float weight_of(int32_t t, int32_t c) const { return weight[size_t(t * (chosen + kGap) + c)]; }
};

int32_t seen_at(const std::vector<float>& slots, int64_t stride, Slot slot, int32_t memory) {
  int32_t seen;
  std::memcpy(&seen, &slots[size_t(slot * stride + memory)], sizeof(seen));
  return seen;
}

// The memory that a pair belongs to, by where the memories' pairs begin.
int32_t memory_of(const Routed& routed, int32_t pair) {
  int32_t m = 0;
  while (routed.memory_begin[size_t(m + 1)] <= pair) ++m;
  return m;
}

// A smaller logit preferred, a tie broken otherwise, weights over all memories, pairs out of order,
// a padding row that is routed, or tokens that a memory saw before forgotten or kept too long.
TEST(MemoryRoute, ChoosesTheLargestAndListsThemInOrder) {
  std::mt19937 random(3);
  const std::vector<Slot> slot_of = {2, 0, 3};
  const std::vector<Piece> pieces = {{1, 0, 4}, {-1, 0, 2}, {0, 9, 1}, {2, 5, 0}, {2, 7, 5}};
  const StepRows step(pieces, slot_of);
  const Rows rows = step.rows();
  for (const auto& sizes : {std::pair{4, 2}, {5, 1}, {3, 3}, {1, 1}, {9, 4}}) {
    const int32_t memories = sizes.first, chosen = sizes.second;
    std::vector<float> logits = normal(random, size_t(rows.tokens * memories));
    std::fill_n(logits.begin(), memories, 0.5f);  // the first token's are all equal
    const int64_t stride = memories + 3;
    for (const CpuKind& kind : cpu_kinds()) {
      std::vector<float> slots(size_t(4 * stride), kNan);
      const int32_t before = 6;
      for (const Slot slot : slot_of) {
        for (int32_t m = 0; m < memories; ++m) {
          std::memcpy(&slots[size_t(slot * stride + m)], &before, sizeof(before));
        }
      }
      Routed routed(rows, memories, chosen);
      make_cpu_backend(kind.options)->run({routed.op(rows, logits, slots, stride)});

      int32_t pairs = 0;
      for (size_t r = 0; r < pieces.size(); ++r) {
        const int32_t begin = step.begin[r], end = step.begin[r + 1];
        for (int32_t t = begin; t < end && pieces[r].sequence >= 0; ++t) {
          std::vector<int32_t> order(static_cast<size_t>(memories));
          for (int32_t m = 0; m < memories; ++m) order[size_t(m)] = m;
          const auto logit = [&](int32_t m) { return logits[size_t(t * memories + m)]; };
          std::stable_sort(order.begin(), order.end(),
                           [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
          double total = 0;
          for (int32_t c = 0; c < chosen; ++c) total += std::exp(double(logit(order[size_t(c)])));
          for (int32_t c = 0; c < chosen; ++c, ++pairs) {
            const int32_t pair = routed.pair[size_t(t * chosen + c)];
            EXPECT_EQ(routed.token[size_t(pair)], t);
            EXPECT_EQ(memory_of(routed, pair), order[size_t(c)]) << kind.name << " token " << t;
            EXPECT_NEAR(double(routed.weight_of(t, c)),
                        std::exp(double(logit(order[size_t(c)]))) / total, 1e-6);
          }
        }
      }
      EXPECT_EQ(routed.memory_begin.front(), 0);
      EXPECT_EQ(routed.memory_begin.back(), pairs);
      for (int32_t m = 0; m < memories; ++m) {
        const int32_t* const begin = &routed.row_begin[size_t(m * (rows.count + 1))];
        EXPECT_EQ(begin[0], routed.memory_begin[size_t(m)]);
        EXPECT_EQ(begin[rows.count], routed.memory_begin[size_t(m + 1)]);
        for (int32_t r = 0; r < rows.count; ++r) {
          for (int32_t i = begin[r]; i < begin[r + 1]; ++i) {
            EXPECT_GE(routed.token[size_t(i)], step.begin[size_t(r)]);
            EXPECT_LT(routed.token[size_t(i)], step.begin[size_t(r) + 1]);
            if (i == begin[r]) continue;
            EXPECT_GT(routed.token[size_t(i)], routed.token[size_t(i - 1)]);
          }
          const Piece& piece = pieces[size_t(r)];
          if (piece.sequence < 0) {
            EXPECT_EQ(begin[r], begin[r + 1]) << "a padding row is routed";
            continue;
          }
          if (piece.count == 0) continue;
          const int32_t had = piece.first == 0 ? 0 : before;
          EXPECT_EQ(routed.row_first[size_t(m * rows.count + r)], had);
          EXPECT_EQ(seen_at(slots, stride, slot_of[size_t(piece.sequence)], m),
                    had + begin[r + 1] - begin[r]);
        }
      }
      EXPECT_TRUE(std::isnan(slots[size_t(stride)])) << "touched another slot";
    }
  }
}

// A broken checkpoint's logits must not lead outside the list of memories.
TEST(MemoryRoute, NaNStillChoosesMemories) {
  const StepRows step({{0, 0, 2}}, {0});
  std::vector<float> logits(8, kNan), slots(4, 0.0f);
  Routed routed(step.rows(), 4, 2);
  make_cpu_backend()->run({routed.op(step.rows(), logits, slots, 4)});
  EXPECT_EQ(routed.memory_begin, (std::vector<int32_t>{0, 2, 4, 4, 4}));
}

TEST(MemoryMerge, EqualsItsFormula) {
  std::mt19937 random(5);
  for (const bool shared : {false, true}) {
    const int32_t tokens = 70, dim = 19, chosen = 3;
    std::vector<float> answers = normal(random, size_t(tokens * chosen * dim));
    std::vector<float> weight = normal(random, size_t(tokens * chosen));
    std::vector<float> common = normal(random, size_t(tokens * dim));
    std::vector<int32_t> pair(size_t(tokens * chosen));
    for (size_t i = 0; i < pair.size(); ++i) pair[i] = int32_t(i * 37 % pair.size());
    for (const CpuKind& kind : cpu_kinds()) {
      std::vector<float> out(size_t(tokens * dim), kNan);
      MemoryMerge op{.tokens = tokens, .dim = dim, .chosen = chosen, .pair = pair.data(),
                     .weight = {weight.data(), chosen}, .answers = {answers.data(), dim},
                     .out = {out.data(), dim}};
      if (shared) op.shared = {common.data(), dim};
      make_cpu_backend(kind.options)->run({op});
      for (int32_t t = 0; t < tokens; ++t) {
        for (int32_t i = 0; i < dim; ++i) {
          double sum = shared ? double(common[size_t(t * dim + i)]) : 0;
          for (int32_t c = 0; c < chosen; ++c) {
            const auto at = size_t(t * chosen + c);
            sum += double(weight[at]) * double(answers[size_t(pair[at] * dim + i)]);
          }
          ASSERT_NEAR(double(out[size_t(t * dim + i)]), sum, 1e-5) << kind.name;
        }
      }
    }
  }
}

// Tokens outside the range are left alone, and those inside get the numbers of a whole product.
TEST(LinearOfARange, IsAPartOfTheWhole) {
  std::mt19937 random(6);
  const int32_t tokens = 13, in = 21, rows = 10;
  std::vector<float> weights = normal(random, size_t(rows * in));
  std::vector<float> x = normal(random, size_t(tokens * in));
  for (const CpuKind& kind : cpu_kinds()) {
    const auto backend = make_cpu_backend(kind.options);
    std::vector<float> whole(size_t(tokens * rows), kNan);
    Linear op{.tokens = tokens, .in = in, .parts = 1,
              .part = {Matrix{.data = weights.data(), .rows = rows, .cols = in}},
              .x = {x.data(), in}, .y = {whole.data(), rows}};
    backend->run({op});
    for (const auto& [begin, end] : {std::pair{0, 13}, {3, 4}, {5, 13}, {6, 6}, {13, 13}}) {
      const int32_t range[2] = {begin, end};
      std::vector<float> part(whole.size(), kNan);
      op.range = range;
      op.y.data = part.data();
      backend->run({op});
      std::vector<float> expected(whole.size(), kNan);
      std::copy(whole.begin() + begin * rows, whole.begin() + end * rows,
                expected.begin() + begin * rows);
      EXPECT_TRUE(same_bits(part, expected)) << kind.name << " " << begin << " to " << end;
    }
  }
}

// What leaves the delta rule without a norm, normed here, is what leaves it with one.
TEST(DeltaMixWithoutNorm, LacksTheNormAlone) {
  std::mt19937 random(8);
  const int32_t tokens = 20, heads = 3, K = 12, V = 10;
  const StepRows step({{0, 0, tokens}}, {0});
  std::vector<float> q = normal(random, tokens * heads * K), k = normal(random, q.size());
  std::vector<float> v = normal(random, tokens * heads * V), weight = normal(random, V);
  for (const CpuKind& kind : cpu_kinds()) {
    const auto answers = [&](bool norm) {
      std::vector<float> state(heads * K * V, kNan), out(v.size(), kNan);
      make_cpu_backend(kind.options)
          ->run({DeltaMix{.rows = step.rows(), .key_heads = heads, .value_heads = heads,
                          .key_dim = K, .value_dim = V, .q = {q.data(), heads * K},
                          .k = {k.data(), heads * K}, .v = {v.data(), heads * V},
                          .norm_output = norm, .norm_weight = norm ? weight.data() : nullptr,
                          .norm_eps = 1e-3f, .out = {out.data(), heads * V},
                          .state = {state.data(), heads * K * V}}});
      return out;
    };
    const std::vector<float> raw = answers(false), normed = answers(true);
    for (size_t head = 0; head < raw.size() / V; ++head) {
      double squares = 0;
      for (size_t i = 0; i < V; ++i) squares += std::pow(double(raw[head * V + i]), 2);
      const double scale = 1 / std::sqrt(squares / V + double(1e-3f));
      for (size_t i = 0; i < V; ++i) {
        ASSERT_NEAR(double(normed[head * V + i]),
                    double(raw[head * V + i]) * scale * double(weight[i]), 1e-5)
            << kind.name;
      }
    }
  }
}

}  // namespace
}  // namespace weir
