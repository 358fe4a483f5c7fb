// The chunk kernels of the delta family, which take the rows of many tokens, against the plain CPU
// op, which walks the tokens one after the other.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "tests/ops/cuda_delta_case.h"

namespace weir {
namespace {

// Half-precision operands, sums in float32; measured below 7e-4.
constexpr double kTolerance = 1.5e-3;

class CudaPrefill : public CudaTest {
 protected:
  static void check(const DeltaCase& c, const std::vector<int32_t>& lengths = kMixed,
                    bool known = false) {
    same("prefill, " + c.name + ", " + std::to_string(lengths.size()) + " rows" +
             (known ? ", known" : ""), kTolerance,
         [&](Side& side) { return delta_program(side, c, rows_of(lengths, known)); });
  }
};

// So many rows of so many tokens that one kernel takes each as a whole, with a single head; short
// ones among them. Chunk tails of every length.
std::vector<int32_t> many_rows() {
  std::vector<int32_t> lengths = kMixed;
  for (int32_t i = 0; i < 66; ++i) lengths.push_back(128 + i);
  return lengths;
}

// With few rows, whose chunks are prepared side by side, and with many.
class CudaPrefillRows : public CudaPrefill,
                        public testing::WithParamInterface<std::tuple<bool, DeltaCase>> {};
TEST_P(CudaPrefillRows, EveryKind) {
  auto [many, c] = GetParam();
  c.key_heads = c.value_heads = c.decay_heads = many ? 1 : 2;
  check(c, many ? many_rows() : kMixed);
}

std::vector<DeltaCase> kinds() {
  return {{.name = "GDN"},
          {.name = "GDN that remembers", .dt_shift = -7},
          {.name = "DeltaNet", .decay = Decay::None, .gate = false},
          {.name = "KDA", .decay = Decay::PerChannel, .gate_activation = Activation::Sigmoid},
          {.name = "KDA that remembers", .decay = Decay::PerChannel, .dt_shift = -7},
          {.name = "KDA, bounded", .decay = Decay::PerChannel, .lower_bound = -5},
          {.name = "GDN-2", .decay = Decay::PerChannel, .erase = true}};
}

std::vector<DeltaCase> more_kinds() {
  return {{.name = "no beta", .beta = false},
          {.name = "erase without decay", .decay = Decay::None, .erase = true},
          {.name = "erase with one decay a head", .erase = true},
          // Channels that lose all they know within a block of 16 tokens, among others that do not.
          {.name = "KDA, violent", .decay = Decay::PerChannel, .dt_shift = 20},
          {.name = "GDN, violent", .dt_shift = 20},
          {.name = "no convolution", .conv = 0},
          {.name = "width 1", .conv = 1},
          {.name = "width 2, bias", .conv = 2, .conv_bias = true},
          {.name = "width 3", .conv = 3, .decay = Decay::PerChannel},
          {.name = "width 4, bias", .conv = 4, .conv_bias = true},
          {.name = "width 7, which takes steps", .conv = 7},
          {.name = "elu + 1, sum norm", .qk_activation = Activation::EluPlusOne,
           .qk_norm = QkNorm::Sum},
          {.name = "no activation, norm without epsilon", .qk_activation = Activation::None,
           .qk_norm = QkNorm::L2Max}};
}
INSTANTIATE_TEST_SUITE_P(Kinds, CudaPrefillRows,
                         testing::Combine(testing::Bool(), testing::ValuesIn(kinds())));
INSTANTIATE_TEST_SUITE_P(MoreKinds, CudaPrefillRows,
                         testing::Combine(testing::Bool(), testing::ValuesIn(more_kinds())));

// What a wrong tail, or a wrong token at the edge of a block or chunk, breaks.
class CudaPrefillLengths : public CudaPrefill, public testing::WithParamInterface<int> {};
TEST_P(CudaPrefillLengths, EveryLength) {
  std::vector<int32_t> lengths;
  for (int32_t length = 1; length <= 130; ++length) lengths.push_back(length);
  DeltaCase c = kinds()[size_t(GetParam())];
  c.key_heads = c.value_heads = c.decay_heads = 1;
  check(c, lengths);
  check(c, lengths, true);
}
INSTANTIATE_TEST_SUITE_P(Kinds, CudaPrefillLengths, testing::Range(0, 7));

// Heads cut into slices of 16, 32, 64 and 128 values: the fewer heads, the thinner.
class CudaPrefillSlices : public CudaPrefill,
                          public testing::WithParamInterface<std::tuple<Decay, int>> {};
TEST_P(CudaPrefillSlices, EverySizeAndSlice) {
  const auto [decay, heads] = GetParam();
  for (const auto& [K, V] : {std::pair{64, 64}, {64, 128}, {128, 64}, {128, 128}, {128, 256}}) {
    check({.name = std::to_string(K) + "x" + std::to_string(V), .key_heads = heads,
           .value_heads = heads, .key_dim = K, .value_dim = V, .decay = decay,
           .decay_heads = heads},
          {70, 34, 1});
  }
}
INSTANTIATE_TEST_SUITE_P(Sizes, CudaPrefillSlices,
                         testing::Combine(testing::Values(Decay::PerHead, Decay::PerChannel),
                                          testing::Values(2, 10, 40, 67)));

// Prompts among rows that decode: the blocks for either must find theirs, and nobody the others'.
// Heads of 128x128 decode in a kernel of their own where there are 16 of them.
std::vector<int32_t> between() {
  std::vector<int32_t> lengths;
  for (int32_t i = 0; i < 120; ++i) {
    lengths.push_back(i % 40 == 39 ? 50 + i : i % 7 == 3 ? i % 33 : i % 11 == 5 ? 0 : 1);
  }
  return lengths;
}
class CudaPrefillAmong : public CudaPrefill, public testing::WithParamInterface<DeltaCase> {};
TEST_P(CudaPrefillAmong, DecodingRows) {
  std::vector<int32_t> last(100, 1), first{90};
  last.push_back(300);
  first.resize(70, 1);
  DeltaCase c = GetParam();
  for (const auto& lengths : {last, first, between()}) check(c, lengths);
  c.key_dim = 64;
  check(c, between());
}
INSTANTIATE_TEST_SUITE_P(Kinds, CudaPrefillAmong, testing::ValuesIn(kinds()));
TEST_F(CudaPrefill, AmongDecodingRowsOfSharedKeys) {
  check({.name = "4 value heads a key head", .key_heads = 1, .value_heads = 4, .decay_heads = 4},
        between());
}

// Where the host knows how many rows are of one token and of more, kernels start fewer blocks: one
// that is missing, or that waits for a row that is none. Short prompts alone, after rows that
// decode, and before one.
class CudaPrefillKnown : public CudaPrefill, public testing::WithParamInterface<DeltaCase> {};
TEST_P(CudaPrefillKnown, EveryMixture) {
  const std::vector<int32_t> prompts(40, 16);
  std::vector<int32_t> after(20, 1), before = prompts;
  for (int32_t i = 0; i < 30; ++i) after.push_back(i % 5 == 1 ? 3 : 9 + i);
  before.push_back(1);
  DeltaCase c = GetParam();
  for (const auto& lengths : {prompts, after, before, between()}) check(c, lengths, true);
  c.key_heads = c.value_heads = c.decay_heads = 16;
  check(c, {1, 1, 0, 1, 16, 17, 9, 0, 64, 16, 16, 2}, true);
}
INSTANTIATE_TEST_SUITE_P(Kinds, CudaPrefillKnown, testing::ValuesIn(kinds()));

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
  constexpr int32_t kRows = 130;
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

// Kernels of short rows that run beside those of long ones: where the graph of a step, which is
// what runs from the second time on, lets them meet, or what follows begin before they are done.
TEST_F(CudaPrefill, AsAGraphTheSame) {
  std::vector<int32_t> lengths(40, 1);
  for (const int32_t length : {300, 3, 1, 64, 8, 9, 1}) lengths.push_back(length);
  const Steps steps = rows_of(lengths);
  for (const int32_t heads : {1, 16}) {
    Side side(cuda(), 5);
    Program program = delta_program(side, {.name = "graph", .key_heads = heads,
                                           .value_heads = heads, .decay_heads = heads}, steps);
    const DeltaMix op = std::get<DeltaMix>(program[0]);
    Linear linear{.tokens = steps.tokens(), .in = heads * 128, .parts = 1, .x = op.out};
    linear.part[0] = side.matrix(128, heads * 128, DType::BF16);
    linear.y = side.out(steps.tokens(), 128, "linear");
    program.push_back(linear);
    const auto slots = size_t(steps.slots() * op.state.stride);
    const auto size = size_t(steps.tokens() * linear.y.stride);
    const std::vector<float> before = side.read(op.state.data, slots);
    std::vector<float> states, answers;
    for (int run = 0; run < 4; ++run) {
      side.backend().upload(op.state.data, before.data(), slots * sizeof(float));
      side.backend().run(program);
      if (run == 0) {
        states = side.read(op.state.data, slots);
        answers = side.read(linear.y.data, size);
      } else {
        EXPECT_EQ(side.read(op.state.data, slots), states) << heads << " heads, run " << run;
        EXPECT_EQ(side.read(linear.y.data, size), answers) << heads << " heads, run " << run;
      }
    }
  }
}

// With rounded vectors the chunk kernel of many rows leaves its answers as the Linear that follows
// reads them; rows that take steps must be among them.
class CudaPrefillRounded : public CudaPrefill,
                           public testing::WithParamInterface<std::tuple<bool, bool>> {};
TEST_P(CudaPrefillRounded, AnswersForALinear) {
  const auto [many, bf16] = GetParam();
  const int32_t heads = many ? 1 : 8;
  for (const bool read_once : {false, true}) {
    for (const Decay decay : {Decay::PerHead, Decay::PerChannel}) {
      const DeltaCase c{.name = "before a linear", .key_heads = heads, .value_heads = heads,
                        .decay = decay, .decay_heads = heads};
      std::vector<int32_t> lengths = many ? many_rows() : kMixed;
      std::erase(lengths, 0);  // nobody answers padding rows
      const Steps steps = rows_of(lengths);
      const auto make = [&](Side& side) {
        Program program = delta_program(side, c, steps);
        auto& mix = std::get<DeltaMix>(program[0]);
        mix.read_once = read_once;
        mix.out = side.acts(steps.tokens(), heads * 128);
        Linear linear{.tokens = steps.tokens(), .in = heads * 128, .parts = 1, .x = mix.out};
        linear.part[0] = side.matrix(128, heads * 128, DType::BF16);
        linear.y = side.out(steps.tokens(), 128, "linear");
        program.push_back(linear);
        return program;
      };
      same("answers for a linear", 4e-3, make, {.bf16_vectors = bf16});
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Many, CudaPrefillRounded,
                         testing::Combine(testing::Bool(), testing::Bool()));

TEST_F(CudaPrefill, SharedKeyHeadsAndDecays) {
  for (const auto& lengths : {kMixed, many_rows()}) {
    check({.name = "2 key heads, 6 value heads", .key_heads = 2, .value_heads = 6,
           .decay_heads = 6}, lengths);
    check({.name = "GDN-2, 2 and 4 heads", .key_heads = 2, .value_heads = 4,
           .decay = Decay::PerChannel, .decay_heads = 2, .erase = true}, lengths);
  }
}

// exp(-L) would be exp(20,480) here, and exp(320) inside one chunk.
TEST_F(CudaPrefill, StrongDecaysStayFiniteAndRight) {
  for (const Decay decay : {Decay::PerHead, Decay::PerChannel}) {
    check({.name = "-5 a token", .key_heads = 1, .value_heads = 1, .key_dim = 64, .value_dim = 64,
           .decay = decay, .decay_heads = 1, .lower_bound = -5, .dt_shift = 100},
          {4096, 1, 40});
    std::vector<int32_t> many = many_rows();
    many.insert(many.begin(), 4096);
    check({.name = "-5 a token, many rows", .key_heads = 1, .value_heads = 1, .decay = decay,
           .decay_heads = 1, .lower_bound = -5, .dt_shift = 100}, many);
  }
}

// Chunks reach behind their row's end and before its beginning, where other rows' numbers lie,
// which may be none: every other row's are not, and those between answer the same to the bit.
class CudaPrefillApart : public CudaPrefill,
                         public testing::WithParamInterface<std::tuple<bool, int>> {};
TEST_P(CudaPrefillApart, OtherRowsMayHoldNoNumbers) {
  const auto [known, kind] = GetParam();  // known rows are taken whole
  DeltaCase c = kinds()[size_t(kind)];
  c.key_heads = c.value_heads = c.decay_heads = 1;
  std::vector<int32_t> lengths;
  for (int32_t i = 0; i < 70; ++i) lengths.push_back(60 + i);
  const Steps steps = rows_of(lengths, known);
  const int32_t tokens = steps.tokens();
  Side side(cuda(), 3);
  const Program program = delta_program(side, c, steps);
  const DeltaMix& op = std::get<DeltaMix>(program[0]);
  const auto slots = size_t(steps.slots() * op.state.stride), out = size_t(tokens * op.out.stride);
  const std::vector<float> before = side.read(op.state.data, slots);
  side.backend().run(program);
  const std::vector<float> states = side.read(op.state.data, slots);
  const std::vector<float> answers = side.read(op.out.data, out);

  for (const Acts& acts : {op.q, op.k, op.v, op.decay_in, op.erase, op.write, op.beta, op.gate}) {
    if (acts.data == nullptr) continue;
    std::vector<float> x = side.read(acts.data, size_t(tokens * acts.stride));
    for (size_t row = 1; row < lengths.size(); row += 2) {
      std::fill(x.begin() + steps.begin[row] * acts.stride,
                x.begin() + steps.begin[row + 1] * acts.stride, std::nanf(""));
    }
    side.backend().upload(acts.data, x.data(), x.size() * sizeof(float));
  }
  side.backend().upload(op.state.data, before.data(), slots * sizeof(float));
  side.backend().run(program);
  const std::vector<float> then = side.read(op.state.data, slots);
  const std::vector<float> again = side.read(op.out.data, out);
  for (size_t row = 0; row < lengths.size(); row += 2) {
    const auto first = size_t(steps.begin[row] * op.out.stride);
    const auto slot = size_t(steps.slot[row] * op.state.stride);
    const size_t answered = size_t(lengths[row] * op.out.stride) * sizeof(float);
    const size_t kept = size_t(op.state.stride) * sizeof(float);
    EXPECT_TRUE(std::isfinite(answers[first])) << "row " << row;
    EXPECT_EQ(0, std::memcmp(&answers[first], &again[first], answered)) << "row " << row;
    EXPECT_EQ(0, std::memcmp(&states[slot], &then[slot], kept)) << "state of row " << row;
  }
}
INSTANTIATE_TEST_SUITE_P(Kinds, CudaPrefillApart,
                         testing::Combine(testing::Bool(), testing::Range(0, 7)));

// States that lose a thousandth a token by their decays or by what erases: a sigmoid that is wrong
// by much of what is small forgets at another rate than decode goes on with.
TEST_F(CudaPrefill, SlowDecaysAndWeakErasure) {
  for (const DeltaCase& c : {
           DeltaCase{.name = "GDN, bounded, slow", .lower_bound = -5, .dt_shift = -9},
           DeltaCase{.name = "KDA, bounded, slow", .decay = Decay::PerChannel, .lower_bound = -5,
                     .dt_shift = -9},
           DeltaCase{.name = "DeltaNet, weak", .decay = Decay::None, .beta_shift = -7},
           DeltaCase{.name = "KDA, weak", .decay = Decay::PerChannel, .dt_shift = -9,
                     .beta_shift = -7},
           DeltaCase{.name = "GDN-2, weak", .decay = Decay::PerChannel, .dt_shift = -9,
                     .beta_shift = -7, .erase = true},
       }) {
    std::vector<int32_t> many = many_rows();
    many.insert(many.begin(), {1500, 300});
    check(c, {2048, 1000});
    check(c, many);
  }
}

// Long memories: what is wrong in a state shows in all that follows.
TEST_F(CudaPrefill, LongRowsOfMany) {
  for (DeltaCase c : kinds()) {
    c.key_heads = c.value_heads = c.decay_heads = 1;
    std::vector<int32_t> lengths = many_rows();
    lengths.insert(lengths.begin(), {700, 300});
    if (c.dt_shift < 0 || c.decay == Decay::None) check(c, lengths);
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
