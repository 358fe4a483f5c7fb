#pragma once

#include "tests/ops/cuda_steps.h"

namespace weir {

struct DeltaCase {
  std::string name;
  int32_t key_heads = 2, value_heads = 2, key_dim = 128, value_dim = 128, conv = 4;
  Decay decay = Decay::PerHead;
  int32_t decay_heads = 2;
  float lower_bound = 0, dt_shift = 0;
  float beta_shift = 0;  // of the logits of beta, erase and write: small ones change little
  bool beta = true, erase = false, gate = true, conv_bias = false;
  Activation qk_activation = Activation::Silu, gate_activation = Activation::Silu;
  QkNorm qk_norm = QkNorm::L2;
  bool norm_output = true, erases = true;
  bool values_ready = false, emits = false, answer_add = false;  // cross-layer routing
};

inline void PrintTo(const DeltaCase& c, std::ostream* to) { *to << c.name; }

// Where steps say what is written, writes are deferred, and what waits is added in the end: how it
// waits is the backend's own.
inline Program delta_program(Side& side, const DeltaCase& c, const Steps& steps) {
  const int32_t T = steps.tokens(), keys = c.key_heads * c.key_dim,
                values = c.value_heads * c.value_dim;
  DeltaMix op{.rows = steps.put(side), .key_heads = c.key_heads, .value_heads = c.value_heads,
              .key_dim = c.key_dim, .value_dim = c.value_dim, .q = side.acts(T, keys),
              .k = side.acts(T, keys), .v = side.acts(T, values), .conv_width = c.conv,
              .qk_activation = c.qk_activation, .qk_norm = c.qk_norm, .decay = c.decay,
              .decay_heads = c.decay_heads, .lower_bound = c.lower_bound, .beta_scale = 1.7f,
              .erases = c.erases, .norm_output = c.norm_output,
              .norm_weight = side.floats(size_t(c.value_dim)), .norm_eps = 1e-5f,
              .gate_activation = c.gate_activation, .values_ready = c.values_ready};
  if (c.conv > 0) {
    op.conv_q = side.floats(size_t(keys * c.conv), 0.5f);
    op.conv_k = side.floats(size_t(keys * c.conv), 0.5f);
    if (!c.values_ready) op.conv_v = side.floats(size_t(values * c.conv), 0.5f);
    if (c.conv_bias) {
      op.conv_q_bias = side.floats(size_t(keys));
      op.conv_k_bias = side.floats(size_t(keys));
      if (!c.values_ready) op.conv_v_bias = side.floats(size_t(values));
    }
  }
  if (c.decay != Decay::None) {
    const int32_t channels = c.decay_heads * (c.decay == Decay::PerHead ? 1 : c.key_dim);
    op.decay_in = side.acts(T, channels, 3);
    std::vector<float> a = side.normal(size_t(c.decay_heads));
    for (float& value : a) value = std::exp(value);
    op.decay_a = side.put(a);
    std::vector<float> dt_bias = side.normal(size_t(channels));
    for (float& value : dt_bias) value += c.dt_shift;
    op.dt_bias = side.put(dt_bias);
  }
  if (c.erase) {
    op.erase = side.acts(T, keys, 1, c.beta_shift);
    op.write = side.acts(T, values, 1, c.beta_shift);
  } else if (c.beta) {
    op.beta = side.acts(T, c.value_heads, 1, c.beta_shift);
  }
  if (c.gate) op.gate = side.acts(T, values);
  if (c.answer_add) op.answer_add = side.acts(T, values);
  if (c.emits) {
    op.emits = true;
    op.emitted = side.out(T, values, "emitted");
  }
  const int64_t state = int64_t(c.value_heads) * c.value_dim * c.key_dim;
  const int32_t kept = 2 * keys + (c.values_ready ? 0 : values);
  const int64_t history = int64_t(std::max(0, c.conv - 1)) * kept;
  const bool defers = !steps.written.empty();
  const int64_t waiting = defers ? c.value_heads * pending_layout(op).floats() : 0;
  const int64_t stride = state + history + waiting + 32;  // a part of larger slots
  const auto slots = size_t(steps.slots() * stride);
  std::vector<float> memory = side.normal(slots, 0.3f);
  if (defers) {
    poison_fresh(steps, state + history, stride, memory);
    poison_waiting(steps, c.value_heads, pending_layout(op), stride, state + history, memory);
  }
  op.state = {side.put(memory), stride};
  if (c.conv > 1) op.history = op.state.from(state);
  side.compare(op.state.data, slots, defers ? state + history : int64_t(slots),
               defers ? stride : int64_t(slots), "slots");
  op.out = side.out(T, values, "out");
  if (!defers) return {op};
  op.pending = op.state.from(state + history);
  return {op, FlushPending{.rows = after(steps).put(side), .heads = c.value_heads,
                           .layout = pending_layout(op), .state = op.state,
                           .pending = op.pending}};
}

}  // namespace weir
