#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace weir {

// What the chunk forms share. A chunk of n tokens of one head starts from a state; L_t is the sum
// of the log decays of its first t + 1 tokens, never above 0. A chunk is cut into blocks of a few
// tokens, and every decay between two tokens is taken relative to the first token of the later
// one's block, so that no exponent is ever positive: exp(-L) is never formed (Yang et al.,
// arXiv 2312.06635, section 4.3).

struct ChunkSizes {
  int32_t chunk = 64;  // tokens that share one product with the state
  int32_t block = 16;  // tokens that a decay reference serves; divides chunk
};

// L of [n, dim] from log decays g, or zeros where there is no decay.
inline std::vector<double> decay_sums(const double* g, int32_t n, int32_t dim) {
  std::vector<double> sums(size_t(n) * size_t(dim), 0.0);
  if (g == nullptr) return sums;
  for (int32_t t = 0; t < n; ++t) {
    for (int32_t c = 0; c < dim; ++c) {
      const size_t i = size_t(t) * size_t(dim) + size_t(c);
      sums[i] = g[i] + (t > 0 ? sums[i - size_t(dim)] : 0.0);
    }
  }
  return sums;
}

// x_t * exp(L_t): what reads the chunk's first state at token t.
inline std::vector<double> since_start(const double* x, const std::vector<double>& L) {
  std::vector<double> y(L.size());
  for (size_t i = 0; i < y.size(); ++i) y[i] = x[i] * std::exp(L[i]);
  return y;
}

// y_s * exp(L_last - L_s): what token s leaves in the chunk's last state.
inline std::vector<double> until_end(const double* y, const std::vector<double>& L, int32_t n,
                                     int32_t dim) {
  std::vector<double> z(L.size());
  const double* last = L.data() + size_t(n - 1) * size_t(dim);
  for (size_t i = 0; i < z.size(); ++i) z[i] = y[i] * std::exp(last[i % size_t(dim)] - L[i]);
  return z;
}

// G_ts = sum_c x_tc y_sc exp(L_tc - L_sc) for s <= t, else 0; [n, n]. Blocks below the diagonal are
// a product of two decayed operands, each exponent relative to the later block's first token;
// inside a diagonal block the difference itself is taken.
inline std::vector<double> decayed_gram(const double* x, const double* y,
                                        const std::vector<double>& L, int32_t n, int32_t dim,
                                        int32_t block) {
  std::vector<double> gram(size_t(n) * size_t(n), 0.0);
  for (int32_t t = 0; t < n; ++t) {
    const int32_t first = t / block * block;
    const double* Lt = &L[size_t(t) * size_t(dim)];
    const double* reference = &L[size_t(first) * size_t(dim)];
    for (int32_t s = 0; s <= t; ++s) {
      const double* Ls = &L[size_t(s) * size_t(dim)];
      double sum = 0;
      for (int32_t c = 0; c < dim; ++c) {
        const double product = x[t * dim + c] * y[s * dim + c];
        sum += s < first ? (product * std::exp(Lt[c] - reference[c])) *
                               std::exp(reference[c] - Ls[c])
                         : product * std::exp(Lt[c] - Ls[c]);
      }
      gram[size_t(t) * size_t(n) + size_t(s)] = sum;
    }
  }
  return gram;
}

inline double dot(const double* x, const double* y, int32_t dim) {
  double sum = 0;
  for (int32_t c = 0; c < dim; ++c) sum += x[c] * y[c];
  return sum;
}

// S = S diag(exp L_last) + sum_s u_s z_s', with S of [rows, dim], u of [n, stride] and z what
// until_end() gives.
inline void advance_state(double* state, const double* u, int64_t stride,
                          const std::vector<double>& z, const std::vector<double>& L, int32_t n,
                          int32_t rows, int32_t dim) {
  const double* last = L.data() + size_t(n - 1) * size_t(dim);
  for (int32_t j = 0; j < rows; ++j) {
    for (int32_t c = 0; c < dim; ++c) {
      double sum = state[j * dim + c] * std::exp(last[c]);
      for (int32_t s = 0; s < n; ++s) sum += u[s * stride + j] * z[size_t(s * dim + c)];
      state[j * dim + c] = sum;
    }
  }
}

}  // namespace weir
