// Cross-layer routing: what lower layers' write residuals do to a layer's values, and what a layer
// adds to the residual stream after its MLP.
#include <algorithm>
#include <utility>

#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {
namespace {

int32_t values_of(const DeltaMixer& m) { return m.value_heads * m.value_dim; }

// Numbers for each channel, of a tensor that has one for all, one a head or one a channel.
const float* bind_gamma(const ErrorRoute& route, const DeltaMixer& m, const std::string& name,
                        WeightReader& reader) {
  std::vector<int64_t> shape = {1};
  if (route.gamma == ErrorRoute::Gamma::PerHead) shape = {m.value_heads};
  if (route.gamma == ErrorRoute::Gamma::PerChannel) shape = {m.value_heads, m.value_dim};
  const std::vector<float> stored = reader.numbers(name, shape);
  if (stored.empty()) return nullptr;
  std::vector<float> gamma(size_t(values_of(m)));
  const size_t each = gamma.size() / stored.size();
  for (size_t i = 0; i < gamma.size(); ++i) gamma[i] = stored[i / each];
  return reader.keep(std::move(gamma));
}

void bind_error_route(const ErrorRoute& route, const DeltaMixer& m, const std::string& prefix,
                      WeightReader& reader, RouteWeights& w) {
  if (route.sources == 0) {  // files have them in the first layer too, where nothing arrives
    for (const char* name : {"cler_gamma", "cler_gate.weight", "cler_gate.bias", "cler_query",
                             "cler_self_bias", "cler_self_gate.weight", "cler_self_gate.bias"}) {
      reader.ignore(prefix + name);
    }
    return;
  }
  const bool attends = route.mode == ErrorRoute::Mode::Attend;
  if (attends || route.mode == ErrorRoute::Mode::Softmax) {
    w.query = reader.table(prefix + "cler_query", m.value_heads, m.value_dim);
  }
  if (route.gamma == ErrorRoute::Gamma::FromValues) {
    const std::string gate = prefix + (attends ? "cler_self_gate." : "cler_gate.");
    w.gate_weight = reader.table(gate + "weight", 1, m.value_dim);
    w.gate_bias = reader.vector(gate + "bias", 1);
  } else if (attends) {
    w.self_bias = reader.vector(prefix + "cler_self_bias", m.value_heads);
  } else {
    w.gamma = bind_gamma(route, m, prefix + "cler_gamma", reader);
  }
}

void bind_hidden_route(const HiddenRoute& route, const DeltaMixer& m, int32_t dim,
                       const std::string& prefix, WeightReader& reader, RouteWeights& w) {
  using Signal = HiddenRoute::Signal;
  int32_t in = values_of(m);
  if (route.signal == Signal::Both) in *= 2;
  if (route.signal == Signal::Self) in = dim;
  const std::string name = prefix + "route_proj.";
  if (route.rank > 0) {
    w.down = reader.matrix(name + "0.weight", route.rank, in);
    w.proj = reader.matrix(name + "1.weight", dim, route.rank);
  } else {
    w.proj = reader.matrix(name + "weight", dim, in);
  }
  if (route.signal == Signal::GatedValue) w.signal_gate = reader.vector(prefix + "route_gate", 2);
  if (route.normalize) w.ones = reader.keep(std::vector<float>(size_t(in), 1.0f));
}

// One number a token and head, from the values.
Acts lower_gate(const DeltaMixer& m, LayerContext& layer, Activation activation, Acts values) {
  const Acts gate = layer.workspace.take(layer.rows.tokens, m.value_heads);
  layer.program.push_back(HeadDot{.tokens = layer.rows.tokens,
                                  .heads = m.value_heads,
                                  .dim = m.value_dim,
                                  .weight = layer.route_weights.gate_weight,
                                  .bias = layer.route_weights.gate_bias,
                                  .activation = activation,
                                  .x = values,
                                  .out = gate});
  return gate;
}

// A mix of the first `count` emitted residuals, in new workspace.
Acts lower_mix(const DeltaMixer& m, LayerContext& layer, int32_t count, Acts last_bias) {
  const Acts mixed = layer.workspace.take(layer.rows.tokens, values_of(m));
  layer.program.push_back(DepthAttention{.tokens = layer.rows.tokens,
                                         .groups = m.value_heads,
                                         .dim = m.value_dim,
                                         .eps = layer.route.error->eps,
                                         .query = layer.route_weights.query,
                                         .count = count,
                                         .sources = layer.lanes.emitted,
                                         .source_stride = values_of(m),
                                         .last_bias = last_bias,
                                         .out = mixed});
  return mixed;
}

// The values are the last source of the mix, where this layer's residual will be.
Acts lower_attended_values(const DeltaMixer& m, LayerContext& layer, Acts values) {
  const ErrorRoute& route = *layer.route.error;
  if (route.gamma == ErrorRoute::Gamma::FromValues) {
    const Acts bias = lower_gate(m, layer, Activation::None, values);
    return lower_mix(m, layer, route.sources + 1, bias);
  }
  // Nothing writes to what an op takes as its bias.
  const Acts bias{const_cast<float*>(layer.route_weights.self_bias), 0};
  return lower_mix(m, layer, route.sources + 1, bias);
}

// v += gamma r, in place, and the same for the layer's answer.
void lower_injection(const DeltaMixer& m, LayerContext& layer, Acts values, DeltaMix& mix) {
  const ErrorRoute& route = *layer.route.error;
  ValueRoute op{.tokens = layer.rows.tokens,
                .heads = m.value_heads,
                .dim = m.value_dim,
                .count = route.mode == ErrorRoute::Mode::Mean ? route.sources : 1,
                .sources = layer.lanes.emitted,
                .source_stride = values_of(m),
                .normalize = route.normalize,
                .eps = route.eps,
                .gamma = layer.route_weights.gamma};
  if (route.mode == ErrorRoute::Mode::Softmax) op.sources = lower_mix(m, layer, route.sources, {});
  if (route.gamma == ErrorRoute::Gamma::FromValues) {
    op.gate = lower_gate(m, layer, Activation::Sigmoid, values);
  }
  if (route.to_values) op.v = op.value = values;
  if (route.to_answers) {
    op.answer = mix.answer_add = layer.workspace.take(layer.rows.tokens, values_of(m));
  }
  layer.program.push_back(op);
}

// The values by themselves. Their history lies behind that of queries and keys.
void lower_values(const DeltaMixer& m, LayerContext& layer, Acts values, DeltaMix& mix) {
  const int64_t before = int64_t(mix.conv_width - 1) * 2 * m.key_heads * m.key_dim;
  layer.program.push_back(Conv1d{.rows = layer.rows,
                                 .channels = values_of(m),
                                 .width = mix.conv_width,
                                 .taps = mix.conv_v,
                                 .bias = mix.conv_v_bias,
                                 .activation = Activation::Silu,
                                 .in = mix.v,
                                 .out = values,
                                 .history = mix.history.from(before)});
  mix.v = values;
  mix.values_ready = true;
}

}  // namespace

RouteWeights bind_route(const LayerSpec& layer, int32_t dim, const std::string& prefix,
                        WeightReader& reader) {
  RouteWeights w;
  const auto* mixer = std::get_if<DeltaMixer>(&layer.mixer);
  if (mixer == nullptr) return w;
  if (layer.route.error) {
    bind_error_route(*layer.route.error, *mixer, prefix + "attn.", reader, w);
  }
  if (layer.route.hidden) {
    bind_hidden_route(*layer.route.hidden, *mixer, dim, prefix, reader, w);
  }
  return w;
}

Lanes make_lanes(const ModelSpec& spec, int32_t tokens, Workspace& workspace) {
  int64_t residuals = 0, values = 0;
  for (const LayerSpec& layer : spec.layers) {
    if (!layer.route.error) continue;
    const bool keeps = layer.route.error->mode != ErrorRoute::Mode::Latest;
    residuals = keeps ? residuals + 1 : 1;
    values = values_of(std::get<DeltaMixer>(layer.mixer));
  }
  Lanes lanes;
  if (residuals > 0) lanes.emitted = workspace.take(tokens, residuals * values);
  if (const auto* rwkv7 = std::get_if<Rwkv7Mixer>(&spec.layers.front().mixer)) {
    lanes.first_values = workspace.take(tokens, int64_t(rwkv7->heads) * rwkv7->value_dim);
  }
  return lanes;
}

void take_lanes(const LayerSpec& spec, LayerContext& layer) {
  const auto& hidden = spec.route.hidden;
  if (!hidden) return;
  const int32_t values = values_of(std::get<DeltaMixer>(spec.mixer));
  const int32_t tokens = layer.rows.tokens;
  if (hidden->reads_values()) layer.lanes.values = layer.workspace.take(tokens, values);
  if (hidden->reads_errors()) layer.lanes.errors = layer.workspace.take(tokens, values);
}

void lower_value_route(const DeltaMixer& m, LayerContext& layer, DeltaMix& mix) {
  const std::optional<ErrorRoute>& error = layer.route.error;
  const std::optional<HiddenRoute>& hidden = layer.route.hidden;
  if (hidden && hidden->reads_values()) lower_values(m, layer, layer.lanes.values, mix);
  if (hidden && hidden->reads_errors()) {
    mix.emits = true;
    mix.emitted = layer.lanes.errors;
  }
  if (!error) return;
  const bool keeps = error->mode != ErrorRoute::Mode::Latest;
  const int64_t before = keeps ? error->sources : 0;
  const Acts emitted = layer.lanes.emitted.from(before * values_of(m));
  if (error->sources > 0) {
    const bool attends = error->mode == ErrorRoute::Mode::Attend;
    Acts values;
    if (error->to_values || error->gamma == ErrorRoute::Gamma::FromValues) {
      values = attends ? emitted : layer.workspace.take(layer.rows.tokens, values_of(m));
      lower_values(m, layer, values, mix);
    }
    if (attends) {
      mix.v = lower_attended_values(m, layer, values);
    } else {
      lower_injection(m, layer, values, mix);
    }
  }
  mix.emits = true;
  mix.emitted = emitted;
}

void lower_hidden_route(const LayerSpec& spec, LayerContext& layer) {
  if (!spec.route.hidden) return;
  using Signal = HiddenRoute::Signal;
  const HiddenRoute& route = *spec.route.hidden;
  const RouteWeights& w = layer.route_weights;
  const auto& m = std::get<DeltaMixer>(spec.mixer);
  const int32_t tokens = layer.rows.tokens;
  Acts x = route.signal == Signal::Error ? layer.lanes.errors : layer.lanes.values;
  if (route.signal == Signal::GatedValue || route.signal == Signal::Both) {
    const bool both = route.signal == Signal::Both;
    x = layer.workspace.take(tokens, (both ? 2 : 1) * values_of(m));
    layer.program.push_back(RouteSignal{
        .tokens = tokens,
        .heads = m.value_heads,
        .dim = m.value_dim,
        .kind = both ? RouteSignal::Kind::Both : RouteSignal::Kind::GatedValue,
        .gate = w.signal_gate,
        .v = layer.lanes.values,
        .u = layer.lanes.errors,
        .out = x});
  } else if (route.signal == Signal::Self) {  // a copy: the stream changes while it is read
    x = layer.workspace.take(tokens, layer.spec.dim);
    layer.program.push_back(Elementwise{
        .tokens = tokens, .dim = layer.spec.dim, .x = layer.residual, .out = x});
  }
  if (route.normalize) {
    constexpr float kEps = 1e-6f;  // not the model's
    layer.program.push_back(RmsNorm{.tokens = tokens,
                                    .dim = (w.down ? w.down : w.proj).cols,
                                    .eps = kEps,
                                    .weight = w.ones,
                                    .in = x,
                                    .out = x});
  }
  if (w.down) x = lower_linear(layer, w.down, nullptr, x);
  layer.replaces = false;  // it adds to what the MLP has written
  lower_residual(layer, w.proj, x);
}

}  // namespace weir
