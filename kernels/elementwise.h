#pragma once
#include <limits>

#include "kernels/types.h"

namespace weir {

// out[t][i] = function of x[t][i], and for some of a table over channels or of other activations.
struct Elementwise {
  enum class Function : uint8_t {
    Activate,        // activation(x)
    LogDecay,        // max(log sigmoid(x) / divisor, floor): the gates of GLA and GSA
    BoundedLogDecay, // log(a + (1 - a) sigmoid(x)): HGRN2's gate above a lower bound a
    OneMinusExp,     // 1 - exp(x): the key, or write strength, that belongs to a log decay
    SoftplusStep,    // softplus(x + a) clamped to [floor, ceiling]: Mamba-2's dt
    SigmoidDecay,    // floor * sigmoid(x): RWKV-7's log decay
    SoftplusDecay,   // -a softplus(x + b): Gated DeltaNet's log decay
    Scale,           // x * a
    AddScaled,       // x + a * y
    Multiply,        // x * y
    ScaleTowards,    // x * (1 + (y - 1) * a)
    Blend,           // x + (y - x) * z
  };

  int32_t tokens = 0, dim = 0;
  Function function = Function::Activate;
  Activation activation = Activation::None;
  float divisor = 1;
  float floor = -std::numeric_limits<float>::infinity();
  float ceiling = std::numeric_limits<float>::infinity();
  const float* a = nullptr;   // [dim]
  const float* b = nullptr;   // [dim]
  Acts x, out;                // [tokens, dim]; may be the same
  Acts y, z;                  // [tokens, dim]
};

}  // namespace weir
