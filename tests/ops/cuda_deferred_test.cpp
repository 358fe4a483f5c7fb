// Deferred writes on CUDA against the plain CPU: a head that reads less or more than what waits of
// it, writes out of turn, or loses what it leaves.
#include "tests/ops/cuda_delta_case.h"

namespace weir {
namespace {

// Positions of every turn, with any number of tokens since the last write, fresh rows and padding.
Steps many_rows(int32_t count) {
  Steps many{{}, {}, {0}};
  for (int32_t row = 0; row < count; ++row) {
    many.slot.push_back(row % 17 == 3 ? kPadding : (row * 7 + 2) % count);
    many.first.push_back(row % 11 == 2 ? 0 : row % 13);
    many.begin.push_back(row + 1);
  }
  return deferring(many);
}

class CudaDeferred : public CudaTest {
 protected:
  static void check(const DeltaCase& c, const Steps& steps, const std::string& rows,
                    double tolerance) {
    same("deferred, " + rows + ", " + c.name, tolerance,
         [&](Side& side) { return delta_program(side, c, steps); });
  }
};

const DeltaCase kKinds[] = {
    {.name = "GDN"},
    {.name = "DeltaNet", .decay = Decay::None, .gate = false},
    {.name = "KDA", .decay = Decay::PerChannel, .gate_activation = Activation::Sigmoid},
    {.name = "KDA, bounded gate, bias", .decay = Decay::PerChannel, .lower_bound = -5,
     .conv_bias = true},
    {.name = "GDN-2", .decay = Decay::PerChannel, .erase = true},
    {.name = "no beta, sum norm", .beta = false, .qk_activation = Activation::EluPlusOne,
     .qk_norm = QkNorm::Sum}};

TEST_F(CudaDeferred, EveryKind) {
  for (const DeltaCase& c : kKinds) check(c, many_rows(75), "many rows", 5e-6);
}

TEST_F(CudaDeferred, EverySharingOfHeads) {
  struct Heads {
    int32_t keys, values, decays;
  };
  for (const Heads& h : {Heads{16, 16, 16}, {2, 4, 4}, {2, 4, 2}, {4, 16, 16}, {1, 8, 8},
                         {2, 6, 6}, {2, 6, 2}, {5, 5, 5}}) {
    DeltaCase c = kKinds[4];
    c.name = std::to_string(h.keys) + ", " + std::to_string(h.values) + " and " +
             std::to_string(h.decays) + " heads";
    c.key_heads = h.keys, c.value_heads = h.values, c.decay_heads = h.decays;
    check(c, many_rows(40), "many rows", 5e-6);
  }
}

TEST_F(CudaDeferred, FewRowsAndMoreHeadsThanRunAtOnce) {
  for (const int32_t rows : {8, 9, 200}) {
    DeltaCase c = kKinds[2];
    c.key_heads = c.value_heads = c.decay_heads = 8;
    check(c, many_rows(rows), std::to_string(rows) + " rows", 5e-6);
  }
}

// Rows of a few tokens, which a kernel of their own steps, and prompts in chunks.
TEST_F(CudaDeferred, AmongLongerRows) {
  const std::vector<int32_t> few = {1, 3, 1, 1, 0, 8, 1, 2, 1, 1, 1, 0, 1};
  for (DeltaCase c : {kKinds[0], kKinds[2], kKinds[4]}) {
    c.key_heads = c.value_heads = c.decay_heads = 4;
    check(c, deferring(rows_of(few)), "few tokens", 2e-5);
    check(c, deferring(rows_of(few, true)), "few tokens, known", 2e-5);
    check(c, deferring(rows_of(kMixed)), "prompts", 2e-3);
    check(c, deferring(rows_of(kMixed, true)), "prompts, known", 2e-3);
  }
}

}  // namespace
}  // namespace weir
