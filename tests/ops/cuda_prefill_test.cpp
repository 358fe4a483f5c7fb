// The chunk kernels of the delta family, which take the rows of many tokens, against the plain CPU
// op, which walks the tokens one after the other.
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

TEST_F(CudaPrefill, EveryDecayAndGate) {
  for (const DeltaCase& c : kinds()) check(c);
  check({.name = "no beta", .beta = false});
  check({.name = "erase without decay", .decay = Decay::None, .erase = true});
  check({.name = "erase with one decay a head", .erase = true});
}

// What a wrong tail, or a wrong token at the edge of a block or chunk, breaks.
TEST_F(CudaPrefill, EveryLength) {
  std::vector<int32_t> lengths;
  for (int32_t length = 1; length <= 130; ++length) lengths.push_back(length);
  for (DeltaCase c : kinds()) {
    c.key_heads = c.value_heads = c.decay_heads = 1;
    if (!c.erase) check(c, lengths);
  }
}

// Heads cut into slices of 16, 32, 64 and 128 values: the fewer rows, the thinner.
TEST_F(CudaPrefill, EverySizeAndSlice) {
  for (const Decay decay : {Decay::PerHead, Decay::PerChannel}) {
    for (const int32_t rows : {1, 10, 20, 40}) {
      for (const auto& [K, V] : {std::pair{64, 64}, {64, 128}, {128, 64}, {128, 128}, {128, 256}}) {
        std::vector<int32_t> lengths;
        for (int32_t i = 0; i < rows; ++i) lengths.push_back(34 + i * 29 % 70);
        check({.name = std::to_string(K) + "x" + std::to_string(V), .key_dim = K, .value_dim = V,
               .decay = decay},
              lengths);
      }
    }
  }
}

TEST_F(CudaPrefill, SharedKeyHeadsAndDecays) {
  check({.name = "2 key heads, 6 value heads", .key_heads = 2, .value_heads = 6, .decay_heads = 6});
  check({.name = "GDN-2, 2 and 4 heads", .key_heads = 2, .value_heads = 4,
         .decay = Decay::PerChannel, .decay_heads = 2, .erase = true});
}

TEST_F(CudaPrefill, EveryConvolutionAndNorm) {
  check({.name = "no convolution", .conv = 0});
  check({.name = "width 1", .conv = 1});
  check({.name = "width 2, bias", .conv = 2, .conv_bias = true});
  check({.name = "width 3", .conv = 3, .decay = Decay::PerChannel});
  check({.name = "width 4, bias", .conv = 4, .conv_bias = true});
  check({.name = "width 7, which takes steps", .conv = 7});
  check({.name = "elu + 1, sum norm", .qk_activation = Activation::EluPlusOne,
         .qk_norm = QkNorm::Sum});
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
TEST_F(CudaPrefill, LongRows) {
  for (DeltaCase c : kinds()) {
    c.key_heads = c.value_heads = c.decay_heads = 1;
    if (c.dt_shift < 0 || c.decay == Decay::None) check(c, {2048, 1000});
  }
}

}  // namespace
}  // namespace weir
