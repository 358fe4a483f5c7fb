#pragma once
#include "kernels/types.h"

namespace weir {

// out = in / sqrt(mean(in^2) + eps) * weight, over each token's dim values.
struct RmsNorm {
  int32_t tokens = 0, dim = 0;
  float eps = 0;
  const float* weight = nullptr;  // [dim]
  Acts in, out;                   // [tokens, dim]
  bool read_once = false;         // out is read by the next op alone, as in Swiglu
};

}  // namespace weir
