#include "kernels/outer_chunk.h"

#include <gtest/gtest.h>

#include "kernels/op.h"
#include "tests/ops/chunk_cases.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

using Kind = OuterStep::Decay;

struct Shape {
  int32_t tokens = 0, key_dim = 12, value_dim = 8;
  Kind decay = Kind::PerKey;
  bool normalise = false;
  double strongest = -2;
  double size = 1;  // of queries, keys and what the state holds of them
};

// One head's inputs and its answer.
struct Case {
  Shape shape;
  Vector q, k, v, g, h, state, sums, out;

  Case(const Shape& s, Draw& draw) : shape(s) {
    const int64_t T = s.tokens, K = s.key_dim, V = s.value_dim;
    // Positive, as the feature maps make them that a normaliser goes with.
    q = s.normalise ? draw.gates(T * K) : draw.unit(T, K);
    k = s.normalise ? draw.gates(T * K) : draw.unit(T, K);
    v = draw.normal(T * V);
    state = draw.normal(V * K);
    if (s.normalise) sums = draw.gates(K);
    for (Vector* x : {&q, &k, &state, &sums}) {
      for (double& one : *x) one *= s.size;
    }
    if (s.decay == Kind::PerValue) h = draw.log_decays(T * V, s.strongest);
    if (s.decay == Kind::PerKey) g = draw.log_decays(T * K, s.strongest);
    if (s.decay == Kind::PerHead) {
      g = draw.log_decays(T * K, s.strongest);
      for (size_t i = 0; i < g.size(); ++i) g[i] = g[i / size_t(K) * size_t(K)];
    }
    out.resize(size_t(T * V));
  }

  void run_chunk(ChunkSizes sizes = {}) {
    const auto data = [](Vector& x) { return x.empty() ? nullptr : x.data(); };
    cpu::run(OuterChunk{.sizes = sizes, .tokens = shape.tokens, .key_dim = shape.key_dim,
                        .value_dim = shape.value_dim, .q = q.data(), .k = k.data(), .v = v.data(),
                        .key_decay = data(g), .value_decay = data(h), .state = state.data(),
                        .sums = data(sums), .out = out.data()});
  }

  // The recurrence as it reads, token after token.
  void run_steps() {
    const int64_t K = shape.key_dim, V = shape.value_dim;
    for (int64_t t = 0; t < shape.tokens; ++t) {
      double divisor = 1e-10;
      for (int64_t i = 0; i < K && !sums.empty(); ++i) {
        sums[size_t(i)] += k[size_t(t * K + i)];
        divisor += sums[size_t(i)] * q[size_t(t * K + i)];
      }
      for (int64_t j = 0; j < V; ++j) {
        double o = 0;
        for (int64_t i = 0; i < K; ++i) {
          double& S = state[size_t(j * K + i)];
          if (!g.empty()) S *= std::exp(g[size_t(t * K + i)]);
          if (!h.empty()) S *= std::exp(h[size_t(t * V + j)]);
          S += v[size_t(t * V + j)] * k[size_t(t * K + i)];
          o += S * q[size_t(t * K + i)];
        }
        out[size_t(t * V + j)] = sums.empty() ? o : o / divisor;
      }
    }
  }
};

void expect_same(Case chunk, ChunkSizes sizes = {}) {
  Case steps = chunk;
  chunk.run_chunk(sizes);
  steps.run_steps();
  const int32_t T = chunk.shape.tokens;
  EXPECT_LE(apart(chunk.out, steps.out), kRounding) << T << " tokens, out";
  EXPECT_LE(apart(chunk.state, steps.state), kRounding) << T << " tokens, state";
  EXPECT_LE(apart(chunk.sums, steps.sums), kRounding) << T << " tokens, sums of keys";
}

std::vector<Shape> kinds() {
  return {{.decay = Kind::None},                       // linear attention
          {.decay = Kind::None, .normalise = true},
          // So small that the 1e-10 beneath the answers shows.
          {.decay = Kind::None, .normalise = true, .size = 1e-5},
          {.decay = Kind::PerHead},                    // RetNet, Mamba-2
          {.decay = Kind::PerKey},                     // GLA, HGRN2, slot attention's first half
          {.decay = Kind::PerValue},                   // its second half
          {.decay = Kind::PerKey, .normalise = true}};
}

// What a wrong tail, or a wrong token at the edge of a block or chunk, breaks.
TEST(OuterChunk, EqualsRepeatedStepsForEveryLength) {
  for (Shape shape : kinds()) {
    for (shape.tokens = 1; shape.tokens <= 130; ++shape.tokens) {
      Draw draw(uint64_t(shape.tokens));
      expect_same(Case(shape, draw));
    }
  }
}

TEST(OuterChunk, EqualsRepeatedStepsForRandomSizesAndGates) {
  Draw draw(3);
  for (int i = 0; i < 60; ++i) {
    Shape shape = kinds()[size_t(i) % kinds().size()];
    shape.tokens = draw.upto(90);
    shape.key_dim = draw.upto(40);
    shape.value_dim = draw.upto(40);
    shape.strongest = -0.1 * draw.upto(100);
    const int32_t block = draw.upto(9);
    expect_same(Case(shape, draw), {.chunk = block * draw.upto(6), .block = block});
  }
}

// exp(-L) would be exp(20,480) here, and exp(320) inside one chunk.
TEST(OuterChunk, StrongDecaysStayFiniteAndRight) {
  for (const Kind decay : {Kind::PerHead, Kind::PerKey, Kind::PerValue}) {
    Draw draw(5);
    Case c({.tokens = 4096, .key_dim = 8, .value_dim = 4, .decay = decay}, draw);
    std::fill(c.g.begin(), c.g.end(), -5.0);
    std::fill(c.h.begin(), c.h.end(), -5.0);
    expect_same(c);
  }
}

TEST(OuterChunk, SuddenDecayOfOneChannel) {
  for (const Kind decay : {Kind::PerKey, Kind::PerValue}) {
    Draw draw(6);
    Case c({.tokens = 100, .key_dim = 4, .value_dim = 4, .decay = decay, .strongest = -0.01}, draw);
    Vector& x = decay == Kind::PerKey ? c.g : c.h;
    for (const size_t t : {5, 16, 40, 63, 64, 90}) x[t * 4] = -3000;
    expect_same(c);
  }
}

// The served op, plain, on the same numbers.
TEST(OuterChunk, EqualsTheServedOp) {
  for (Shape shape : kinds()) {
    shape.tokens = 100;
    Draw draw(9);
    Case chunk(shape, draw);
    const int32_t T = shape.tokens, K = shape.key_dim, V = shape.value_dim;
    std::vector<float> q = floats(chunk.q), k = floats(chunk.k), v = floats(chunk.v);
    std::vector<float> decay = floats(chunk.g.empty() ? chunk.h : chunk.g);
    std::vector<float> state = floats(chunk.state), sums = floats(chunk.sums);
    std::vector<float> out(size_t(T * V), kNan);
    const Slot slot = 0;
    const int32_t first = 1, begin[] = {0, T};
    OuterStep op{.rows = {1, T, &slot, &first, begin}, .heads = 1, .key_heads = 1,
                 .value_heads = 1, .query_heads = 1, .key_dim = K, .value_dim = V,
                 .decay = shape.decay, .normalise = shape.normalise, .q = {q.data(), K},
                 .k = {k.data(), K}, .v = {v.data(), V}, .out = {out.data(), V},
                 .state = {state.data(), int64_t(V) * K}};
    op.log_decay = {decay.data(), shape.decay == Kind::PerValue ? V : K};
    if (shape.normalise) op.sums = {sums.data(), K};
    make_cpu_backend({.plain = true})->run({op});
    chunk.run_chunk();
    EXPECT_LE(apart(chunk.out, out), 2e-6);
    EXPECT_LE(apart(chunk.state, state), 2e-6);
    EXPECT_LE(apart(chunk.sums, sums), 2e-6);
  }
}

}  // namespace
}  // namespace weir
