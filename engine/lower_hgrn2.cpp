// HGRN2: its tensors and its ops.
#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {
namespace {

// The bound of one layer: the softmax of the table over layers, summed over layers 1 .. layer.
const float* bind_lower_bound(const Hgrn2Mixer& m, int32_t channels, WeightReader& reader) {
  const std::vector<float> table =
      reader.numbers("model.lower_bounds", {int64_t(m.layers), int64_t(channels)});
  if (table.empty() || m.layer == 0) return nullptr;
  std::vector<float> bound(static_cast<size_t>(channels));
  for (int32_t c = 0; c < channels; ++c) {
    const auto at = [&](int32_t layer) { return double(table[size_t(layer) * channels + c]); };
    double largest = at(0), sum = 0, below = 0;
    for (int32_t l = 1; l < m.layers; ++l) largest = std::max(largest, at(l));
    for (int32_t l = 0; l < m.layers; ++l) sum += std::exp(at(l) - largest);
    for (int32_t l = 1; l <= m.layer; ++l) below += std::exp(at(l) - largest) / sum;
    bound[size_t(c)] = float(below);
  }
  return reader.keep(std::move(bound));
}

}  // namespace

Hgrn2Weights bind_weights(const Hgrn2Mixer& m, int32_t dim, const std::string& prefix,
                          WeightReader& reader) {
  const int32_t keys = m.heads * m.head_dim, values = m.heads * m.value_dim;
  Hgrn2Weights w;
  w.q = reader.matrix(prefix + "q_proj.weight", keys, dim);
  w.f = reader.matrix(prefix + "f_proj.weight", keys, dim);
  w.i = reader.matrix(prefix + "i_proj.weight", values, dim);
  if (m.conv) {
    w.conv_q = reader.convolution(prefix + "q_conv1d", keys, m.conv->width);
    w.conv_f = reader.convolution(prefix + "f_conv1d", keys, m.conv->width);
    w.conv_i = reader.convolution(prefix + "i_conv1d", values, m.conv->width);
  }
  if (m.lower_bound) w.lower_bound = bind_lower_bound(m, keys, reader);
  w.norm = reader.vector(prefix + "g_norm.weight", values);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, values);
  return w;
}

void lower(const Hgrn2Mixer& m, const Hgrn2Weights& w, LayerContext& layer) {
  constexpr float kNormEps = 1e-5f;  // whatever the model's norm_eps says
  const int32_t keys = m.heads * m.head_dim, values = m.heads * m.value_dim;
  Projection in(layer.spec.dim);
  const Projection::Part q_part = in.add(w.q), f_part = in.add(w.f), i_part = in.add(w.i);
  const Acts projected = in.lower(layer, layer.in);
  Acts q = q_part.of(projected), f = f_part.of(projected), i = i_part.of(projected);
  if (m.conv) {
    SlotState history = layer.state.from(int64_t(state_size(m).recurrent / sizeof(float)));
    q = lower_conv(layer, w.conv_q, Activation::None, q, history);
    f = lower_conv(layer, w.conv_f, Activation::None, f, history);
    i = lower_conv(layer, w.conv_i, Activation::None, i, history);
  }
  lower_activation(layer, Activation::Silu, keys, q);
  Elementwise gate{.function = Elementwise::Function::LogDecay};
  if (w.lower_bound)
    gate = {.function = Elementwise::Function::BoundedLogDecay, .a = w.lower_bound};
  lower_elementwise(layer, gate, keys, f);
  const Acts k = layer.workspace.take(layer.rows.tokens, keys);
  layer.program.push_back(Elementwise{.tokens = layer.rows.tokens,
                                      .dim = keys,
                                      .function = Elementwise::Function::OneMinusExp,
                                      .x = f,
                                      .out = k});
  const Acts out = layer.workspace.take(layer.rows.tokens, values);
  layer.program.push_back(OuterStep{.rows = layer.rows,
                                    .heads = m.heads,
                                    .key_heads = m.heads,
                                    .value_heads = m.heads,
                                    .query_heads = m.heads,
                                    .key_dim = m.head_dim,
                                    .value_dim = m.value_dim,
                                    .decay = OuterStep::Decay::PerKey,
                                    .log_decay = f,
                                    .scale = 1 / std::sqrt(float(m.head_dim)),
                                    .q = q,
                                    .k = k,
                                    .v = i,
                                    .out = out,
                                    .state = layer.state});
  layer.program.push_back(RmsNorm{.tokens = layer.rows.tokens,
                                  .dim = values,
                                  .eps = kNormEps,
                                  .weight = w.norm,
                                  .in = out,
                                  .out = out});
  lower_residual(layer, w.o, out);
}

}  // namespace weir
