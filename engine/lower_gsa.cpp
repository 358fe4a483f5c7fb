// Gated slot attention: its tensors and its ops.
#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {

GsaWeights bind_weights(const GsaMixer& m, int32_t dim, const std::string& prefix,
                        WeightReader& reader) {
  const int32_t queries = m.heads * m.key_dim, keys = m.kv_heads * m.key_dim;
  const int32_t values = m.kv_heads * m.value_dim, answers = m.heads * m.value_dim;
  GsaWeights w;
  w.q = reader.matrix(prefix + "q_proj.weight", queries, dim);
  w.k = reader.matrix(prefix + "k_proj.weight", keys, dim);
  w.v = reader.matrix(prefix + "v_proj.weight", values, dim);
  w.f = reader.matrix(prefix + "f_proj.weight", m.kv_heads * m.slots, dim);
  if (m.conv) {
    w.conv_q = reader.convolution(prefix + "q_conv1d", queries, m.conv->width);
    w.conv_k = reader.convolution(prefix + "k_conv1d", keys, m.conv->width);
    w.conv_v = reader.convolution(prefix + "v_conv1d", values, m.conv->width);
  }
  if (m.feature == GsaMixer::Feature::T2r) {
    w.feature.weight = reader.table(prefix + "feature_map.layer.weight", m.key_dim, m.key_dim);
  }
  w.norm = reader.vector(prefix + "g_norm.weight", answers);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, answers);
  return w;
}

namespace {

Acts lower_feature(const GsaMixer& m, const GsaWeights& w, int32_t heads, Acts x,
                   LayerContext& layer) {
  if (m.feature != GsaMixer::Feature::T2r) {
    const bool relu = m.feature == GsaMixer::Feature::Relu;
    lower_activation(layer, relu ? Activation::Relu : Activation::Silu, heads * m.key_dim, x);
    return x;
  }
  const Acts out = layer.workspace.take(layer.rows.tokens, int64_t(heads) * m.key_dim);
  layer.program.push_back(FeatureMap{.tokens = layer.rows.tokens,
                                     .heads = heads,
                                     .dim = m.key_dim,
                                     .kind = FeatureMap::Kind::RowLinear,
                                     .activation = Activation::Relu,
                                     .weight = w.feature.weight,
                                     .in = x,
                                     .out = out});
  return out;
}

// What the queries find in the slots: the keys' recurrence read along the slots, a softmax over
// them, and the values' recurrence read with it.
Acts lower_slots(const GsaMixer& m, Acts q, Acts k, Acts v, Acts decay, LayerContext& layer) {
  const int32_t tokens = layer.rows.tokens;
  const Acts strength = layer.workspace.take(tokens, int64_t(m.kv_heads) * m.slots);
  layer.program.push_back(Elementwise{.tokens = tokens,
                                      .dim = m.kv_heads * m.slots,
                                      .function = Elementwise::Function::OneMinusExp,
                                      .x = decay,
                                      .out = strength});
  const Acts scores = layer.workspace.take(tokens, int64_t(m.heads) * m.slots);
  OuterStep step{.rows = layer.rows,
                 .heads = m.kv_heads,
                 .key_heads = m.kv_heads,
                 .value_heads = m.kv_heads,
                 .query_heads = m.heads,
                 .key_dim = m.key_dim,
                 .value_dim = m.slots,
                 .decay = OuterStep::Decay::PerValue,
                 .log_decay = decay,
                 .q = q,
                 .k = k,
                 .v = strength,
                 .out = scores,
                 .state = layer.state};
  layer.program.push_back(step);
  const Acts weights = layer.workspace.take(tokens, int64_t(m.heads) * m.slots);
  layer.program.push_back(FeatureMap{.tokens = tokens,
                                     .heads = m.heads,
                                     .dim = m.slots,
                                     .kind = FeatureMap::Kind::Softmax,
                                     .in = scores,
                                     .out = weights});
  step.key_dim = m.slots;
  step.value_dim = m.value_dim;
  step.decay = OuterStep::Decay::PerKey;
  step.q = weights;
  step.k = strength;
  step.v = v;
  step.out = layer.workspace.take(tokens, int64_t(m.heads) * m.value_dim);
  step.state = layer.state.from(int64_t(m.kv_heads) * m.slots * m.key_dim);
  layer.program.push_back(step);
  return step.out;
}

}  // namespace

void lower(const GsaMixer& m, const GsaWeights& w, LayerContext& layer) {
  constexpr float kNormEps = 1e-5f;  // whatever the model's norm_eps says
  Projection in(layer.spec.dim);
  const Projection::Part q_part = in.add(w.q), k_part = in.add(w.k), v_part = in.add(w.v);
  const Projection::Part f = in.add(w.f);
  const Acts projected = in.lower(layer, layer.in);
  Acts q = q_part.of(projected), k = k_part.of(projected), v = v_part.of(projected);
  if (m.conv) {
    SlotState history = layer.state.from(int64_t(state_size(m).recurrent / sizeof(float)));
    q = lower_conv(layer, w.conv_q, Activation::Silu, q, history);
    k = lower_conv(layer, w.conv_k, Activation::Silu, k, history);
    v = lower_conv(layer, w.conv_v, Activation::Silu, v, history);
  }
  q = lower_feature(m, w, m.heads, q, layer);
  k = lower_feature(m, w, m.kv_heads, k, layer);
  lower_activation(layer, Activation::Silu, m.kv_heads * m.value_dim, v);
  const Acts decay = f.of(projected);
  lower_elementwise(
      layer, {.function = Elementwise::Function::LogDecay, .divisor = m.gate_divisor},
      m.kv_heads * m.slots, decay);
  const Acts out = lower_slots(m, q, k, v, decay, layer);
  layer.program.push_back(HeadNorm{.tokens = layer.rows.tokens,
                                   .groups = 1,
                                   .dim = m.heads * m.value_dim,
                                   .eps = kNormEps,
                                   .activation = Activation::Silu,
                                   .weight = w.norm,
                                   .in = out,
                                   .out = out});
  lower_residual(layer, w.o, out);
}

}  // namespace weir
