#pragma once
#include "kernels/delta_mix.h"
#include "kernels/mixer_math.h"

namespace weir {

// A row's three convolutions. Their history rows lie side by side. Values that are ready have
// none.
struct DeltaStreams {
  ConvStream q, k, v;
};

inline DeltaStreams delta_streams(const DeltaMix& op, const RowRun& row) {
  const int64_t keys = int64_t(op.key_heads) * op.key_dim;
  const int64_t values = int64_t(op.value_heads) * op.value_dim;
  const auto stream = [&](const Acts& in, int32_t width, const float* taps, const float* bias,
                          int64_t at) {
    ConvStream made{.width = width, .taps = taps, .bias = bias,
                    .in = {in.at(row.begin), in.stride}};
    if (width > 1) {
      made.history = op.history.at(row.slot) + at;
      made.history_stride = 2 * keys + (op.values_ready ? 0 : values);
      made.first = row.first;
    }
    return made;
  };
  const int32_t width = op.conv_width;
  return {.q = stream(op.q, width, op.conv_q, op.conv_q_bias, 0),
          .k = stream(op.k, width, op.conv_k, op.conv_k_bias, keys),
          .v = stream(op.v, op.values_ready ? 0 : width, op.conv_v, op.conv_v_bias, 2 * keys)};
}

inline int64_t state_floats(const DeltaMix& op) { return int64_t(op.value_dim) * op.key_dim; }

}  // namespace weir
