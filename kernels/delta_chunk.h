#pragma once
#include "kernels/chunk_math.h"

namespace weir {

// The delta rule of DeltaMix for many tokens of one value head, after convolution, norms and
// gates, in the chunk form (arXiv 2406.06484, section 3; with decay 2412.06464, eq. 8-10, and per
// channel 2510.26692). Per token it is
//   S = S diag(exp g);   u = write * v - S (erase * k);   S = S + u k';   o = S q
// and for a chunk, with L the sums of g and <x, y>_ts = sum_c x_c y_c exp(L_t - L_s)_c:
//   A_ts = <erase_t * k_t, k_s>_ts, s < t;   P_ts = <q_t, k_s>_ts, s <= t
//   U = (I + A)^-1 (write * V - (erase * K * exp L) S')
//   O = (Q * exp L) S' + P U;   S = S diag(exp L_last) + U' (K * exp(L_last - L))
//
// DeltaNet has no g, Gated DeltaNet's is the same in every channel; both gates are beta except in
// Gated DeltaNet-2. The CPU never serves with this form: it rounds differently for each chunk
// length, and the step form does not. It is the oracle of the CUDA prefill kernels.
struct DeltaChunk {
  ChunkSizes sizes;
  int32_t tokens = 0, key_dim = 0, value_dim = 0;
  const double* q = nullptr;          // [tokens, key_dim], scaled
  const double* k = nullptr;          // [tokens, key_dim], normalised
  const double* v = nullptr;          // [tokens, value_dim]
  const double* log_decay = nullptr;  // [tokens, key_dim], <= 0; null: no decay
  const double* erase = nullptr;      // [tokens, key_dim]
  const double* write = nullptr;      // [tokens, value_dim]
  double* state = nullptr;            // [value_dim, key_dim]: at the start, then at the end
  double* out = nullptr;              // [tokens, value_dim]
};

namespace cpu {
void run(const DeltaChunk& op);
}

}  // namespace weir
