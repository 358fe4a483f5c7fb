#pragma once
#include "kernels/types.h"

namespace weir {

// out = silu(gate) * up.
struct Swiglu {
  int32_t tokens = 0, dim = 0;
  Acts gate, up, out;  // [tokens, dim]; out may be gate
};

}  // namespace weir
