#pragma once
#include "kernels/types.h"

namespace weir {

// Normalises each of `groups` runs of `dim` values of a token:
//   y = activation(x) [* gate_activation(gate)]                            when gate_first
//   y = y / sqrt(mean(y^2) + eps) * weight                                 Rms
//       (y - mean) / sqrt(variance + eps) * weight + bias                  Centred
//       y / sqrt(sum(y^2) + eps)                                           L2
//   out = y [+ add] [* gate_activation(gate), unless gate_first]
struct HeadNorm {
  enum class Kind : uint8_t { None, Rms, Centred, L2 };  // None: only activation and gate

  int32_t tokens = 0, groups = 0, dim = 0;
  float eps = 0;
  Kind kind = Kind::Rms;
  Activation activation = Activation::None;
  const float* weight = nullptr;       // Rms, Centred: [dim], the same for each group, or
  bool weight_per_group = false;       // [groups * dim]
  const float* bias = nullptr;         // as weight; Centred only, may be null
  Acts add;                            // [tokens, groups * dim], or null
  Acts gate;                           // likewise
  Activation gate_activation = Activation::Silu;
  bool gate_first = false;
  Acts in, out;                        // [tokens, groups * dim]; may be the same
};

}  // namespace weir
