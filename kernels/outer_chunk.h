#pragma once
#include "kernels/chunk_math.h"

namespace weir {

// The recurrence of OuterStep, which only adds, for many tokens of one head in the chunk form
// (arXiv 2312.06635, section 4): linear attention, RetNet, GLA, HGRN2, Mamba-2 and both halves of
// gated slot attention. Per token
//   S = diag(exp h) S diag(exp g) + v k';   o = S q   [/ (q . z + 1e-10), z the sum of keys]
// with g a log decay for each key channel and h one for each value; one of the two is null. For a
// chunk, with L the sums of g, M those of h and <q, k>_ts = sum_c q_c k_c exp(L_t - L_s)_c:
//   O_t = exp(M_t) * (S (q_t * exp L_t)) + sum_{s <= t} <q, k>_ts exp(M_t - M_s) * v_s
//   S   = diag(exp M_last) S diag(exp L_last) + sum_s (exp(M_last - M_s) * v_s) (k_s * ...)'
//
// As with DeltaChunk, the CPU serves with the step form, and this is the oracle of CUDA prefill.
struct OuterChunk {
  ChunkSizes sizes;
  int32_t tokens = 0, key_dim = 0, value_dim = 0;
  const double* q = nullptr;            // [tokens, key_dim], scaled
  const double* k = nullptr;            // [tokens, key_dim]
  const double* v = nullptr;            // [tokens, value_dim], as written
  const double* key_decay = nullptr;    // g, [tokens, key_dim], <= 0
  const double* value_decay = nullptr;  // h, [tokens, value_dim], <= 0
  double* state = nullptr;              // [value_dim, key_dim]: at the start, then at the end
  double* sums = nullptr;               // z, [key_dim], likewise; null: not normalised
  double* out = nullptr;                // [tokens, value_dim]
};

namespace cpu {
void run(const OuterChunk& op);
}

}  // namespace weir
