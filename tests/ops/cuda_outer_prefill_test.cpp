// The chunk kernels of the recurrence that only adds, which take the rows of many tokens, against
// the plain CPU op, which walks the tokens one after the other.
#include "tests/ops/cuda_outer_case.h"

namespace weir {
namespace {

using Decay = OuterStep::Decay;

// Half-precision operands, sums in float32.
constexpr double kTolerance = 1e-3;

class CudaOuterPrefill : public CudaTest {
 protected:
  static void check(const OuterCase& c, const std::vector<int32_t>& lengths = kMixed,
                    bool known = false) {
    same("adding prefill, " + c.name + ", " + std::to_string(lengths.size()) + " rows", kTolerance,
         [&](Side& side) { return outer_program(side, c, rows_of(lengths, known)); });
  }
};

std::vector<OuterCase> kinds() {
  return {{.name = "linear attention"},
          {.name = "normalised", .normalise = true},
          {.name = "RetNet", .decay = Decay::Constant},
          {.name = "one decay a head", .decay = Decay::PerHead},
          {.name = "GLA", .decay = Decay::PerKey},
          {.name = "slot attention's keys", .decay = Decay::PerValue}};
}

class CudaOuterKind : public CudaOuterPrefill, public testing::WithParamInterface<size_t> {
 protected:
  static OuterCase kind() { return kinds()[GetParam()]; }
  static OuterCase small() {
    OuterCase c = kind();
    c.heads = c.key_heads = c.value_heads = c.query_heads = 1;
    c.key_dim = c.value_dim = 64;
    return c;
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, CudaOuterKind, testing::Range(size_t(0), kinds().size()));

TEST_P(CudaOuterKind, AmongDecodingRows) { check(kind()); }

// Few prompts among many rows that decode are looked for by the blocks: the first and the last row
// of all, neighbours, and more than the lanes of a warp apart.
TEST_P(CudaOuterKind, FewPromptsAmongManyDecodingRows) {
  std::vector<int32_t> lengths(101, 1);
  for (const auto& [row, length] : {std::pair{0, 150}, {1, 33}, {30, 0}, {31, 32}, {32, 64},
                                    {70, 600}, {100, 40}}) {
    lengths[size_t(row)] = length;
  }
  std::vector<int32_t> one(101, 1);
  one[99] = 70;
  for (const bool known : {false, true}) {
    check(small(), lengths, known);
    check(small(), one, known);
  }
}

// What a wrong tail, or a wrong token at the edge of a chunk or tile, breaks.
TEST_P(CudaOuterKind, EveryLength) {
  std::vector<int32_t> lengths;
  for (int32_t length = 1; length <= 130; ++length) lengths.push_back(length);
  check(small(), lengths);
}

// Heads cut into slices of 16, 32, 64 and 128 values: the fewer rows, the thinner.
class CudaOuterSlices : public CudaOuterPrefill, public testing::WithParamInterface<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Rows, CudaOuterSlices, testing::Values(1, 10, 30));

TEST_P(CudaOuterSlices, EverySizeAndSlice) {
  const int32_t rows = GetParam();
  std::vector<int32_t> lengths;
  for (int32_t i = 0; i < rows; ++i) lengths.push_back(34 + i * 29 % 70);
  std::vector<std::pair<int32_t, int32_t>> sizes = {{64, 64}, {64, 128}, {128, 128},
                                                    {128, 48}};
  if (rows == 1) sizes.insert(sizes.end(), {{128, 64}, {256, 128}, {256, 512}});
  if (rows == 30) sizes = {{64, 128}, {128, 64}, {256, 128}};
  for (const auto& [K, V] : sizes) {
    for (const Decay decay : {Decay::PerHead, Decay::PerKey, Decay::PerValue}) {
      check({.name = std::to_string(K) + "x" + std::to_string(V), .key_dim = K, .value_dim = V,
             .decay = decay},
            lengths);
    }
  }
  for (const int32_t K : {64, 128, 256}) {
    check({.name = "normalised, " + std::to_string(K) + " keys", .key_dim = K, .value_dim = 64,
           .normalise = true},
          lengths);
  }
}

TEST_F(CudaOuterPrefill, SharedHeads) {
  check({.name = "Mamba-2, 4 heads of one group", .heads = 4, .key_heads = 1, .value_heads = 4,
         .query_heads = 1, .value_dim = 64, .decay = Decay::PerHead, .v_scale = true,
         .skip = true});
  check({.name = "Mamba-2, 6 heads of two groups", .heads = 6, .key_heads = 2, .value_heads = 6,
         .query_heads = 2, .value_dim = 64, .decay = Decay::PerHead, .v_scale = true,
         .skip = true});
  // With so many rows two heads of 64 values share a block.
  check({.name = "Mamba-2, 8 heads of one group", .heads = 8, .key_heads = 1, .value_heads = 8,
         .query_heads = 1, .value_dim = 64, .decay = Decay::PerHead, .v_scale = true,
         .skip = true},
        std::vector<int32_t>(40, 70));
  check({.name = "4 heads, 2 of keys, 1 of values", .heads = 4, .key_heads = 2, .value_heads = 1,
         .query_heads = 4, .decay = Decay::PerHead});
  check({.name = "6 queries of 2 heads, which take steps", .query_heads = 6,
         .decay = Decay::PerKey});
}

// exp(-L) would be exp(20,480) here, and exp(80) inside one chunk.
TEST_F(CudaOuterPrefill, StrongDecaysStayFiniteAndRight) {
  for (const Decay decay : {Decay::Constant, Decay::PerHead, Decay::PerKey, Decay::PerValue}) {
    check({.name = "-5 a token", .heads = 1, .key_heads = 1, .value_heads = 1, .query_heads = 1,
           .key_dim = 64, .value_dim = 64, .decay = decay, .log_decay = -5},
          {4096, 1, 40});
    check({.name = "-300 a token", .heads = 1, .key_heads = 1, .value_heads = 1, .query_heads = 1,
           .key_dim = 64, .value_dim = 64, .decay = decay, .log_decay = -300},
          {100, 1, 40});
  }
}

// Long memories: what is wrong in a state shows in all that follows.
TEST_P(CudaOuterKind, LongRows) {
  OuterCase c = kind();
  c.heads = c.key_heads = c.value_heads = c.query_heads = 1;
  c.log_decay = -0.001f;
  check(c, {2048, 1000});
}

// Few heads: rows are cut into segments. What a wrong edge of one, or a wrong start, breaks: rows
// of one segment among rows of many, last segments of one token, one tile, and full ones.
TEST_P(CudaOuterKind, RowsCutIntoSegments) {
  for (const std::vector<int32_t>& lengths :
       {std::vector<int32_t>{512}, {513, 1, 0, 1}, {544, 33}, {1025, 40, 1, 200, 700},
        {767, 768}}) {
    check(kind(), lengths);
  }
  check(small(), {1024, 1, 600});
}

TEST_F(CudaOuterPrefill, SlicesAndPairsOfHeadsCutIntoSegments) {
  check({.name = "256 keys, two slices", .key_dim = 256, .value_dim = 256, .decay = Decay::PerKey},
        {1500, 1, 100});
  check({.name = "Mamba-2, pairs of heads", .heads = 4, .key_heads = 1, .value_heads = 4,
         .query_heads = 1, .value_dim = 64, .decay = Decay::PerHead, .v_scale = true,
         .skip = true},
        {900, 1, 100});
}

// The longest prompts, whose states have decayed long ago or hold everything.
TEST_P(CudaOuterKind, PromptsOf32768) {
  OuterCase c = small();
  c.log_decay = -0.0001f;
  check(c, {32768 + 17});
}

// States beyond what a half can hold.
TEST_P(CudaOuterKind, LargeStates) {
  OuterCase c = kind();
  c.heads = c.key_heads = c.value_heads = c.query_heads = 1;
  c.log_decay = -0.001f;
  c.value = 700;
  check(c, {2048, 1000});
}

}  // namespace
}  // namespace weir
