#pragma once
#include "kernels/types.h"

namespace weir {

// out[i] = in[index[i]]: picks the tokens whose logits are wanted.
struct Gather {
  int32_t count = 0, dim = 0;
  const int32_t* index = nullptr;  // [count], each a token of this step
  Acts in;                         // [tokens, dim]
  Acts out;                        // [count, dim]
};

}  // namespace weir
