#include "kernels/delta_chunk.h"

#include "kernels/check.h"

namespace weir::cpu {
namespace {

// U in place of its right-hand side R, [n, dim]: (I + A) U = R with A's part below the diagonal,
// block after block: earlier blocks' products first, then the block's own tokens in order.
void solve_unit_lower(const std::vector<double>& A, int32_t n, int32_t dim, int32_t block,
                      std::vector<double>& R) {
  for (int32_t first = 0; first < n; first += block) {
    const int32_t end = std::min(n, first + block);
    const auto subtract = [&](int32_t t, int32_t from, int32_t to) {
      for (int32_t s = from; s < to; ++s) {
        const double a = A[size_t(t * n + s)];
        for (int32_t j = 0; j < dim; ++j) R[size_t(t * dim + j)] -= a * R[size_t(s * dim + j)];
      }
    };
    for (int32_t t = first; t < end; ++t) subtract(t, 0, first);
    for (int32_t t = first; t < end; ++t) subtract(t, first, t);
  }
}

// Tokens first .. first + n - 1.
void run_chunk(const DeltaChunk& op, int32_t first, int32_t n) {
  const int32_t K = op.key_dim, V = op.value_dim, block = op.sizes.block;
  const double *q = op.q + int64_t(first) * K, *k = op.k + int64_t(first) * K;
  const double *v = op.v + int64_t(first) * V, *write = op.write + int64_t(first) * V;
  const double* g = op.log_decay == nullptr ? nullptr : op.log_decay + int64_t(first) * K;
  double* out = op.out + int64_t(first) * V;

  std::vector<double> erased(k, k + int64_t(n) * K);
  for (size_t i = 0; i < erased.size(); ++i) erased[i] *= op.erase[int64_t(first) * K + int64_t(i)];
  const std::vector<double> L = decay_sums(g, n, K);
  const std::vector<double> A = decayed_gram(erased.data(), k, L, n, K, block);
  const std::vector<double> P = decayed_gram(q, k, L, n, K, block);
  const std::vector<double> reads = since_start(erased.data(), L), asks = since_start(q, L);

  std::vector<double> U(size_t(n) * size_t(V));
  for (int32_t t = 0; t < n; ++t) {
    for (int32_t j = 0; j < V; ++j) {
      U[size_t(t * V + j)] = write[t * V + j] * v[t * V + j] -
                             dot(op.state + int64_t(j) * K, &reads[size_t(t * K)], K);
    }
  }
  solve_unit_lower(A, n, V, block, U);
  for (int32_t t = 0; t < n; ++t) {
    for (int32_t j = 0; j < V; ++j) {
      double o = dot(op.state + int64_t(j) * K, &asks[size_t(t * K)], K);
      for (int32_t s = 0; s <= t; ++s) o += P[size_t(t * n + s)] * U[size_t(s * V + j)];
      out[t * V + j] = o;
    }
  }
  advance_state(op.state, U.data(), V, until_end(k, L, n, K), L, n, V, K);
}

}  // namespace

void run(const DeltaChunk& op) {
  WEIR_CHECK(op.sizes.block > 0 && op.sizes.chunk % op.sizes.block == 0);
  for (int32_t first = 0; first < op.tokens; first += op.sizes.chunk) {
    run_chunk(op, first, std::min(op.sizes.chunk, op.tokens - first));
  }
}

}  // namespace weir::cpu
