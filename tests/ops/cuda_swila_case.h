#pragma once

#include "tests/ops/cuda_steps.h"

namespace weir {

struct SwilaCase {
  int32_t mixtures = 4, dim = 64, heads = 3, conv = 4;
  bool temporal = false, gated = false;
  float value_scale = 3;  // large ones have mixtures switch at once
  float router_scale = 2, mix_scale = 1;  // of the logits
  float query_shift = 0;  // of what mixes answers: small ones change their distribution slowly
  float beta_shift = 0;   // small ones write weakly
  float dt_shift = 0;     // of the gates: small ones remember
  float decay_scale = 0;  // every exp(A_log), if not random
  bool defers = false;    // writes; what waits in the end is added

  std::string name() const {
    return std::to_string(mixtures) + " of " + std::to_string(dim) + ", width " +
           std::to_string(conv) + (gated ? ", gated" : "") + (temporal ? ", temporal" : "") +
           (dt_shift != 0 ? ", gates " + std::to_string(int(dt_shift)) : "") +
           (defers ? ", deferred" : "") +
           (decay_scale != 0 ? ", decays " + std::to_string(decay_scale) : "") +
           (query_shift != 0 ? ", queries " + std::to_string(int(query_shift)) : "") +
           (beta_shift != 0 ? ", beta " + std::to_string(int(beta_shift)) : "");
  }
};

// Rows of one token have any number of updates waiting, or none, of which the op is told; it is
// followed by a FlushPending of what waits then.
inline void add_pending(Side& side, const Steps& steps, Program& program) {
  auto& op = std::get<SwilaMix>(program.front());
  const PendingLayout layout = pending_layout(op);
  const int64_t stride = int64_t(op.heads) * layout.floats() + 16;
  std::vector<float> pending = side.normal(size_t(steps.slots() * stride), 0.3f);
  for (int64_t i = 0; i < int64_t(pending.size()); ++i) {
    float& x = pending[size_t(i)];
    if (i % stride % layout.floats() >= layout.keys()) continue;
    x = op.gated ? 1 / (1 + std::fabs(x)) : 1;  // a decay
  }
  const Steps now = deferring(steps);
  poison_waiting(now, op.heads, layout, stride, 0, pending);
  op.rows.written = side.put(now.written);
  op.pending = {side.put(pending), stride};
  program.push_back(FlushPending{.rows = after(now).put(side), .heads = op.heads,
                                 .layout = layout, .state = op.state, .pending = op.pending});
}

inline Program swila_program(Side& side, const SwilaCase& c, const Steps& steps) {
  const int32_t T = steps.tokens(), channels = c.heads * c.dim, mixed = channels * c.mixtures;
  SwilaMix op{.rows = steps.put(side), .heads = c.heads, .mixtures = c.mixtures, .dim = c.dim,
              .q = side.acts(T, channels), .k = side.acts(T, channels),
              .v = side.acts(T, channels, c.value_scale), .conv_width = c.conv,
              .conv_q = side.floats(size_t(channels * c.conv), 0.5f),
              .conv_k = side.floats(size_t(channels * c.conv), 0.5f),
              .conv_v = side.floats(size_t(channels * c.conv), 0.5f),
              .key_router = side.acts(T, mixed, c.router_scale),
              .query_router = side.acts(T, mixed, c.router_scale),
              .beta = side.acts(T, mixed, 1, c.beta_shift),
              .norm_weight = side.floats(size_t(c.dim)),
              .norm_eps = 1e-5f};
  if (c.temporal) {
    op.key_mix = side.acts(T, channels, c.mix_scale);
    op.query_mix = side.acts(T, channels, c.mix_scale, c.query_shift);
  }
  if (c.gated) {
    op.gated = true;
    op.decay_in = side.acts(T, mixed, 3);
    std::vector<float> a = side.normal(size_t(c.heads * c.mixtures));
    for (float& value : a) value = c.decay_scale > 0 ? c.decay_scale : std::exp(value);
    op.decay_a = side.put(a);
    std::vector<float> dt_bias = side.normal(size_t(mixed));
    for (float& value : dt_bias) value += c.dt_shift;
    op.dt_bias = side.put(dt_bias);
  }
  const int64_t state = int64_t(mixed) * c.dim, history = int64_t(c.conv - 1) * 3 * channels;
  const int64_t priors = state + 2 * mixed;
  const int64_t stride = (priors + history + 35) / 4 * 4;  // a part of larger slots
  std::vector<float> slots = side.normal(size_t(steps.slots() * stride), 0.3f);
  for (int64_t slot = 0; slot < steps.slots(); ++slot) {  // distributions
    for (int64_t i = state; i < priors; ++i) {
      float& p = slots[size_t(slot * stride + i)];
      p = std::fabs(p) + 0.01f;
    }
  }
  op.state = {side.put(slots), stride};
  op.posterior = op.state.from(state);
  op.prior = op.state.from(state + mixed);
  op.history = op.state.from(priors);
  side.compare(op.state.data, slots.size(), "slots");
  op.out = side.out(T, channels, "out");
  Program program = {op};
  if (c.defers) add_pending(side, steps, program);
  return program;
}

}  // namespace weir
