#include "kernels/swila_chunk.h"

#include <gtest/gtest.h>

#include "kernels/delta_chunk.h"
#include "kernels/op.h"
#include "tests/ops/chunk_cases.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

struct Shape {
  int32_t tokens = 0, mixtures = 3, dim = 8;
  bool temporal = false, gated = false;
  double strongest = -2;
};

// Softmax over the mixtures, [count, mixtures, dim].
Vector softmax(Vector x, int64_t count, int64_t J, int64_t D) {
  for (int64_t i = 0; i < count * D; ++i) {
    double* const at = &x[size_t(i / D * J * D + i % D)];
    double sum = 0;
    for (int64_t j = 0; j < J; ++j) sum += at[j * D] = std::exp(at[j * D]);
    for (int64_t j = 0; j < J; ++j) at[j * D] /= sum;
  }
  return x;
}

// One head's inputs and its answer.
struct Case {
  Shape shape;
  Vector q, k, v, key_router, query_router, beta, g, key_mix, query_mix, state, r, rho, out;

  Case(const Shape& s, Draw& draw) : shape(s) {
    const int64_t T = s.tokens, J = s.mixtures, D = s.dim;
    q = draw.unit(T, D);
    k = draw.unit(T, D);
    v = draw.normal(T * D, 1.5);
    key_router = softmax(draw.normal(T * J * D), T, J, D);
    query_router = softmax(draw.normal(T * J * D), T, J, D);
    beta = draw.gates(T * J * D);
    if (s.gated) g = draw.log_decays(T * J * D, s.strongest);
    if (s.temporal) {
      key_mix = draw.gates(T * D);
      query_mix = draw.gates(T * D);
      r = softmax(draw.normal(J * D), 1, J, D);
      rho = softmax(draw.normal(J * D), 1, J, D);
    }
    state = draw.normal(J * D * D, 0.3);
    out.resize(size_t(T * D));
  }

  void run_chunk(ChunkSizes sizes = {}) {
    const auto data = [](Vector& x) { return x.empty() ? nullptr : x.data(); };
    cpu::run(SwilaChunk{.sizes = sizes, .tokens = shape.tokens, .mixtures = shape.mixtures,
                        .dim = shape.dim, .q = q.data(), .k = k.data(), .v = v.data(),
                        .key_router = key_router.data(), .query_router = query_router.data(),
                        .beta = beta.data(), .log_decay = data(g), .key_mix = data(key_mix),
                        .query_mix = data(query_mix), .state = state.data(), .posterior = data(r),
                        .prior = data(rho), .out = out.data()});
  }

  // The recurrence as it reads, token after token.
  void run_steps() {
    const int64_t J = shape.mixtures, D = shape.dim;
    for (int64_t t = 0; t < shape.tokens; ++t) {
      for (size_t i = 0; i < state.size() && shape.gated; ++i) {
        const int64_t j = int64_t(i) / (D * D), e = int64_t(i) % D;
        state[i] *= std::exp(g[size_t((t * J + j) * D + e)]);
      }
      for (int64_t d = 0; d < D; ++d) step(t, d);
    }
  }

 private:
  void step(int64_t t, int64_t d) {
    const int64_t J = shape.mixtures, D = shape.dim;
    Vector delta(static_cast<size_t>(J)), now(delta), queried(delta);
    double sum = 0;
    for (int64_t j = 0; j < J; ++j) {
      const auto at = size_t((t * J + j) * D + d), kept = size_t(j * D + d), mixed = size_t(j);
      now[mixed] = key_router[at];
      queried[mixed] = query_router[at];
      if (shape.temporal) {
        const double gk = key_mix[size_t(t * D + d)], gq = query_mix[size_t(t * D + d)];
        now[mixed] = (1 - gk) * r[kept] + gk * now[mixed];
        rho[kept] = queried[mixed] = (1 - gq) * rho[kept] + gq * queried[mixed];
      }
      delta[mixed] = v[size_t(t * D + d)];
      for (int64_t e = 0; e < D; ++e) {
        delta[mixed] -= state[size_t((j * D + d) * D + e)] * k[size_t(t * D + e)];
      }
      sum += now[mixed] *= std::exp(-delta[mixed] * delta[mixed] / 2);
    }
    double o = 0;
    for (int64_t j = 0; j < J; ++j) {
      const double posterior = now[size_t(j)] / sum;
      if (shape.temporal) r[size_t(j * D + d)] = posterior;
      const double u = beta[size_t((t * J + j) * D + d)] * posterior * delta[size_t(j)];
      for (int64_t e = 0; e < D; ++e) {
        double& S = state[size_t((j * D + d) * D + e)];
        S += u * k[size_t(t * D + e)];
        o += queried[size_t(j)] * S * q[size_t(t * D + e)];
      }
    }
    out[size_t(t * D + d)] = o;
  }
};

void expect_same(Case chunk, ChunkSizes sizes = {}) {
  Case steps = chunk;
  chunk.run_chunk(sizes);
  steps.run_steps();
  const int32_t T = chunk.shape.tokens;
  EXPECT_LE(apart(chunk.out, steps.out), kRounding) << T << " tokens, out";
  EXPECT_LE(apart(chunk.state, steps.state), kRounding) << T << " tokens, state";
  EXPECT_LE(apart(chunk.r, steps.r), kRounding) << T << " tokens, posterior";
  EXPECT_LE(apart(chunk.rho, steps.rho), kRounding) << T << " tokens, prior";
}

std::vector<Shape> variants() {
  return {{}, {.temporal = true}, {.gated = true}, {.temporal = true, .gated = true}};
}

TEST(SwilaChunk, EqualsRepeatedStepsForEveryLength) {
  for (Shape shape : variants()) {
    for (shape.tokens = 1; shape.tokens <= 130; ++shape.tokens) {
      Draw draw(uint64_t(shape.tokens));
      expect_same(Case(shape, draw));
    }
  }
}

TEST(SwilaChunk, EqualsRepeatedStepsForRandomSizesAndGates) {
  Draw draw(3);
  for (int i = 0; i < 40; ++i) {
    Shape shape = variants()[size_t(i) % 4];
    shape.tokens = draw.upto(90);
    shape.mixtures = draw.upto(5);
    shape.dim = draw.upto(24);
    shape.strongest = -0.1 * draw.upto(100);
    const int32_t block = draw.upto(9);
    expect_same(Case(shape, draw), {.chunk = block * draw.upto(6), .block = block});
  }
}

// exp(-L) would be exp(20,480) here, and exp(320) inside one chunk.
TEST(SwilaChunk, StrongDecaysStayFiniteAndRight) {
  for (const bool temporal : {false, true}) {
    Draw draw(5);
    Case c({.tokens = 4096, .dim = 4, .temporal = temporal, .gated = true}, draw);
    std::fill(c.g.begin(), c.g.end(), -5.0);
    expect_same(c);
  }
}

// One mixture is always the likely one: a delta rule with a beta for each value dimension, whose
// rows are delta rules of their own.
TEST(SwilaChunk, WithOneMixtureItIsADeltaRule) {
  for (const bool gated : {false, true}) {
    Draw draw(8);
    Case c({.tokens = 100, .mixtures = 1, .gated = gated}, draw);
    const int32_t T = 100, D = c.shape.dim;
    const Vector before = c.state;
    c.run_chunk();
    for (int32_t d = 0; d < D; ++d) {
      Vector v, beta, erase, out(size_t(T), 0.0);
      Vector state(before.begin() + d * D, before.begin() + (d + 1) * D);
      for (int32_t t = 0; t < T; ++t) {
        v.push_back(c.v[size_t(t * D + d)]);
        beta.push_back(c.beta[size_t(t * D + d)]);
        erase.insert(erase.end(), size_t(D), beta.back());
      }
      cpu::run(DeltaChunk{.tokens = T, .key_dim = D, .value_dim = 1, .q = c.q.data(),
                          .k = c.k.data(), .v = v.data(),
                          .log_decay = gated ? c.g.data() : nullptr, .erase = erase.data(),
                          .write = beta.data(), .state = state.data(), .out = out.data()});
      Vector swila_out, swila_state(c.state.begin() + d * D, c.state.begin() + (d + 1) * D);
      for (int32_t t = 0; t < T; ++t) swila_out.push_back(c.out[size_t(t * D + d)]);
      EXPECT_LE(apart(swila_out, out), kRounding);
      EXPECT_LE(apart(swila_state, state), kRounding);
    }
  }
}

// The logit, or the input of softplus, that gives what the chunk form takes.
std::vector<float> inverse(const Vector& x, double (*function)(double)) {
  std::vector<float> y;
  for (const double one : x) y.push_back(float(function(one)));
  return y;
}
double logit(double x) { return std::log(x / (1 - x)); }
double inverse_silu(double y) {
  double x = std::fmax(y, 0.1);  // on the rising branch, right of its minimum
  for (int i = 0; i < 60; ++i) {
    const double s = 1 / (1 + std::exp(-x));
    x -= (x * s - y) / (s * (1 + x * (1 - s)));
  }
  return x;
}

// The served op, plain, on raw inputs that its gates turn into the same numbers.
TEST(SwilaChunk, EqualsTheServedOp) {
  for (Shape shape : variants()) {
    shape.tokens = 100;
    Draw draw(9);
    Case c(shape, draw);
    const int32_t T = 100, J = shape.mixtures, D = shape.dim;
    const std::vector<float> taps(size_t(D), 1), weight(taps), dt_bias(size_t(J) * size_t(D));
    for (Vector* x : {&c.q, &c.k, &c.v}) {  // positive, so that silu can give them
      for (double& one : *x) one = std::fabs(one);
    }
    const auto raw = [&](const Vector& x) { return inverse(x, inverse_silu); };
    std::vector<float> q = raw(c.q), k = raw(c.k), v = raw(c.v), beta = inverse(c.beta, logit);
    std::vector<float> kr = inverse(c.key_router, std::log), qr = inverse(c.query_router, std::log);
    std::vector<float> km = inverse(c.key_mix, logit), qm = inverse(c.query_mix, logit);
    std::vector<float> g = inverse(c.g, [](double x) { return std::log(std::expm1(-x)); });
    std::vector<float> state = floats(c.state), r = floats(c.r), rho = floats(c.rho);
    std::vector<float> out(size_t(T * D), kNan), a(size_t(J), 1.0f);
    const Slot slot = 0;
    const int32_t first = 1, begin[] = {0, T};
    const int64_t mixed = int64_t(J) * D;
    SwilaMix op{.rows = {1, T, &slot, &first, begin}, .heads = 1, .mixtures = J, .dim = D,
                .q = {q.data(), D}, .k = {k.data(), D}, .v = {v.data(), D}, .conv_width = 1,
                .conv_q = taps.data(), .conv_k = taps.data(), .conv_v = taps.data(),
                .key_router = {kr.data(), mixed}, .query_router = {qr.data(), mixed},
                .beta = {beta.data(), mixed}, .gated = shape.gated, .decay_a = a.data(),
                .dt_bias = dt_bias.data(),
                .norm_weight = weight.data(), .out = {out.data(), D},
                .state = {state.data(), mixed * D}};
    if (shape.temporal) {
      op.key_mix = {km.data(), D};
      op.query_mix = {qm.data(), D};
      op.posterior = {r.data(), mixed};
      op.prior = {rho.data(), mixed};
    }
    if (shape.gated) op.decay_in = {g.data(), mixed};
    op.history = {state.data(), 0};
    make_cpu_backend({.plain = true})->run({op});
    c.run_chunk();
    for (int32_t t = 0; t < T; ++t) {
      double squares = 0;
      double* const o = &c.out[size_t(t * D)];
      for (int32_t d = 0; d < D; ++d) squares += o[d] * o[d];
      for (int32_t d = 0; d < D; ++d) o[d] /= std::sqrt(squares / D);
    }
    EXPECT_LE(apart(c.out, out), 1e-5);
    EXPECT_LE(apart(c.state, state), 1e-5);
    EXPECT_LE(apart(c.r, r) + apart(c.rho, rho), 1e-5);
  }
}

}  // namespace
}  // namespace weir
