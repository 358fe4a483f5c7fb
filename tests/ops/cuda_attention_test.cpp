// The fast CUDA kernels of softmax attention (heads of 64 and 128 columns) against the plain CPU
// op: rows of one token in float32, longer rows on tensor cores, with high and low halves or, where
// the backend takes bf16 vectors, halves alone.
#include <numeric>

#include "tests/ops/cuda_steps.h"

namespace weir {
namespace {

// Measured below 3e-6, with halves alone below 6e-4, and what is kept below 2e-7.
constexpr double kTolerance = 1e-5, kHalfTolerance = 1.5e-3, kMemoryTolerance = 2e-6;

struct Case {
  std::string name;
  int32_t heads = 2, kv_heads = 1, head_dim = 64, window = 0, page_tokens = 64;
  float rope_theta = 10000, scale = 1;
  bool norm = true, norm_per_head = false, forgets = false;
  float forget_scale = 2;
};

// Rows of so many tokens from such positions on, in slots that follow no order; a row of no tokens
// is a padding row of three.
struct Lengths {
  std::vector<int32_t> count, first;

  Steps steps() const {
    Steps steps{{}, {}, {0}};
    const auto rows = int32_t(count.size());
    for (int32_t i = 0; i < rows; ++i) {
      const bool padding = count[size_t(i)] == 0;
      steps.slot.push_back(padding ? kPadding : rows - 1 - i);
      steps.first.push_back(first[size_t(i) % first.size()]);
      steps.begin.push_back(steps.begin.back() + (padding ? 3 : count[size_t(i)]));
    }
    return steps;
  }
  int32_t longest() const {
    int32_t most = 1;
    for (size_t i = 0; i < count.size(); ++i) {
      most = std::max(most, first[i % first.size()] + count[i]);
    }
    return most;
  }
};

void keep_in_pages(Side& side, const Case& c, const Lengths& lengths, int64_t floats_a_token,
                   Attention& op) {
  op.page_tokens = c.page_tokens;
  op.pages_per_row = (lengths.longest() + c.page_tokens - 1) / c.page_tokens;
  op.page_stride = floats_a_token * c.page_tokens + 32;
  std::vector<int32_t> table(lengths.count.size() * size_t(op.pages_per_row));
  op.pages = side.floats(table.size() * size_t(op.page_stride));
  side.compare(op.pages, table.size() * size_t(op.page_stride), "pages");
  std::iota(table.begin(), table.end(), 0);
  std::reverse(table.begin(), table.end());
  if (table.size() > 4) std::swap(table[1], table[3]);
  op.page_table = side.put(table);
}

Program attention(Side& side, const Case& c, const Lengths& lengths) {
  const Steps steps = lengths.steps();
  const int32_t T = steps.tokens(), keys = c.kv_heads * c.head_dim;
  Attention op{.rows = steps.put(side), .heads = c.heads, .kv_heads = c.kv_heads,
               .head_dim = c.head_dim, .window = c.window, .rope_theta = c.rope_theta,
               .norm_per_head = c.norm_per_head, .norm_eps = 1e-5f,
               .q = side.acts(T, c.heads * c.head_dim, c.scale), .k = side.acts(T, keys, c.scale),
               .v = side.acts(T, keys), .forgets = c.forgets};
  if (c.norm) {
    op.q_norm = side.floats(size_t(c.norm_per_head ? c.heads * c.head_dim : c.head_dim), c.scale);
    op.k_norm = side.floats(size_t(c.norm_per_head ? keys : c.head_dim));
  }
  if (c.forgets) op.forget = side.acts(T, c.heads, c.forget_scale);
  op.out = side.out(T, c.heads * c.head_dim, "out");
  const int64_t floats_a_token = 2 * int64_t(keys) + (c.forgets ? 2 * c.heads : 0);
  if (c.window > 0) {
    const int64_t stride = floats_a_token * c.window + 32;
    const auto all = size_t(steps.slots() * stride);
    op.ring = {side.floats(all), stride};
    side.compare(op.ring.data, all, "ring");
  } else {
    keep_in_pages(side, c, lengths, floats_a_token, op);
  }
  return {op};
}

class CudaAttention : public CudaTest {
 protected:
  static void check(const Case& c, const Lengths& lengths) {
    Side plain(make_cpu_backend({.plain = true}), 7);
    Side split(cuda(), 7), half(cuda({.bf16_vectors = true}), 7);
    for (Side* side : {&plain, &split, &half}) {
      side->backend().run(attention(*side, c, lengths));
      side->backend().finish();
    }
    for (size_t i = 0; i < plain.outputs().size(); ++i) {
      const auto& expected = plain.outputs()[i];
      const std::vector<float> values = plain.read(expected.data, expected.count);
      for (Side* side : {&split, &half}) {
        const auto& found = side->outputs()[i];
        const double error =
            relative_error(side->read(found.data, found.count), values, expected);
        const std::string what = c.name + ", d " + std::to_string(c.head_dim) + ", " +
                                 std::to_string(lengths.count.size()) + " rows" +
                                 (side == &half ? ", halves" : "");
        std::printf("%-60s %-6s %.2e\n", what.c_str(), found.name.c_str(), error);
        const double tolerance = found.name != "out" ? kMemoryTolerance
                                 : side == &half     ? kHalfTolerance
                                                     : kTolerance;
        EXPECT_LE(error, tolerance) << what << ", " << found.name;
      }
    }
  }
};

std::vector<int32_t> range(int32_t from, int32_t to, int32_t step = 1) {
  std::vector<int32_t> values;
  for (int32_t i = from; i <= to; i += step) values.push_back(i);
  return values;
}

// --- rows of one token ---------------------------------------------------------------------------

// Few rows, whose positions several blocks share, and many; a padding row among them.
TEST_F(CudaAttention, StepsAtEveryPosition) {
  for (const int32_t dim : {64, 128}) {
    check({"every position", 2, 2, dim}, {std::vector<int32_t>(140, 1), range(0, 139)});
    check({"one row", 2, 2, dim}, {{1}, {700}});
    check({"two rows and padding", 2, 1, dim}, {{1, 0, 1}, {2, 0, 300}});
    check({"long", 1, 1, dim}, {{1, 1, 1}, {3000, 0, 2047}});
  }
}

TEST_F(CudaAttention, StepsOfEveryGroup) {
  for (const int32_t group : {2, 3, 4, 7, 8, 12}) {
    check({"heads a kv head: " + std::to_string(group), 2 * group, 2, group % 2 ? 64 : 128},
          {{1, 1, 1, 1, 1}, {0, 15, 16, 17, 200}});
  }
}

TEST_F(CudaAttention, StepsInOddPagesAndRings) {
  const Lengths rows{std::vector<int32_t>(9, 1), {0, 1, 4, 5, 6, 63, 64, 129, 1000}};
  for (const int32_t page : {1, 3, 8, 48, 256}) {
    check({.name = "pages of " + std::to_string(page), .page_tokens = page}, rows);
  }
  for (const int32_t window : {1, 5, 64, 100, 500}) {
    check({.name = "window " + std::to_string(window), .kv_heads = 2, .window = window}, rows);
  }
}

TEST_F(CudaAttention, StepsThatForget) {
  for (const int32_t window : {0, 7, 200}) {
    check({.name = "forget, window " + std::to_string(window), .heads = 6, .kv_heads = 2,
           .window = window, .norm_per_head = true, .forgets = true},
          {{1, 1, 1, 0, 1}, {0, 7, 150, 0, 64}});
  }
}

// As many tokens as rows, but not one each: the same kernel takes a row's tokens in turn.
TEST_F(CudaAttention, StepsOfUnevenRows) {
  for (const int32_t window : {0, 3, 90}) {
    for (const bool forgets : {false, true}) {
      check({.name = "uneven", .window = window, .forgets = forgets},
            {{5, 1, 0, 1, 1, 2, 1, 1, 1, 1}, {40, 0, 0, 3, 95}});
    }
  }
}

// --- longer rows ---------------------------------------------------------------------------------

// What a wrong tail, or a wrong token at the edge of a unit or a tile, breaks.
TEST_F(CudaAttention, ChunksOfEveryLength) {
  for (const int32_t dim : {64, 128}) {
    check({"every length", 1, 1, dim}, {range(1, 130), {0, 37, 64, 101}});
    check({.name = "every length, forget", .heads = 1, .head_dim = dim, .forgets = true},
          {range(1, 130), {0, 33}});
    check({.name = "every length, window 40", .heads = 1, .head_dim = dim, .window = 40},
          {range(1, 130), {0, 37, 64, 101}});
  }
}

TEST_F(CudaAttention, ChunksAtTheEdgesOfTiles) {
  for (const int32_t dim : {64, 128}) {
    check({"edges of tiles", 2, 1, dim}, {{191, 192, 193, 384, 385, 130, 1, 65}, {0, 1, 63, 64}});
  }
}

TEST_F(CudaAttention, ChunksOfEveryGroupNormAndPage) {
  const Lengths rows{{70, 1, 0, 33, 140, 2}, {5, 90, 0, 0, 64}};
  check({"8 heads, 2 kv heads", 8, 2}, rows);
  check({"6 heads, 2 kv heads", 6, 2, 128}, rows);
  check({"7 heads, 1 kv head", 7, 1}, rows);
  check({.name = "no norm", .norm = false}, rows);
  check({.name = "no positions", .rope_theta = 0}, rows);
  check({.name = "no norm, no positions", .head_dim = 128, .rope_theta = 0, .norm = false}, rows);
  check({.name = "a norm for each head", .heads = 4, .kv_heads = 2, .norm_per_head = true}, rows);
  check({.name = "large scores", .rope_theta = 500, .scale = 3}, rows);
  for (const int32_t page : {1, 3, 8, 48, 128}) {
    check({.name = "pages of " + std::to_string(page), .page_tokens = page}, rows);
  }
}

TEST_F(CudaAttention, ChunksInWindows) {
  const Lengths rows{{70, 1, 0, 33, 300, 2}, {5, 90, 0, 0, 264}};
  for (const int32_t window : {1, 6, 63, 64, 65, 200, 400}) {
    for (const int32_t dim : {64, 128}) {
      check({.name = "window " + std::to_string(window), .heads = 4, .kv_heads = 2,
             .head_dim = dim, .window = window},
            rows);
    }
  }
}

// Sums that fall to -10^5 and further, then gates that stay open: exponents that are never
// positive, and differences that a float32 sum would lose.
TEST_F(CudaAttention, ChunksWithStrongForgetGates) {
  for (const float scale : {0.1f, 30.0f, 1000.0f}) {
    for (const int32_t dim : {64, 128}) {
      check({.name = "forget " + std::to_string(scale), .heads = 2, .head_dim = dim,
             .forgets = true, .forget_scale = scale},
            {{500, 1, 200}, {0, 64, 30}});
    }
  }
}

// Keys wait in scratch memory until a ring can take them: of some kv heads at a time.
TEST_F(CudaAttention, ChunksInWindowsOfMoreTokensThanTheScratchHolds) {
  check({.name = "window 5, many tokens", .heads = 10, .kv_heads = 10, .window = 5},
        {std::vector<int32_t>(400, 60), {3, 0}});
}

TEST_F(CudaAttention, ChunksOfLongRows) {
  check({"long rows", 1, 1, 64}, {{2048, 600}, {0, 900}});
  check({"long rows", 1, 1, 128}, {{1200}, {100}});
}

}  // namespace
}  // namespace weir
