#pragma once
#include "kernels/types.h"

namespace weir {

// out = silu(gate) * up.
struct Swiglu {
  int32_t tokens = 0, dim = 0;
  Acts gate, up, out;  // [tokens, dim]; out may be gate
  // The three are read by this op and the one after it alone: a backend may leave them unwritten
  // and pass on what they hold in a form of its own.
  bool read_once = false;
};

}  // namespace weir
