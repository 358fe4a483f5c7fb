#pragma once
#include "kernels/types.h"

namespace weir {

// out[t] = table[ids[t]], widened to float32.
struct Embed {
  int32_t tokens = 0;
  const Token* ids = nullptr;  // [tokens]
  Matrix table;                // [vocab, dim]
  Acts out;                    // [tokens, dim]
};

}  // namespace weir
