// The ops of cross-layer routing against their formulas, and alone against company.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "kernels/op.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

constexpr int32_t kTokens = 5, kHeads = 3, kDim = 6, kWidth = kHeads * kDim;

// Activations with gaps of NaN between the tokens.
class Block {
 public:
  explicit Block(int64_t dim, bool filled = true, int32_t tokens = kTokens)
      : dim_(dim), values_(size_t(tokens * (dim + kGap)), kNan) {
    static std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (int32_t t = 0; filled && t < tokens; ++t) {
      for (int64_t i = 0; i < dim; ++i) acts().at(t)[i] = normal(random);
    }
  }
  Acts acts() { return {values_.data(), dim_ + kGap}; }
  double at(int64_t t, int64_t i) const { return double(values_[size_t(t * (dim_ + kGap) + i)]); }
  const std::vector<float>& values() const { return values_; }

 private:
  static constexpr int64_t kGap = 3;
  int64_t dim_;
  std::vector<float> values_;
};

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

// Runs an op on every kind of CPU backend, and checks each number of its result; then the tokens
// one by one must give the same bits.
template <typename Op>
void check(const Op& op, Block& out, int64_t width,
           const std::function<double(int64_t, int64_t)>& expected,
           const std::function<void(Op&, int64_t)>& move) {
  for (const CpuKind& kind : cpu_kinds()) {
    const auto backend = make_cpu_backend(kind.options);
    backend->run({op});
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t i = 0; i < width; ++i) {
        EXPECT_NEAR(out.at(t, i), expected(t, i), 1e-6 * (1 + std::fabs(expected(t, i))))
            << kind.name << ", token " << t << ", channel " << i;
      }
      EXPECT_TRUE(std::isnan(out.at(t, width))) << "writes behind its vector";
    }
    const std::vector<float> together = out.values();
    for (int64_t t = kTokens - 1; t >= 0; --t) {
      Op one = op;
      one.tokens = 1;
      move(one, t);
      backend->run({one});
    }
    EXPECT_TRUE(same_bits(out.values(), together)) << kind.name;
  }
}

Acts later(Acts acts, int64_t t) { return acts ? Acts{acts.at(t), acts.stride} : acts; }

TEST(ValueRoute, FollowsItsFormula) {
  for (const int32_t count : {1, 3}) {
    for (const bool normalize : {false, true}) {
      for (const bool gated : {false, true}) {
        Block sources(4 * kWidth), v(kWidth), gate(kHeads), value(kWidth, false);
        Block answer(kWidth, false), gamma(kWidth, true, 1);
        ValueRoute op{.tokens = kTokens, .heads = kHeads, .dim = kDim, .count = count,
                      .sources = sources.acts(), .source_stride = kWidth, .normalize = normalize,
                      .eps = 1e-2f, .v = v.acts(), .value = value.acts(),
                      .answer = answer.acts()};
        gated ? void(op.gate = gate.acts()) : void(op.gamma = gamma.acts().data);
        const auto mean = [&](int64_t t, int64_t i) {
          double sum = 0;
          for (int32_t s = 0; s < count; ++s) sum += sources.at(t, s * kWidth + i);
          return sum / count;
        };
        const auto add = [&](int64_t t, int64_t i) {
          double squares = 0;
          const int64_t head = i / kDim;
          for (int64_t j = 0; j < kDim; ++j) squares += std::pow(mean(t, head * kDim + j), 2);
          const double norm = normalize ? std::sqrt(squares / kDim + 1e-2) : 1;
          return mean(t, i) / norm * (gated ? gate.at(t, head) : gamma.at(0, i));
        };
        const auto move = [](ValueRoute& one, int64_t t) {
          for (Acts* acts : {&one.sources, &one.gate, &one.v, &one.value, &one.answer}) {
            *acts = later(*acts, t);
          }
        };
        check<ValueRoute>(op, value, kWidth,
                          [&](int64_t t, int64_t i) { return v.at(t, i) + add(t, i); }, move);
        check<ValueRoute>(op, answer, kWidth, add, move);
      }
    }
  }
}

TEST(HeadDot, FollowsItsFormula) {
  Block x(kWidth), weight(kDim, true, 1), bias(1, true, 1), out(kHeads, false);
  for (const Activation activation : {Activation::None, Activation::Sigmoid}) {
    const HeadDot op{.tokens = kTokens, .heads = kHeads, .dim = kDim,
                     .weight = weight.acts().data, .bias = bias.acts().data,
                     .activation = activation, .x = x.acts(), .out = out.acts()};
    check<HeadDot>(
        op, out, kHeads,
        [&](int64_t t, int64_t head) {
          double sum = bias.at(0, 0);
          for (int64_t j = 0; j < kDim; ++j) sum += weight.at(0, j) * x.at(t, head * kDim + j);
          return activation == Activation::None ? sum : logistic(sum);
        },
        [](HeadDot& one, int64_t t) {
          one.x = later(one.x, t);
          one.out = later(one.out, t);
        });
  }
}

TEST(RouteSignal, FollowsItsFormula) {
  Block v(kWidth), u(kWidth), gate(2, true, 1);
  const auto move = [](RouteSignal& one, int64_t t) {
    for (Acts* acts : {&one.v, &one.u, &one.out}) *acts = later(*acts, t);
  };
  RouteSignal op{.tokens = kTokens, .heads = kHeads, .dim = kDim, .gate = gate.acts().data,
                 .v = v.acts(), .u = u.acts()};
  Block gated(kWidth, false), both(2 * kWidth, false);
  op.out = gated.acts();
  check<RouteSignal>(op, gated, kWidth, [&](int64_t t, int64_t i) {
    double long_u = 0, long_v = 0;
    for (int64_t j = i / kDim * kDim; j < (i / kDim + 1) * kDim; ++j) {
      long_u += u.at(t, j) * u.at(t, j);
      long_v += v.at(t, j) * v.at(t, j);
    }
    const double surprise = std::sqrt(long_u) / (std::sqrt(long_v) + 1e-6);
    return v.at(t, i) * logistic(gate.at(0, 0) * surprise + gate.at(0, 1));
  }, move);
  op.kind = RouteSignal::Kind::Both;
  op.out = both.acts();
  check<RouteSignal>(op, both, 2 * kWidth, [&](int64_t t, int64_t i) {
    const int64_t head = i / (2 * kDim), at = i % (2 * kDim);
    return at < kDim ? u.at(t, head * kDim + at) : v.at(t, head * kDim + at - kDim);
  }, move);
}

// Values of nothing have no direction: their gate is that of a residual without bounds, and finite.
TEST(RouteSignal, NoValuesAreNotDividedBy) {
  Block v(kWidth), u(kWidth), gate(2, true, 1), out(kWidth, false);
  for (int64_t i = 0; i < kWidth; ++i) v.acts().at(0)[i] = 0;
  RouteSignal op{.tokens = 1, .heads = kHeads, .dim = kDim, .gate = gate.acts().data,
                 .v = v.acts(), .u = u.acts(), .out = out.acts()};
  make_cpu_backend({.plain = true})->run({op});
  for (int64_t i = 0; i < kWidth; ++i) EXPECT_EQ(out.at(0, i), 0);
}

}  // namespace
}  // namespace weir
