// The chunk kernels of the delta family, which take the rows of many tokens, against the plain CPU
// op, which walks the tokens one after the other.
#include <cstring>
#include <tuple>

#include "tests/ops/cuda_delta_case.h"

namespace weir {
namespace {

// Half-precision operands, sums in float32; measured below 7e-4.
constexpr double kTolerance = 1.5e-3;

class CudaPrefill : public CudaTest {
 protected:
  static void check(const DeltaCase& c, const std::vector<int32_t>& lengths = kMixed) {
    same("prefill, " + c.name + ", " + std::to_string(lengths.size()) + " rows", kTolerance,
         [&](Side& side) { return delta_program(side, c, rows_of(lengths)); });
  }
};

std::vector<DeltaCase> kinds() {
  return {{.name = "GDN"},
          {.name = "GDN that remembers", .dt_shift = -7},
          {.name = "DeltaNet", .decay = Decay::None, .gate = false},
          {.name = "KDA", .decay = Decay::PerChannel, .gate_activation = Activation::Sigmoid},
          {.name = "KDA that remembers", .decay = Decay::PerChannel, .dt_shift = -7},
          {.name = "KDA, bounded", .decay = Decay::PerChannel, .lower_bound = -5},
          {.name = "GDN-2", .decay = Decay::PerChannel, .erase = true}};
}

// With few heads, whose chunks are prepared side by side, and with many, whose rows one kernel
// takes as a whole.
class CudaPrefillHeads : public CudaPrefill, public testing::WithParamInterface<int32_t> {
 protected:
  static void check(DeltaCase c, const std::vector<int32_t>& lengths = kMixed) {
    c.name += ", " + std::to_string(GetParam()) + " heads";
    c.key_heads = c.value_heads = c.decay_heads = GetParam();
    CudaPrefill::check(c, lengths);
  }
};
INSTANTIATE_TEST_SUITE_P(Heads, CudaPrefillHeads, testing::Values(2, 8));

TEST_P(CudaPrefillHeads, EveryDecayAndGate) {
  for (const DeltaCase& c : kinds()) check(c);
  check({.name = "no beta", .beta = false});
  check({.name = "erase without decay", .decay = Decay::None, .erase = true});
  check({.name = "erase with one decay a head", .erase = true});
}

// What a wrong tail, or a wrong token at the edge of a block or chunk, breaks.
class CudaPrefillLengths : public CudaPrefill, public testing::WithParamInterface<int> {};
TEST_P(CudaPrefillLengths, EveryLength) {
  std::vector<int32_t> lengths;
  for (int32_t length = 1; length <= 130; ++length) lengths.push_back(length);
  DeltaCase c = kinds()[size_t(GetParam())];
  c.key_heads = c.value_heads = c.decay_heads = 1;
  check(c, lengths);
}
INSTANTIATE_TEST_SUITE_P(Kinds, CudaPrefillLengths, testing::Range(0, 7));

// Heads cut into slices of 16, 32, 64 and 128 values: the fewer rows, the thinner.
class CudaPrefillSlices : public CudaPrefill,
                          public testing::WithParamInterface<std::tuple<Decay, int>> {};
TEST_P(CudaPrefillSlices, EverySizeAndSlice) {
  const auto [decay, rows] = GetParam();
  for (const auto& [K, V] : {std::pair{64, 64}, {64, 128}, {128, 64}, {128, 128}, {128, 256}}) {
    std::vector<int32_t> lengths;
    for (int32_t i = 0; i < rows; ++i) lengths.push_back(34 + i * 29 % 70);
    check({.name = std::to_string(K) + "x" + std::to_string(V), .key_dim = K, .value_dim = V,
           .decay = decay},
          lengths);
  }
}
INSTANTIATE_TEST_SUITE_P(Sizes, CudaPrefillSlices,
                         testing::Combine(testing::Values(Decay::PerHead, Decay::PerChannel),
                                          testing::Values(1, 10, 20, 40)));

// More chunks than the scratch memory has room for (384 MB, 39 KB for a chunk of a head here): rows
// begin in one turn and end in a later one, in groups whose rows have different lengths. What a row
// computes is the same to the bit as in smaller company, which takes one turn.
TEST_F(CudaPrefill, ManyTurns) {
  const DeltaCase c{.name = "64x64, 24 heads", .key_heads = 24, .value_heads = 24, .key_dim = 64,
                    .value_dim = 64, .decay_heads = 24};
  std::vector<int32_t> lengths;
  for (int32_t i = 0; i < 260; ++i) {
    lengths.push_back(i % 15 == 7 ? 200 : 33 + i % 2);
  }
  const Steps steps = rows_of(lengths);
  Side side(cuda(), 11);
  const Program whole = delta_program(side, c, steps);
  const DeltaMix& op = std::get<DeltaMix>(whole[0]);
  const auto slots = size_t(steps.slots() * op.state.stride);
  const auto out = size_t(steps.tokens() * op.out.stride);
  const std::vector<float> before = side.read(op.state.data, slots);
  side.backend().run(whole);
  const std::vector<float> states = side.read(op.state.data, slots);
  const std::vector<float> answers = side.read(op.out.data, out);

  side.backend().upload(op.state.data, before.data(), slots * sizeof(float));
  Program parts;
  constexpr int32_t kRows = 26;
  for (int32_t row = 0; row < 260; row += kRows) {
    DeltaMix part = op;
    part.rows.count = kRows;
    part.rows.tokens = steps.begin[size_t(row + kRows)] - steps.begin[size_t(row)];
    part.rows.slot += row, part.rows.first += row, part.rows.begin += row;
    parts.push_back(part);
  }
  side.backend().run(parts);
  EXPECT_EQ(states, side.read(op.state.data, slots));
  EXPECT_EQ(0, std::memcmp(answers.data(), side.read(op.out.data, out).data(),
                           out * sizeof(float)));  // what no row writes is no number
}

// With rounded vectors the chunk kernel of many rows leaves its answers as the Linear that follows
// reads them; rows that take steps must be among them.
TEST_F(CudaPrefill, AnswersRoundedForALinear) {
  for (const bool read_once : {false, true}) {
    for (const Decay decay : {Decay::PerHead, Decay::PerChannel}) {
      const DeltaCase c{.name = "before a linear", .key_heads = 8, .value_heads = 8,
                        .decay = decay, .decay_heads = 8};
      const Steps steps = rows_of({150, 1, 64, 33, 7, 1, 200, 65, 40});
      const auto make = [&](Side& side) {
        Program program = delta_program(side, c, steps);
        auto& mix = std::get<DeltaMix>(program[0]);
        mix.read_once = read_once;
        mix.out = side.acts(steps.tokens(), 8 * 128);
        Linear linear{.tokens = steps.tokens(), .in = 8 * 128, .parts = 1, .x = mix.out};
        linear.part[0] = side.matrix(128, 8 * 128, DType::BF16);
        linear.y = side.out(steps.tokens(), 128, "linear");
        program.push_back(linear);
        return program;
      };
      same("answers for a linear", 4e-3, make, {.bf16_vectors = true});
    }
  }
}

// Channels that lose all they know within a block of 16 tokens, among others that do not.
TEST_P(CudaPrefillHeads, DecaysBeyondAFloat) {
  check({.name = "KDA, violent", .decay = Decay::PerChannel, .dt_shift = 20});
  check({.name = "GDN, violent", .dt_shift = 20});
}

TEST_F(CudaPrefill, SharedKeyHeadsAndDecays) {
  check({.name = "2 key heads, 6 value heads", .key_heads = 2, .value_heads = 6, .decay_heads = 6});
  check({.name = "GDN-2, 2 and 4 heads", .key_heads = 2, .value_heads = 4,
         .decay = Decay::PerChannel, .decay_heads = 2, .erase = true});
}

TEST_P(CudaPrefillHeads, EveryConvolutionAndNorm) {
  check({.name = "no convolution", .conv = 0});
  check({.name = "width 1", .conv = 1});
  check({.name = "width 2, bias", .conv = 2, .conv_bias = true});
  check({.name = "width 3", .conv = 3, .decay = Decay::PerChannel});
  check({.name = "width 4, bias", .conv = 4, .conv_bias = true});
  check({.name = "width 7, which takes steps", .conv = 7});
  check({.name = "elu + 1, sum norm", .qk_activation = Activation::EluPlusOne,
         .qk_norm = QkNorm::Sum});
  check({.name = "no activation, norm without epsilon", .qk_activation = Activation::None,
         .qk_norm = QkNorm::L2Max});
}

// exp(-L) would be exp(20,480) here, and exp(320) inside one chunk.
TEST_F(CudaPrefill, StrongDecaysStayFiniteAndRight) {
  for (const Decay decay : {Decay::PerHead, Decay::PerChannel}) {
    check({.name = "-5 a token", .key_heads = 1, .value_heads = 1, .key_dim = 64, .value_dim = 64,
           .decay = decay, .decay_heads = 1, .lower_bound = -5, .dt_shift = 100},
          {4096, 1, 40});
  }
}

// Long memories: what is wrong in a state shows in all that follows.
TEST_F(CudaPrefill, LongRowsOfManyHeads) {
  for (DeltaCase c : kinds()) {
    c.key_heads = c.value_heads = c.decay_heads = 34;
    if (c.dt_shift < 0 || c.decay == Decay::None) check(c, {700, 300});
  }
}
TEST_F(CudaPrefill, LongRows) {
  for (DeltaCase c : kinds()) {
    c.key_heads = c.value_heads = c.decay_heads = 1;
    if (c.dt_shift < 0 || c.decay == Decay::None) check(c, {2048, 1000});
  }
}

}  // namespace
}  // namespace weir
