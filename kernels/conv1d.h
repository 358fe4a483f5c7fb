#pragma once
#include "kernels/types.h"

namespace weir {

// Depthwise causal convolution over time, for every token of every row:
//   out[t][c] = activation(bias[c] + sum_i taps[c][i] * in[t - width + 1 + i][c])
// Inputs before the row's first token come from the slot's history, zeros for a new sequence.
struct Conv1d {
  Rows rows;
  int32_t channels = 0, width = 0;
  const float* taps = nullptr;  // [channels, width], newest last
  const float* bias = nullptr;  // [channels], or null
  Activation activation = Activation::Silu;
  Acts in, out;                 // [tokens, channels]; not the same
  SlotState history;            // [width - 1, channels]: the last raw inputs, a ring (ring.h)
};

}  // namespace weir
