#pragma once
#include "tests/ops/cuda_steps.h"

namespace weir {

struct OuterCase {
  std::string name;
  int32_t heads = 2, key_heads = 2, value_heads = 2, query_heads = 2;
  int32_t key_dim = 128, value_dim = 128;
  OuterStep::Decay decay = OuterStep::Decay::None;
  bool normalise = false, v_scale = false, skip = false;
  float log_decay = 0;  // the same for every token; 0: random ones from 0 to -1
  float value = 1;      // size of v
};

inline Program outer_program(Side& side, const OuterCase& c, const Steps& steps) {
  const int32_t T = steps.tokens();
  OuterStep op{.rows = steps.put(side), .heads = c.heads, .key_heads = c.key_heads,
               .value_heads = c.value_heads, .query_heads = c.query_heads, .key_dim = c.key_dim,
               .value_dim = c.value_dim, .decay = c.decay, .scale = 0.125f,
               .normalise = c.normalise};
  // Positive keys and queries where they are normalised by their sum.
  const auto vectors = [&](int32_t heads) {
    const int64_t dim = int64_t(heads) * c.key_dim;
    const Acts shape{nullptr, (dim + 15) / 16 * 16 + 16};
    std::vector<float> values = side.normal(size_t(T * shape.stride));
    for (float& value : values) value = c.normalise ? std::fabs(value) : value;
    return Acts{side.put(values), shape.stride};
  };
  op.q = vectors(c.query_heads);
  op.k = vectors(c.key_heads);
  op.v = side.acts(T, c.value_heads * c.value_dim, c.value);
  const auto log_decays = [&](int64_t count) {
    std::vector<float> values = side.normal(size_t(count));
    for (float& g : values) g = c.log_decay < 0 ? c.log_decay : -std::fabs(g) / 3;
    return side.put(values);
  };
  using Decay = OuterStep::Decay;
  const int64_t decays = c.decay == Decay::PerHead    ? c.heads
                         : c.decay == Decay::PerKey   ? int64_t(c.key_heads) * c.key_dim
                         : c.decay == Decay::PerValue ? int64_t(c.value_heads) * c.value_dim
                                                      : 0;
  if (decays > 0) op.log_decay = {log_decays(T * (decays + 4)), decays + 4};
  if (c.decay == Decay::Constant) op.constant = log_decays(c.heads);
  if (c.v_scale) op.v_scale = side.acts(T, c.heads);
  if (c.skip) op.skip = side.floats(size_t(c.heads * c.value_dim));
  const int64_t state = int64_t(c.heads) * c.value_dim * c.key_dim;
  const int64_t sums = c.normalise ? int64_t(c.heads) * c.key_dim : 0;
  const int64_t stride = (state + sums + 35) / 4 * 4;
  std::vector<float> slots = side.normal(size_t(steps.slots() * stride), 0.3f);
  for (int64_t slot = 0; slot < steps.slots(); ++slot) {
    for (int64_t i = state; i < state + sums; ++i) {
      float& sum = slots[size_t(slot * stride + i)];
      sum = std::fabs(sum);
    }
  }
  op.state = {side.put(slots), stride};
  if (c.normalise) op.sums = op.state.from(state);
  side.compare(op.state.data, slots.size(), "slots");
  op.out = side.out(T, std::max(c.heads, c.query_heads) * c.value_dim, "out");
  return {op};
}

}  // namespace weir
