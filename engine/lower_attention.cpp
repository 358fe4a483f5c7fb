// Softmax attention: its tensors and its ops.
#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {

AttentionWeights bind_weights(const AttentionMixer& m, int32_t dim, const std::string& prefix,
                      WeightReader& reader) {
  const int32_t queries = m.heads * m.head_dim, keys = m.kv_heads * m.head_dim;
  AttentionWeights w;
  w.q = reader.matrix(prefix + "q_proj.weight", queries, dim);
  w.k = reader.matrix(prefix + "k_proj.weight", keys, dim);
  w.v = reader.matrix(prefix + "v_proj.weight", keys, dim);
  if (m.qkv_bias) {
    w.q_bias = reader.vector(prefix + "q_proj.bias", queries);
    w.k_bias = reader.vector(prefix + "k_proj.bias", keys);
    w.v_bias = reader.vector(prefix + "v_proj.bias", keys);
  }
  if (m.qk_norm) {
    w.q_norm = reader.vector(prefix + "q_norm.weight", m.norm_per_head ? queries : m.head_dim);
    w.k_norm = reader.vector(prefix + "k_norm.weight", m.norm_per_head ? keys : m.head_dim);
  }
  if (m.forget_gate) {
    w.forget = reader.matrix(prefix + "f_proj.weight", m.heads, dim);
    w.forget_bias = reader.vector(prefix + "f_proj.bias", m.heads);
  }
  if (m.output_gate) w.g = reader.matrix(prefix + "g_proj.weight", queries, dim);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, queries);
  return w;
}

void lower(const AttentionMixer& m, const AttentionWeights& w, LayerContext& layer) {
  Projection in(layer.spec.dim);
  const Projection::Part q = in.add(w.q, w.q_bias), k = in.add(w.k, w.k_bias),
                         v = in.add(w.v, w.v_bias), g = in.add(w.g),
                         forget = in.add(w.forget, w.forget_bias);
  const Acts projected = in.lower(layer, layer.in);
  const Acts out = layer.workspace.take(layer.rows.tokens, int64_t(m.heads) * m.head_dim);
  layer.program.push_back(Attention{.rows = layer.rows,
                                    .heads = m.heads,
                                    .kv_heads = m.kv_heads,
                                    .head_dim = m.head_dim,
                                    .window = m.window,
                                    .rope_theta = m.rope_theta,
                                    .q_norm = w.q_norm,
                                    .k_norm = w.k_norm,
                                    .norm_per_head = m.norm_per_head,
                                    .norm_eps = 1e-5f,  // whatever the model's norm_eps says
                                    .q = q.of(projected),
                                    .k = k.of(projected),
                                    .v = v.of(projected),
                                    .forgets = m.forget_gate,
                                    .forget = forget.of(projected),
                                    .out = out,
                                    .ring = layer.state,
                                    .pages = layer.pages,
                                    .page_stride = layer.page_stride,
                                    .page_tokens = layer.page_tokens,
                                    .page_table = layer.arrays.page_table,
                                    .pages_per_row = layer.arrays.pages_per_row});
  if (m.output_gate) {
    layer.program.push_back(HeadNorm{.tokens = layer.rows.tokens,
                                     .groups = m.heads,
                                     .dim = m.head_dim,
                                     .kind = HeadNorm::Kind::None,
                                     .gate = g.of(projected),
                                     .gate_activation = Activation::Sigmoid,
                                     .in = out,
                                     .out = out});
  }
  lower_residual(layer, w.o, out);
}

}  // namespace weir
