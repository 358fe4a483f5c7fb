#pragma once
#include "kernels/delta_mix.h"

namespace weir {

// The recurrence that takes out along one direction what it reads along another, over vectors that
// are ready: Gated DeltaProduct (arXiv 2502.10297), Comba (2506.02475) and RWKV-7 (2503.14456). A
// token updates S of [value_dim, key_dim] `updates` times, each time with vectors of its own:
//   r = S p                         here when !decayed_read
//   S = S diag(exp log_decay)       in a token's first update alone
//   r = S p                         here when decayed_read
//   S = S + beta (v k' - r e')      beta = beta_scale * sigmoid(.)
// and answers o = scale * S q after the last one. With a bonus it says besides what the token adds
// past the state: (q . (k * bonus)) v, of its last update.
//
// Vectors of all updates lie update-major: those of update u and head h are u * heads + h.
struct EraseStep {
  Rows rows;
  int32_t heads = 0, key_dim = 0, value_dim = 0, updates = 1;
  Decay decay = Decay::None;
  bool decayed_read = true;
  float scale = 1;
  Acts q;          // [tokens, heads * key_dim]
  Acts k;          // [tokens, updates * heads * key_dim]; likewise the next two
  Acts p;          // null: k
  Acts e;          // null: k
  Acts v;          // [tokens, updates * heads * value_dim]
  Acts log_decay;  // [tokens, heads] PerHead, [tokens, heads * key_dim] PerChannel
  Acts beta;       // [tokens, updates * heads] logits; null: beta = beta_scale
  float beta_scale = 1;
  const float* bonus = nullptr;  // [heads * key_dim], or null
  Acts out;                      // [tokens, heads * value_dim]
  Acts bonus_out;                // the same; set with bonus
  SlotState state;               // [heads, value_dim, key_dim]
};

}  // namespace weir
