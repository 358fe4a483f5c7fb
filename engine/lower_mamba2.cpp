// Mamba-2: its tensors and its ops.
#include <cmath>
#include <utility>

#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {

Mamba2Weights bind_weights(const Mamba2Mixer& m, int32_t dim, const std::string& prefix,
                           WeightReader& reader) {
  const int32_t rows = m.inner() + m.conv_channels() + m.heads;
  Mamba2Weights w;
  w.in = reader.matrix(prefix + "in_proj.weight", rows, dim);
  w.out = reader.matrix(prefix + "out_proj.weight", dim, m.inner());
  if (m.bias) {
    w.in_bias = reader.vector(prefix + "in_proj.bias", rows);
    w.out_bias = reader.vector(prefix + "out_proj.bias", dim);
  }
  w.conv = {m.conv_channels(), m.conv.width,
            reader.conv(prefix + "conv1d.weight", m.conv_channels(), m.conv.width)};
  if (m.conv_bias) w.conv.bias = reader.vector(prefix + "conv1d.bias", m.conv_channels());
  w.dt_bias = reader.vector(prefix + "dt_bias", m.heads);
  std::vector<float> a = reader.numbers(prefix + "A_log", {m.heads});
  for (float& value : a) value = -std::exp(value);
  w.decay_a = reader.keep(std::move(a));
  std::vector<float> skip =
      reader.numbers(prefix + "D", {m.skip_per_value ? m.inner() : m.heads});
  if (!m.skip_per_value && !skip.empty()) {
    std::vector<float> each;
    for (const float value : skip) each.insert(each.end(), size_t(m.head_dim), value);
    skip = std::move(each);
  }
  w.skip = reader.keep(std::move(skip));
  if (m.norm) w.norm = reader.vector(prefix + "norm.weight", m.inner());
  return w;
}

void lower(const Mamba2Mixer& m, const Mamba2Weights& w, LayerContext& layer) {
  const int32_t tokens = layer.rows.tokens;
  // The in-projection's rows: gate, then what the convolution reads (x, B, C), then dt.
  const Acts gate = lower_linear(layer, w.in, w.in_bias, layer.in);
  const Acts dt = gate.from(int64_t(m.inner()) + m.conv_channels());
  SlotState history = layer.state.from(int64_t(state_size(m).recurrent / sizeof(float)));
  const Acts x = lower_conv(layer, w.conv, Activation::Silu, gate.from(m.inner()), history);
  const Acts b = x.from(m.inner()), c = b.from(int64_t(m.groups) * m.state_dim);
  lower_elementwise(layer,
                    {.function = Elementwise::Function::SoftplusStep,
                     .floor = m.dt_min,
                     .ceiling = m.dt_max,
                     .a = w.dt_bias},
                    m.heads, dt);
  const Acts decay = layer.workspace.take(tokens, m.heads);
  layer.program.push_back(Elementwise{.tokens = tokens,
                                      .dim = m.heads,
                                      .function = Elementwise::Function::Scale,
                                      .a = w.decay_a,
                                      .x = dt,
                                      .out = decay});
  const Acts out = layer.workspace.take(tokens, m.inner());
  layer.program.push_back(OuterStep{.rows = layer.rows,
                                    .heads = m.heads,
                                    .key_heads = m.groups,
                                    .value_heads = m.heads,
                                    .query_heads = m.groups,
                                    .key_dim = m.state_dim,
                                    .value_dim = m.head_dim,
                                    .decay = OuterStep::Decay::PerHead,
                                    .log_decay = decay,
                                    .q = c,
                                    .k = b,
                                    .v = x,
                                    .v_scale = dt,
                                    .skip = w.skip,
                                    .out = out,
                                    .state = layer.state});
  layer.program.push_back(
      HeadNorm{.tokens = tokens,
               .groups = m.groups,
               .dim = m.inner() / m.groups,
               .eps = layer.spec.norm_eps,
               .kind = m.norm ? HeadNorm::Kind::Rms : HeadNorm::Kind::None,
               .weight = w.norm,
               .weight_per_group = true,
               .gate = gate,
               .gate_first = !m.norm_before_gate,
               .in = out,
               .out = out});
  lower_residual(layer, w.out, out, w.out_bias);
}

}  // namespace weir
