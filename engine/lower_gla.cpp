// Gated linear attention: its tensors and its ops.
#include <cmath>

#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {
namespace {

// Fixed by the layer, not in any config.json.
constexpr int32_t kGateRank = 16;
constexpr float kGateDivisor = 16;

}  // namespace

GlaWeights bind_weights(const GlaMixer& m, int32_t dim, const std::string& prefix,
                        WeightReader& reader) {
  const int32_t queries = m.heads * m.key_dim, keys = m.kv_heads * m.key_dim;
  const int32_t values = m.kv_heads * m.value_dim, answers = m.heads * m.value_dim;
  GlaWeights w;
  w.q = reader.matrix(prefix + "q_proj.weight", queries, dim);
  w.k = reader.matrix(prefix + "k_proj.weight", keys, dim);
  w.v = reader.matrix(prefix + "v_proj.weight", values, dim);
  if (m.conv) {
    w.conv_q = reader.convolution(prefix + "q_conv1d", queries, m.conv->width);
    w.conv_k = reader.convolution(prefix + "k_conv1d", keys, m.conv->width);
    w.conv_v = reader.convolution(prefix + "v_conv1d", values, m.conv->width);
  }
  w.decay = {reader.matrix(prefix + "gk_proj.0.weight", kGateRank, dim),
             reader.matrix(prefix + "gk_proj.1.weight", keys, kGateRank)};
  w.decay_bias = reader.vector(prefix + "gk_proj.1.bias", keys);
  if (m.output_gate) w.g = reader.matrix(prefix + "g_proj.weight", answers, dim);
  w.norm = bind_gated_norm(prefix, m.value_dim, reader);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, answers);
  return w;
}

void lower(const GlaMixer& m, const GlaWeights& w, LayerContext& layer) {
  Projection in(layer.spec.dim);
  const Projection::Part q_part = in.add(w.q), k_part = in.add(w.k), v_part = in.add(w.v);
  const Projection::Part g = in.add(w.g), decay_part = in.add(w.decay.down);
  const Acts projected = in.lower(layer, layer.in);
  Acts q = q_part.of(projected), k = k_part.of(projected), v = v_part.of(projected);
  if (m.conv) {
    SlotState history = layer.state.from(int64_t(state_size(m).recurrent / sizeof(float)));
    q = lower_conv(layer, w.conv_q, Activation::Silu, q, history);
    k = lower_conv(layer, w.conv_k, Activation::Silu, k, history);
    v = lower_conv(layer, w.conv_v, Activation::Silu, v, history);
  }
  lower_activation(layer, m.feature, m.heads * m.key_dim, q);
  lower_activation(layer, m.feature, m.kv_heads * m.key_dim, k);
  const Acts decay = lower_linear(layer, w.decay.up, w.decay_bias, decay_part.of(projected));
  Elementwise gate{.function = Elementwise::Function::LogDecay, .divisor = kGateDivisor};
  if (m.clamp_min) gate.floor = *m.clamp_min;
  lower_elementwise(layer, gate, m.kv_heads * m.key_dim, decay);

  const Acts out = layer.workspace.take(layer.rows.tokens, int64_t(m.heads) * m.value_dim);
  layer.program.push_back(OuterStep{.rows = layer.rows,
                                    .heads = m.kv_heads,
                                    .key_heads = m.kv_heads,
                                    .value_heads = m.kv_heads,
                                    .query_heads = m.heads,
                                    .key_dim = m.key_dim,
                                    .value_dim = m.value_dim,
                                    .decay = OuterStep::Decay::PerKey,
                                    .log_decay = decay,
                                    .scale = 1 / std::sqrt(float(m.key_dim)),
                                    .q = q,
                                    .k = k,
                                    .v = v,
                                    .out = out,
                                    .state = layer.state});
  layer.program.push_back(HeadNorm{.tokens = layer.rows.tokens,
                                   .groups = m.heads,
                                   .dim = m.value_dim,
                                   .eps = layer.spec.norm_eps,
                                   .weight = w.norm,
                                   .gate = g.of(projected),
                                   .in = out,
                                   .out = out});
  lower_residual(layer, w.o, out);
}

}  // namespace weir
