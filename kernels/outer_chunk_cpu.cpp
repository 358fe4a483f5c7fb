#include "kernels/outer_chunk.h"

#include "kernels/check.h"

namespace weir::cpu {
namespace {

// One chunk's inputs.
struct Part {
  int32_t n = 0, key_dim = 0, value_dim = 0, block = 0;
  const double *q = nullptr, *k = nullptr, *v = nullptr;
  std::vector<double> L, M;  // sums of the keys' and the values' log decays
};

// O of [n, value_dim]: first what the chunk's first state answers, then its own tokens. A value's
// decay from s to t is split at the first token of t's block where s lies before it.
void answer(const Part& c, const double* state, double* out) {
  const int32_t K = c.key_dim, V = c.value_dim;
  const std::vector<double> P = decayed_gram(c.q, c.k, c.L, c.n, K, c.block);
  const std::vector<double> asks = since_start(c.q, c.L);
  for (int32_t t = 0; t < c.n; ++t) {
    const int32_t first = t / c.block * c.block;
    for (int32_t j = 0; j < V; ++j) {
      const auto M = [&](int32_t token) { return c.M[size_t(token * V + j)]; };
      double o = std::exp(M(t)) * dot(state + int64_t(j) * K, &asks[size_t(t * K)], K);
      double before = 0;
      for (int32_t s = 0; s < first; ++s) {
        before += P[size_t(t * c.n + s)] * (std::exp(M(first) - M(s)) * c.v[s * V + j]);
      }
      o += std::exp(M(t) - M(first)) * before;
      for (int32_t s = first; s <= t; ++s) {
        o += P[size_t(t * c.n + s)] * std::exp(M(t) - M(s)) * c.v[s * V + j];
      }
      out[t * V + j] = o;
    }
  }
}

// Divides by q . z + 1e-10, with z the sum of keys up to and with each token.
void normalise(const Part& c, double* sums, double* out) {
  const int32_t K = c.key_dim;
  const std::vector<double> none(size_t(c.n) * size_t(K), 0.0);
  const std::vector<double> P = decayed_gram(c.q, c.k, none, c.n, K, c.block);
  for (int32_t t = 0; t < c.n; ++t) {
    double divisor = dot(sums, c.q + t * K, K);
    for (int32_t s = 0; s <= t; ++s) divisor += P[size_t(t * c.n + s)];
    for (int32_t j = 0; j < c.value_dim; ++j) out[t * c.value_dim + j] /= divisor + 1e-10;
  }
  for (int32_t s = 0; s < c.n; ++s) {
    for (int32_t i = 0; i < K; ++i) sums[i] += c.k[s * K + i];
  }
}

void run_chunk(const OuterChunk& op, int32_t first, int32_t n) {
  const int32_t K = op.key_dim, V = op.value_dim;
  const auto from = [&](const double* x, int32_t dim) {
    return x == nullptr ? nullptr : x + int64_t(first) * dim;
  };
  const Part c{.n = n, .key_dim = K, .value_dim = V, .block = op.sizes.block,
               .q = from(op.q, K), .k = from(op.k, K), .v = from(op.v, V),
               .L = decay_sums(from(op.key_decay, K), n, K),
               .M = decay_sums(from(op.value_decay, V), n, V)};
  double* const out = op.out + int64_t(first) * V;
  answer(c, op.state, out);
  if (op.sums != nullptr) normalise(c, op.sums, out);
  const std::vector<double> written = until_end(c.v, c.M, n, V);
  for (int32_t j = 0; j < V; ++j) {
    const double decay = std::exp(c.M[size_t((n - 1) * V + j)]);
    for (int32_t i = 0; i < K; ++i) op.state[int64_t(j) * K + i] *= decay;
  }
  advance_state(op.state, written.data(), V, until_end(c.k, c.L, n, K), c.L, n, V, K);
}

}  // namespace

void run(const OuterChunk& op) {
  WEIR_CHECK(op.sizes.block > 0 && op.sizes.chunk % op.sizes.block == 0);
  for (int32_t first = 0; first < op.tokens; first += op.sizes.chunk) {
    run_chunk(op, first, std::min(op.sizes.chunk, op.tokens - first));
  }
}

}  // namespace weir::cpu
