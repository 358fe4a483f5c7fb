#include <gtest/gtest.h>

#include "kernels/op.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

constexpr int32_t kDim = 530, kMixes = 3;  // more channels than a thread takes at once
constexpr int64_t kStride = kDim + 7;
const std::vector<Slot> kSlots = {2, 0};

// Two sequences in slots of three, and what came out for each.
struct Machine {
  explicit Machine(CpuOptions options) : backend(make_cpu_backend(options)) {}

  void step(const std::vector<Piece>& pieces) {
    const StepRows rows(pieces, kSlots);
    StepActs x(rows.tokens(), kDim), y(rows.tokens(), kMixes * kDim);
    x.gather(pieces, [&](int32_t s) -> const std::vector<float>& { return in[size_t(s)]; });
    backend->run({TokenShift{.rows = rows.rows(), .dim = kDim, .mixes = kMixes, .mix = mix.data(),
                             .in = x.acts(), .out = y.acts(),
                             .history = {memory.data(), kStride}}});
    backend->finish();
    int64_t t = 0;
    for (const Piece& piece : pieces) {
      for (int32_t i = 0; i < piece.count; ++i, ++t) {
        if (piece.sequence < 0) continue;
        const float* from = y.acts().at(t);
        out[size_t(piece.sequence)].insert(out[size_t(piece.sequence)].end(), from,
                                           from + kMixes * kDim);
      }
    }
  }

  std::unique_ptr<Backend> backend;
  std::vector<float> mix = normal(kMixes * kDim, 1);
  std::vector<float> in[2] = {normal(9 * kDim, 2), normal(4 * kDim, 3)};
  std::vector<float> memory = std::vector<float>(3 * kStride, kNan);
  std::vector<float> out[2];
};

TEST(TokenShift, EveryTokenMovesTowardsTheOneBefore) {
  for (const CpuKind& kind : cpu_kinds()) {
    Machine machine(kind.options);
    machine.step({{1, 0, 1}, {-1, 0, 2}, {0, 0, 4}});
    machine.step({{0, 4, 1}, {1, 1, 0}, {-1, 5, 1}});
    machine.step({{0, 5, 4}, {1, 1, 3}});
    for (int s = 0; s < 2; ++s) {
      const std::vector<float>& x = machine.in[s];
      for (size_t t = 0; t * kDim < x.size(); ++t) {
        for (size_t m = 0; m < kMixes; ++m) {
          for (size_t c = 0; c < kDim; ++c) {
            const double now = x[t * kDim + c], before = t > 0 ? x[(t - 1) * kDim + c] : 0.0f;
            const double mix = machine.mix[m * kDim + c];
            ASSERT_NEAR(machine.out[s][(t * kMixes + m) * kDim + c],
                        (1 - mix) * now + mix * before, 1e-5)
                << kind.name << ", sequence " << s << ", token " << t << ", channel " << c;
          }
        }
      }
      const float* kept = machine.memory.data() + kSlots[size_t(s)] * kStride;
      EXPECT_TRUE(std::equal(kept, kept + kDim, x.end() - kDim)) << kind.name;
      EXPECT_TRUE(std::isnan(kept[kDim])) << "wrote beyond its part of the slot";
    }
    EXPECT_TRUE(std::isnan(machine.memory[kStride])) << "touched a slot of no row";
  }
}

TEST(TokenShift, ASequenceThatBeginsAgainForgets) {
  Machine machine({});
  machine.step({{0, 0, 9}});
  machine.step({{0, 0, 9}});
  const size_t half = machine.out[0].size() / 2;
  EXPECT_TRUE(std::equal(machine.out[0].begin(), machine.out[0].begin() + int64_t(half),
                         machine.out[0].begin() + int64_t(half)));
}

}  // namespace
}  // namespace weir
