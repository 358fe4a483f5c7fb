// RetNet: its tensors and its ops.
#include <cmath>
#include <utility>

#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {

RetNetWeights bind_weights(const RetNetMixer& m, int32_t dim, const std::string& prefix,
                           WeightReader& reader) {
  RetNetWeights w;
  w.q = reader.matrix(prefix + "q_proj.weight", m.heads * m.key_dim, dim);
  w.k = reader.matrix(prefix + "k_proj.weight", m.kv_heads * m.key_dim, dim);
  w.v = reader.matrix(prefix + "v_proj.weight", m.kv_heads * m.value_dim, dim);
  if (m.output_gate) w.g = reader.matrix(prefix + "g_proj.weight", m.heads * m.value_dim, dim);
  w.norm = bind_gated_norm(prefix, m.value_dim, reader);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, m.heads * m.value_dim);
  std::vector<float> log_decay;
  for (int32_t head = 0; head < m.heads; ++head) {
    log_decay.push_back(float(std::log1p(-std::exp2(-5.0 - head))));
  }
  w.log_decay = reader.keep(std::move(log_decay));
  return w;
}

void lower(const RetNetMixer& m, const RetNetWeights& w, LayerContext& layer) {
  constexpr float kTheta = 10000;
  Projection in(layer.spec.dim);
  const Projection::Part q = in.add(w.q), k = in.add(w.k), v = in.add(w.v), g = in.add(w.g);
  const Acts projected = in.lower(layer, layer.in);
  const auto positions = [&](Acts x, int32_t heads) {
    lower_activation(layer, m.feature, heads * m.key_dim, x);
    layer.program.push_back(
        Rotary{.rows = layer.rows, .heads = heads, .dim = m.key_dim, .theta = kTheta, .x = x});
  };
  positions(q.of(projected), m.heads);
  positions(k.of(projected), m.kv_heads);
  const Acts out = layer.workspace.take(layer.rows.tokens, int64_t(m.heads) * m.value_dim);
  layer.program.push_back(OuterStep{.rows = layer.rows,
                                    .heads = m.heads,
                                    .key_heads = m.kv_heads,
                                    .value_heads = m.kv_heads,
                                    .query_heads = m.heads,
                                    .key_dim = m.key_dim,
                                    .value_dim = m.value_dim,
                                    .decay = OuterStep::Decay::Constant,
                                    .constant = w.log_decay,
                                    .scale = 1 / std::sqrt(float(m.key_dim)),
                                    .q = q.of(projected),
                                    .k = k.of(projected),
                                    .v = v.of(projected),
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
