#pragma once
#include "kernels/types.h"

namespace weir {

// Brings together what a token's memories answer (see MemoryRoute):
//   out[t] = sum over c of weight[t][c] * answers[pair[t][c]]   [+ shared[t]]
struct MemoryMerge {
  int32_t tokens = 0, dim = 0, chosen = 0;
  const int32_t* pair = nullptr;  // [tokens, chosen]
  Acts weight;                    // [tokens, chosen]
  Acts answers;                   // [tokens * chosen, dim]
  Acts shared;                    // [tokens, dim], or null
  Acts out;                       // [tokens, dim]
};

}  // namespace weir
