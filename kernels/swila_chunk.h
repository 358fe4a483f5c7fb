#pragma once
#include "kernels/chunk_math.h"

namespace weir {

// Switching Linear Attention (SwilaMix) for many tokens of one head, after convolution, norms and
// gates, in an exact blocked form. Only the scalar u_t[j][d] = beta r delta depends non-linearly on
// the state, and only through p_t[j][d] = S^-_t[j][d] k_t. For a chunk, with L the sums of the log
// decays of (j, key channel) and G_ts, H_ts the decayed <k_t, k_s>, <q_t, k_s> of each j:
//   p_t = S (k_t * exp L_t) + sum_{s < t} G_ts u_s
//   r_t = softmax_j(log prior_t - (v_t - p_t)^2 / 2);   u_t = beta_t r_t (v_t - p_t)
//   o_t = sum_j rho_tj (S (q_t * exp L_t) + sum_{s <= t} H_ts u_s)
//   S   = S diag(exp L_last) + sum_s u_s (k_s * exp(L_last - L_s))'
// No Newton iterations: all but the 16 x 16 blocks on the diagonal are products of matrices. Priors
// mix with the last token's as in swila_mix.h where key_mix and query_mix are set.
//
// As with DeltaChunk, the CPU serves with the step form, and this is the oracle of CUDA prefill.
struct SwilaChunk {
  ChunkSizes sizes;
  int32_t tokens = 0, mixtures = 0, dim = 0;
  const double* q = nullptr;             // [tokens, dim], normalised; so is k
  const double* k = nullptr;
  const double* v = nullptr;
  const double* key_router = nullptr;    // [tokens, mixtures, dim], sums to 1 over mixtures
  const double* query_router = nullptr;  // the same
  const double* beta = nullptr;          // [tokens, mixtures, dim]
  const double* log_decay = nullptr;     // [tokens, mixtures, key dim], <= 0; null: not gated
  const double* key_mix = nullptr;       // [tokens, dim], 0 .. 1; null: not temporal
  const double* query_mix = nullptr;     // the same
  double* state = nullptr;               // [mixtures, dim, key dim]: at the start, then at the end
  double* posterior = nullptr;           // r, [mixtures, dim], likewise; temporal only
  double* prior = nullptr;               // rho, likewise
  double* out = nullptr;                 // [tokens, dim]
};

namespace cpu {
void run(const SwilaChunk& op);
}

}  // namespace weir
