#pragma once
#include "kernels/pending.h"
#include "kernels/types.h"

namespace weir {

// A whole Switching Linear Attention mixer (arXiv 2609.39034) between its in- and out-projection,
// for every token of every row, in place on the row's slot. Each head keeps J regressors S[j] of
// [value dim d, key dim e], dim x dim. Per token and head:
//
//   q, k, v      = silu(conv(.));  q, k = x / sqrt(sum x^2 + 1e-6)
//   pk, pq       = softmax over j of key_router, query_router            [J, dim] each
//   beta         = sigmoid(.)                                            [J, dim]
//   S[j][d][e]  *= exp(-decay_a[j] * softplus(decay_in[j][e] + dt_bias[j][e]))       gated only
//   delta[j][d]  = v[d] - sum_e S[j][d][e] k[e]                                      (eq. 3.3)
//   prior        = (1 - gk) r + gk pk, with the last token's posterior r   temporal, else pk
//   r[j][d]      = softmax over j of (log prior - delta^2 / 2)                       (eq. 3.4)
//   S[j][d][e]  += beta[j][d] r[j][d] delta[j][d] k[e]
//   rho          = (1 - gq) rho + gq pq                                    temporal, else pq
//   o[d]         = sum_j rho[j][d] sum_e S[j][d][e] q[e]                             (eq. 3.5)
//   out          = rms(o) * norm_weight                                    per head
//
// gk, gq = sigmoid(.), [dim]. A new sequence starts with S = 0 and r = rho = 1 / J.
struct SwilaMix {
  Rows rows;
  int32_t heads = 0, mixtures = 0, dim = 0;

  Acts q, k, v;                     // [tokens, heads * dim], raw projections
  int32_t conv_width = 0;
  const float* conv_q = nullptr;    // [heads * dim, conv_width], newest tap last
  const float* conv_k = nullptr;
  const float* conv_v = nullptr;

  Acts key_router, query_router;    // [tokens, heads * mixtures * dim] logits
  Acts beta;                        // the same
  Acts key_mix, query_mix;          // [tokens, heads * dim] logits; null: not temporal
  bool gated = false;               // false: nothing decays, and the three below are not read
  Acts decay_in;                    // [tokens, heads * mixtures * dim]
  const float* decay_a = nullptr;   // [heads * mixtures], exp(A_log)
  const float* dt_bias = nullptr;   // [heads * mixtures * dim]

  const float* norm_weight = nullptr;  // [dim]
  float norm_eps = 0;
  Acts out;                            // [tokens, heads * dim]

  SlotState state;      // [heads, mixtures, dim, dim]
  SlotState posterior;  // r, [heads, mixtures, dim]; temporal only
  SlotState prior;      // rho, the same
  SlotState history;    // [conv_width - 1, q channels | k channels | v channels], a ring (ring.h)
  // [heads, pending_layout(op).floats()]: rows of one token defer their writes (pending.h), and
  // others have nothing waiting. Null: every row writes. Only where the backend says that it
  // defers_writes().
  SlotState pending;
};

// A head's rows are [mixture, value]. Without decays all mixtures have the same keys.
constexpr PendingLayout pending_layout(const SwilaMix& op) {
  return {.values = op.mixtures * op.dim, .key_dim = op.dim,
          .groups = op.gated ? op.mixtures : 1};
}
constexpr int32_t pending_heads(const SwilaMix& op) { return op.heads; }

}  // namespace weir
