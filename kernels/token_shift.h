#pragma once
#include "kernels/types.h"

namespace weir {

// Token shift (RWKV): every token's vector, moved towards that of the token before it, once for
// each of `mixes` tables:
//   out[t][m] = in[t] + (in[t - 1] - in[t]) * mix[m]
// Before the row's first token comes what the slot's history holds, zeros for a new sequence.
struct TokenShift {
  Rows rows;
  int32_t dim = 0, mixes = 1;
  const float* mix = nullptr;  // [mixes, dim]
  Acts in;                     // [tokens, dim]
  Acts out;                    // [tokens, mixes * dim]; not `in`
  SlotState history;           // [dim]: the last token's vector
};

}  // namespace weir
