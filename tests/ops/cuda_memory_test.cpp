// The CUDA kernels of forget gates, depth attention and mixtures of memories against the plain CPU.
#include "tests/ops/cuda_compare.h"

namespace weir {
namespace {

constexpr int32_t kSlots = 6;

// Rows of several lengths, from a zero state and from a kept one, and padding.
struct Rowset {
  const char* name;
  std::vector<int32_t> slot, first, begin;

  int32_t tokens() const { return begin.back(); }
  Rows put(Side& side) const {
    return {.count = int32_t(slot.size()), .tokens = tokens(), .slot = side.put(slot),
            .first = side.put(first), .begin = side.put(begin)};
  }
};
const Rowset kSets[] = {
    {"decode", {3, 0, kPadding, 5, 1}, {7, 0, 0, 60, 1}, {0, 1, 2, 3, 4, 5}},
    {"ragged", {2, kPadding, 4, 0, 1}, {5, 0, 0, 0, 12}, {0, 2, 5, 12, 13, 33}}};

struct ForgetCase {
  std::string name;
  int32_t heads = 4, kv_heads = 2, head_dim = 64, window = 0;
  bool norm = true;
};

// What is kept begins as some numbers: small sums of gates, so that their differences stay small.
Program forgetting(Side& side, const ForgetCase& c, const Rowset& set) {
  const int32_t T = set.tokens(), keys = c.kv_heads * c.head_dim;
  Attention op{.rows = set.put(side), .heads = c.heads, .kv_heads = c.kv_heads,
               .head_dim = c.head_dim, .window = c.window, .norm_per_head = true,
               .norm_eps = 1e-5f, .q = side.acts(T, c.heads * c.head_dim),
               .k = side.acts(T, keys), .v = side.acts(T, keys), .forgets = true,
               .forget = side.acts(T, c.heads, 2)};
  if (c.norm) {
    op.q_norm = side.floats(size_t(c.heads * c.head_dim));
    op.k_norm = side.floats(size_t(keys));
  }
  op.out = side.out(T, c.heads * c.head_dim, "out");
  constexpr int32_t kPage = 8, kPagesPerRow = 16;
  const int32_t block = c.window > 0 ? c.window : kPage;
  const int64_t stride = 2 * int64_t(block) * (keys + c.heads) + 32;
  if (c.window > 0) {
    op.ring = {side.floats(size_t(kSlots * stride)), stride};
    side.compare(op.ring.data, size_t(kSlots * stride), "ring");
    return {op};
  }
  const auto pages = int32_t(set.slot.size()) * kPagesPerRow;
  op.page_stride = stride;
  op.pages = side.floats(size_t(pages * stride));
  side.compare(op.pages, size_t(pages * stride), "pages");
  op.page_tokens = kPage;
  op.pages_per_row = kPagesPerRow;
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (size_t i = 0; i < table.size(); ++i) table[i] = int32_t(i * 37 % table.size());
  op.page_table = side.put(table);
  return {op};
}

TEST_F(CudaTest, ForgetGates) {
  const ForgetCase cases[] = {{"pages", 4, 2, 48}, {"pages, one kv head, 40", 6, 1, 40, 0, false},
                              {"pages, 140 heads", 140, 140, 8}, {"ring of 6", 4, 2, 48, 6},
                              {"ring of 1", 3, 3, 32, 1, false}};
  for (const ForgetCase& c : cases) {
    for (const Rowset& set : kSets) {
      same(std::string("forgetting ") + set.name + ", " + c.name, 2e-5,
           [&](Side& side) { return forgetting(side, c, set); });
    }
  }
}

TEST_F(CudaTest, DepthAttentionOverManySources) {
  struct Case {
    int32_t tokens, groups, dim, count;
    bool bias;
  };
  for (const Case& c : {Case{5, 1, 64, 1, false}, {5, 1, 2048, 49, false}, {33, 4, 30, 9, true},
                        {2, 1, 7, 300, true}}) {
    same("depth attention, " + std::to_string(c.count) + " sources", 1e-5, [&](Side& side) {
      DepthAttention op{.tokens = c.tokens, .groups = c.groups, .dim = c.dim, .eps = 1e-5f,
                        .query = side.floats(size_t(c.groups * c.dim), 0.3f), .count = c.count};
      op.sources = side.acts(int64_t(c.tokens) * c.count, c.groups * c.dim);
      op.source_stride = c.tokens * op.sources.stride;
      if (c.bias) op.last_bias = side.acts(c.tokens, c.groups);
      op.out = side.out(c.tokens, c.groups * c.dim, "out");
      return Program{op};
    });
  }
}

// Whole numbers compare as the floats of their bits: the same or not.
int32_t* numbers(Side& side, int64_t count, const std::string& name) {
  int32_t* const data = side.put(std::vector<int32_t>(size_t(count), 0));
  side.compare(reinterpret_cast<const float*>(data), size_t(count), name);
  return data;
}

struct MixtureCase {
  int32_t memories = 4, chosen = 2, heads = 2, dim = 64;
  DType dtype = DType::BF16;
  bool shared = true;
};

// Route, gather, each memory's own product and delta rule, merge: as a mixture is lowered.
Program mixture(Side& side, const MixtureCase& c, const Rowset& set) {
  const int32_t T = set.tokens(), rows = int32_t(set.slot.size()), width = 96;
  const int32_t pairs = T * c.chosen, channels = c.heads * c.dim;
  std::vector<int32_t> counters(size_t(kSlots * 64), 5);
  MemoryRoute route{.rows = set.put(side), .memories = c.memories, .chosen = c.chosen,
                    .logits = side.acts(T, c.memories),
                    .seen = {reinterpret_cast<float*>(side.put(counters)), 64}};
  side.compare(route.seen.data, counters.size(), "seen");
  route.token = numbers(side, pairs, "token");
  route.memory_begin = numbers(side, c.memories + 1, "memories");
  route.row_begin = numbers(side, c.memories * (rows + 1), "rows");
  route.row_first = numbers(side, c.memories * rows, "first");
  route.pair = numbers(side, pairs, "pair");
  route.weight = side.out(T, c.chosen, "weight");
  Program program{route};
  const Acts x = side.acts(T, width);
  const Acts gathered{side.floats(size_t(pairs * width)), width};
  program.push_back(
      Gather{.count = pairs, .dim = width, .index = route.token, .in = x, .out = gathered});
  const Acts columns = side.acts(pairs, 3 * channels + 2 * c.heads);
  const int64_t state = int64_t(c.heads) * c.dim * c.dim, history = 3 * 3 * int64_t(channels);
  const int64_t stride = c.memories * (state + history) + 32;
  const SlotState slots{side.floats(size_t(kSlots * stride), 0.3f), stride};
  side.compare(slots.data, size_t(kSlots * stride), "slots");
  const float *taps = side.floats(size_t(4 * channels)), *bias = side.floats(size_t(c.heads));
  const float* const a = side.put(std::vector<float>(size_t(c.heads), 0.4f));
  const Acts answers = side.acts(pairs, channels);
  for (int32_t m = 0; m < c.memories; ++m) {
    Linear linear{.tokens = pairs, .in = width, .parts = 4, .range = route.memory_begin + m,
                  .x = gathered, .y = columns};
    linear.part = {side.matrix(2 * channels, width, c.dtype), side.matrix(channels, width, c.dtype),
                   side.matrix(c.heads, width, c.dtype), side.matrix(c.heads, width, c.dtype)};
    program.push_back(linear);
  }
  for (int32_t m = 0; m < c.memories; ++m) {
    program.push_back(DeltaMix{
        .rows = {.count = rows, .tokens = pairs, .slot = route.rows.slot,
                 .first = route.row_first + m * rows, .begin = route.row_begin + m * (rows + 1),
                 .computed = true},
        .key_heads = c.heads, .value_heads = c.heads, .key_dim = c.dim, .value_dim = c.dim,
        .q = columns, .k = columns.from(channels), .v = columns.from(2 * channels),
        .conv_width = 4, .conv_q = taps, .conv_k = taps, .conv_v = taps, .decay = Decay::PerHead,
        .decay_heads = c.heads, .decay_in = columns.from(3 * channels), .decay_a = a,
        .dt_bias = bias, .beta = columns.from(3 * channels + c.heads), .norm_output = false,
        .out = answers, .state = slots.from(m * state),
        .history = slots.from(c.memories * state + m * history)});
  }
  MemoryMerge merge{.tokens = T, .dim = channels, .chosen = c.chosen, .pair = route.pair,
                    .weight = route.weight, .answers = answers};
  if (c.shared) merge.shared = side.acts(T, channels);
  merge.out = side.acts(T, channels);
  side.compare(merge.out.data, size_t(channels), "first");
  side.compare(merge.out.at(T - 1), size_t(channels), "last");
  program.push_back(merge);
  return program;
}

TEST_F(CudaTest, MixturesOfMemories) {
  for (const MixtureCase& c : {MixtureCase{}, {.memories = 9, .chosen = 1, .shared = false},
                               {.memories = 3, .chosen = 3, .dim = 40, .dtype = DType::F16},
                               {.memories = 40, .chosen = 4, .dim = 32, .dtype = DType::F32}}) {
    for (const Rowset& set : kSets) {
      same(std::string("mixture ") + set.name + ", " + std::to_string(c.chosen) + " of " +
               std::to_string(c.memories), 5e-5,
           [&](Side& side) { return mixture(side, c, set); });
    }
  }
}

}  // namespace
}  // namespace weir
