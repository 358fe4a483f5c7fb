// The chunk kernels of SwiLA, which take the rows of many tokens, against the plain CPU op, which
// walks the tokens one after the other.
#include "tests/ops/cuda_swila_case.h"

namespace weir {
namespace {

// Half-precision operands, sums in float32; measured below 6e-4. Where a mixture is switched to at
// once, the smallest difference in a token grows in those after it: values here are of ordinary
// size.
constexpr double kTolerance = 1e-3;

class CudaSwilaPrefill : public CudaTest {
 protected:
  static void check(const SwilaCase& c, const std::vector<int32_t>& lengths = kMixed,
                    bool known = false) {
    same("prefill, " + c.name() + ", " + std::to_string(lengths.size()) + " rows", kTolerance,
         [&](Side& side) { return swila_program(side, c, rows_of(lengths, known)); });
  }
  static void check_slices(bool gated);
};

std::vector<SwilaCase> variants() {
  return {{.value_scale = 1},
          {.temporal = true, .value_scale = 1},
          {.gated = true, .value_scale = 1},
          {.gated = true, .value_scale = 1, .dt_shift = -7},
          {.temporal = true, .gated = true, .value_scale = 1},
          {.temporal = true, .gated = true, .value_scale = 1, .dt_shift = -7}};
}

TEST_F(CudaSwilaPrefill, EveryVariant) {
  for (const SwilaCase& c : variants()) check(c);
}

// What a wrong tail, or a wrong token at the edge of a chunk, breaks.
TEST_F(CudaSwilaPrefill, EveryLength) {
  std::vector<int32_t> lengths;
  for (int32_t length = 1; length <= 130; ++length) lengths.push_back(length);
  for (SwilaCase c : variants()) {
    c.heads = 1;
    check(c, lengths);
  }
}

// Heads cut into slices of 16, 32 and 64 values: the fewer heads and rows, the thinner.
void CudaSwilaPrefill::check_slices(bool gated) {
  for (SwilaCase c : variants()) {
    if (c.gated != gated) continue;
    for (const auto& [heads, rows] : {std::pair{1, 1}, {2, 3}, {5, 8}, {3, 30}}) {
      std::vector<int32_t> lengths;
      for (int32_t i = 0; i < rows; ++i) lengths.push_back(34 + i * 29 % 37);
      c.heads = heads;
      check(c, lengths);
    }
  }
}
TEST_F(CudaSwilaPrefill, EverySlice) { check_slices(false); }
TEST_F(CudaSwilaPrefill, EverySliceWithGates) { check_slices(true); }

// Prompts among rows that decode: the blocks for either must find theirs, and nobody the others'.
TEST_F(CudaSwilaPrefill, PromptsAmongDecodingRows) {
  std::vector<int32_t> last(70, 1), between;
  last.push_back(150);
  for (int32_t i = 0; i < 90; ++i) {
    between.push_back(i % 40 == 39 ? 50 + i : i % 17 == 3 ? i % 33 : i % 11 == 5 ? 0 : 1);
  }
  for (const SwilaCase& c : variants()) {
    if (c.dt_shift != 0) continue;
    for (const auto& lengths : {last, between}) check(c, lengths);
    check(c, between, true);
  }
}

// exp(-L) would be exp(20,480) here, and exp(80) inside one chunk.
TEST_F(CudaSwilaPrefill, StrongGatesStayFiniteAndRight) {
  for (const bool temporal : {false, true}) {
    check({.heads = 1, .temporal = temporal, .gated = true, .dt_shift = 5, .decay_scale = 1},
          {4096, 1, 40});
  }
}

// Halves of chunks are made by halves, by tf32 or level by level, by how much their channels lose,
// and two of neighbouring strengths meet: what one of them leaves to the other in another form
// shows.
TEST_F(CudaSwilaPrefill, GatesOfEveryStrength) {
  for (const float scale : {0.02f, 0.1f, 0.3f, 0.5f, 1.0f, 2.0f, 6.0f}) {
    for (const bool temporal : {false, true}) {
      check({.heads = 2, .temporal = temporal, .gated = true, .value_scale = 1,
             .decay_scale = scale});
    }
  }
}

// Long memories: what is wrong in a state shows in all that follows.
TEST_F(CudaSwilaPrefill, LongRows) {
  for (SwilaCase c : variants()) {
    if (c.gated && c.dt_shift == 0) continue;
    c.heads = 1;
    check(c, {2048, 1000});
  }
}

// Answers' distributions that change by a thousandth a token, and states that little is written to:
// a sigmoid that is wrong by much of what is small goes at another rate than decode goes on with.
// (Not the keys': without forgetting, what halves are wrong by decides between mixtures at last.)
TEST_F(CudaSwilaPrefill, SlowMixesAndWeakWrites) {
  for (const float shift : {-5.0f, -7.0f, -9.0f}) {
    for (const bool gated : {false, true}) {
      check({.heads = 1, .temporal = true, .gated = gated, .value_scale = 1, .query_shift = shift,
             .dt_shift = gated ? -7.0f : 0.0f},
            {2048, 1000});
      check({.heads = 1, .temporal = gated, .gated = gated, .value_scale = 1, .beta_shift = shift,
             .dt_shift = gated ? -7.0f : 0.0f},
            {2048, 1000});
    }
  }
}

// Priors of zero, and gates whose odds a float does not hold.
TEST_F(CudaSwilaPrefill, LogitsThatSaturate) {
  for (const bool temporal : {false, true}) {
    check({.temporal = temporal, .value_scale = 1, .router_scale = 80, .mix_scale = 100});
    check({.temporal = temporal, .gated = true, .value_scale = 1, .router_scale = 80,
           .mix_scale = 100});
  }
}

// What is served by steps though its rows are long.
TEST_F(CudaSwilaPrefill, OtherSizes) {
  check({.mixtures = 2, .temporal = true, .gated = true}, {40, 3});
  check({.dim = 32, .temporal = true}, {40, 3});
  check({.conv = 3, .gated = true}, {40, 3});
}

}  // namespace
}  // namespace weir
