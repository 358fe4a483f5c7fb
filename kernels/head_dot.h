#pragma once
#include "kernels/types.h"

namespace weir {

// One number a head: out[t][h] = activation(weight . x[t][h] + bias), one weight for all heads.
struct HeadDot {
  int32_t tokens = 0, heads = 0, dim = 0;
  const float* weight = nullptr;  // [dim]
  const float* bias = nullptr;    // [1]
  Activation activation = Activation::None;
  Acts x;                         // [tokens, heads * dim]
  Acts out;                       // [tokens, heads]
};

}  // namespace weir
