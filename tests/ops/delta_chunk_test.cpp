#include "kernels/delta_chunk.h"

#include <gtest/gtest.h>

#include "kernels/mixer_math.h"
#include "tests/ops/chunk_cases.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

enum class Gates { Beta, PerChannel };

struct Shape {
  int32_t tokens = 0, key_dim = 16, value_dim = 8;
  Decay decay = Decay::PerHead;
  Gates gates = Gates::Beta;
  double strongest = -2;
};

// One head's inputs and its answer.
struct Case {
  Shape shape;
  Vector q, k, v, g, erase, write, state, out;

  Case(const Shape& s, Draw& draw) : shape(s) {
    const int64_t T = s.tokens, K = s.key_dim, V = s.value_dim;
    q = draw.unit(T, K);
    k = draw.unit(T, K);
    v = draw.normal(T * V);
    state = draw.normal(V * K, 0.3);
    out.resize(size_t(T * V));
    if (s.decay != Decay::None) g = draw.log_decays(T * K, s.strongest);
    erase = draw.gates(T * K);
    write = draw.gates(T * V);
    for (int64_t t = 0; t < T; ++t) {
      const auto repeat = [&](Vector& x, int64_t dim, double one) {
        std::fill_n(&x[size_t(t * dim)], dim, one);
      };
      if (s.decay == Decay::PerHead) repeat(g, K, g[size_t(t * K)]);
      if (s.gates == Gates::PerChannel) continue;
      const double beta = 2 * erase[size_t(t * K)];
      repeat(erase, K, beta);
      repeat(write, V, beta);
    }
  }

  void run_chunk(ChunkSizes sizes = {}) {
    cpu::run(DeltaChunk{.sizes = sizes, .tokens = shape.tokens, .key_dim = shape.key_dim,
                        .value_dim = shape.value_dim, .q = q.data(), .k = k.data(), .v = v.data(),
                        .log_decay = g.empty() ? nullptr : g.data(), .erase = erase.data(),
                        .write = write.data(), .state = state.data(), .out = out.data()});
  }

  // The recurrence as it reads, token after token.
  void run_steps() {
    const int64_t K = shape.key_dim, V = shape.value_dim;
    for (int64_t t = 0; t < shape.tokens; ++t) {
      const double *kt = &k[size_t(t * K)], *qt = &q[size_t(t * K)];
      for (int64_t j = 0; j < V; ++j) {
        double* S = &state[size_t(j * K)];
        double recalled = 0, o = 0;
        for (int64_t i = 0; i < K; ++i) {
          if (!g.empty()) S[i] *= std::exp(g[size_t(t * K + i)]);
          recalled += S[i] * erase[size_t(t * K + i)] * kt[i];
        }
        const double u = write[size_t(t * V + j)] * v[size_t(t * V + j)] - recalled;
        for (int64_t i = 0; i < K; ++i) o += (S[i] += u * kt[i]) * qt[i];
        out[size_t(t * V + j)] = o;
      }
    }
  }
};

void expect_same(const Shape& shape, uint64_t seed, ChunkSizes sizes = {}) {
  Draw draw(seed);
  Case chunk(shape, draw), steps = chunk;
  chunk.run_chunk(sizes);
  steps.run_steps();
  EXPECT_LE(apart(chunk.out, steps.out), kRounding) << shape.tokens << " tokens, out";
  EXPECT_LE(apart(chunk.state, steps.state), kRounding) << shape.tokens << " tokens, state";
}

std::vector<Shape> kinds() {
  return {{.decay = Decay::None},
          {.decay = Decay::PerHead},
          {.decay = Decay::PerChannel},
          {.decay = Decay::PerChannel, .gates = Gates::PerChannel},
          {.decay = Decay::None, .gates = Gates::PerChannel}};
}

// What a wrong tail, or a wrong token at the edge of a block or chunk, breaks.
TEST(DeltaChunk, EqualsRepeatedStepsForEveryLength) {
  for (Shape shape : kinds()) {
    for (shape.tokens = 1; shape.tokens <= 130; ++shape.tokens) {
      expect_same(shape, uint64_t(shape.tokens));
    }
  }
}

TEST(DeltaChunk, EqualsRepeatedStepsForRandomSizesAndGates) {
  Draw draw(3);
  for (int i = 0; i < 60; ++i) {
    Shape shape = kinds()[size_t(i) % 5];
    shape.tokens = draw.upto(90);
    shape.key_dim = draw.upto(40);
    shape.value_dim = draw.upto(40);
    shape.strongest = -0.1 * draw.upto(100);
    const int32_t block = draw.upto(9);
    expect_same(shape, uint64_t(i), {.chunk = block * draw.upto(6), .block = block});
  }
}

// exp(-L) would be exp(20,480) here, and exp(320) inside one chunk.
TEST(DeltaChunk, StrongDecaysStayFiniteAndRight) {
  for (const Decay decay : {Decay::PerHead, Decay::PerChannel}) {
    Draw draw(5);
    Case chunk({.tokens = 4096, .key_dim = 8, .value_dim = 4, .decay = decay}, draw);
    std::fill(chunk.g.begin(), chunk.g.end(), -5.0);
    Case steps = chunk;
    chunk.run_chunk();
    steps.run_steps();
    EXPECT_LE(apart(chunk.out, steps.out), kRounding);
    EXPECT_LE(apart(chunk.state, steps.state), kRounding);
  }
}

// One channel forgets at once, beyond what exp can hold, while its neighbour keeps everything.
TEST(DeltaChunk, SuddenDecayOfOneChannel) {
  Draw draw(6);
  Case chunk({.tokens = 100, .key_dim = 4, .decay = Decay::PerChannel, .strongest = -0.01}, draw);
  for (const size_t t : {5, 16, 40, 63, 64, 90}) chunk.g[t * 4] = -3000;
  Case steps = chunk;
  chunk.run_chunk();
  steps.run_steps();
  EXPECT_LE(apart(chunk.out, steps.out), kRounding);
  EXPECT_LE(apart(chunk.state, steps.state), kRounding);
}

// A chunk after another begins with the state that the other left.
TEST(DeltaChunk, StateCarriesFromCallToCall) {
  Draw draw(7);
  Case whole({.tokens = 100, .decay = Decay::PerChannel}, draw), cut = whole;
  whole.run_chunk();
  Vector out;
  int32_t first = 0;
  for (const int32_t count : {1, 64, 30, 5}) {
    Case part = cut;
    const auto take = [&](Vector& x, int64_t dim) {
      x = Vector(x.begin() + first * dim, x.begin() + (first + count) * dim);
    };
    part.shape.tokens = count;
    for (Vector* x : {&part.q, &part.k, &part.g, &part.erase}) take(*x, part.shape.key_dim);
    for (Vector* x : {&part.v, &part.write, &part.out}) take(*x, part.shape.value_dim);
    part.run_chunk();
    out.insert(out.end(), part.out.begin(), part.out.end());
    cut.state = part.state;
    first += count;
  }
  EXPECT_LE(apart(out, whole.out), kRounding);
  EXPECT_LE(apart(cut.state, whole.state), kRounding);
}

// The served op, plain, on raw inputs whose convolution, norms and gates are computed here.
class ServedHead {
 public:
  ServedHead(const Shape& s, Draw& draw)
      : s_(s), q_(draw.normal(s.tokens * s.key_dim)), k_(draw.normal(s.tokens * s.key_dim)),
        v_(draw.normal(s.tokens * s.value_dim)), decay_(draw.normal(s.tokens * s.key_dim, 2)),
        beta_(draw.normal(s.tokens)), erase_(draw.normal(s.tokens * s.key_dim)),
        write_(draw.normal(s.tokens * s.value_dim)), state_(draw.normal(s.key_dim * s.value_dim)) {}

  void expect_chunk_equals_op() {
    const int32_t T = s_.tokens, K = s_.key_dim, V = s_.value_dim;
    std::vector<float> q = floats(q_), k = floats(k_), v = floats(v_), decay = floats(decay_);
    std::vector<float> beta = floats(beta_), erase = floats(erase_), write = floats(write_);
    std::vector<float> state = floats(state_), out(size_t(T * V), kNan), weight(size_t(V), 1.0f);
    const std::vector<float> a(1, 0.7f), dt_bias(size_t(K), 0.3f);
    const Slot slot = 0;
    const int32_t first = 1, begin[] = {0, T};
    DeltaMix op{.rows = {1, T, &slot, &first, begin}, .key_heads = 1, .value_heads = 1,
                .key_dim = K, .value_dim = V, .q = {q.data(), K}, .k = {k.data(), K},
                .v = {v.data(), V}, .qk_activation = Activation::Silu, .decay = s_.decay,
                .decay_heads = 1, .decay_a = a.data(), .dt_bias = dt_bias.data(),
                .norm_weight = weight.data(), .norm_eps = 0, .out = {out.data(), V},
                .state = {state.data(), int64_t(V) * K}};
    if (s_.decay != Decay::None) op.decay_in = {decay.data(), s_.decay == Decay::PerHead ? 1 : K};
    if (s_.gates == Gates::Beta) op.beta = {beta.data(), 1};
    if (s_.gates == Gates::PerChannel) {
      op.erase = {erase.data(), K};
      op.write = {write.data(), V};
    }
    make_cpu_backend({.plain = true})->run({op});
    Case chunk = core();
    chunk.run_chunk();
    for (int32_t t = 0; t < T; ++t) {
      double squares = 0;
      double* const o = &chunk.out[size_t(t * V)];
      for (int32_t j = 0; j < V; ++j) squares += o[j] * o[j];
      for (int32_t j = 0; j < V; ++j) o[j] *= rms_scale(squares, V, 0);
    }
    EXPECT_LE(apart(chunk.out, out), 2e-6);
    EXPECT_LE(apart(chunk.state, state), 2e-6);
  }

 private:
  // What the chunk form takes, by the formulas of delta_mix.h.
  Case core() const {
    const int32_t T = s_.tokens, K = s_.key_dim, V = s_.value_dim;
    Draw unused(0);
    Case c(s_, unused);
    c.state = state_;
    const auto normalised = [&](const Vector& x, Vector& y, double scale) {
      for (int32_t t = 0; t < T; ++t) {
        double squares = 0;
        for (int32_t i = 0; i < K; ++i) {
          double& one = y[size_t(t * K + i)];
          one = activate(Activation::Silu, x[size_t(t * K + i)]);
          squares += one * one;
        }
        for (int32_t i = 0; i < K; ++i) y[size_t(t * K + i)] *= l2_scale(squares) * scale;
      }
    };
    normalised(q_, c.q, 1 / std::sqrt(double(K)));
    normalised(k_, c.k, 1);
    for (size_t i = 0; i < c.v.size(); ++i) c.v[i] = activate(Activation::Silu, v_[i]);
    for (size_t i = 0; i < c.k.size(); ++i) {
      const size_t t = i / size_t(K);
      if (s_.decay != Decay::None) {
        const size_t at = s_.decay == Decay::PerHead ? t : i;
        c.g[i] = log_decay(decay_[at] + double(0.3f), double(0.7f), 0);
      }
      c.erase[i] = sigmoid(s_.gates == Gates::Beta ? beta_[t] : erase_[i]);
    }
    for (size_t i = 0; i < c.v.size(); ++i) {
      c.write[i] = sigmoid(s_.gates == Gates::Beta ? beta_[i / size_t(V)] : write_[i]);
    }
    return c;
  }

  Shape s_;
  Vector q_, k_, v_, decay_, beta_, erase_, write_, state_;
};

TEST(DeltaChunk, EqualsTheServedOp) {
  for (Shape shape : kinds()) {
    shape.tokens = 100;
    Draw draw(9);
    ServedHead(shape, draw).expect_chunk_equals_op();
  }
}

}  // namespace
}  // namespace weir
