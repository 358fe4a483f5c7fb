#pragma once
#include "kernels/types.h"

namespace weir {

// What hidden routing (arXiv 2607.07953) projects into the residual stream where that is neither a
// layer's values v nor its write residual u alone. Per head:
//   GatedValue:  out = v * sigmoid(a s + b),  s = |u| / (|v| + 1e-6)        CLER-G
//   Both:        out = [u ; v], 2 * dim numbers                             CLER-RV
struct RouteSignal {
  enum class Kind : uint8_t { GatedValue, Both };

  int32_t tokens = 0, heads = 0, dim = 0;
  Kind kind = Kind::GatedValue;
  const float* gate = nullptr;  // [2]: a, b; GatedValue
  Acts v, u;                    // [tokens, heads * dim]
  Acts out;                     // [tokens, heads * dim], or twice that; neither v nor u
};

}  // namespace weir
