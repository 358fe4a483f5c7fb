// Gated DeltaProduct and Comba, whose heads run as EraseStep: their tensors and their ops.
#include <cmath>
#include <utility>

#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {
namespace {

constexpr float kL2Eps = 1e-6f;  // under the root, as everywhere in fla

// Sizes that both have; Comba updates its state once a token.
struct Sizes {
  int32_t heads = 0, key_dim = 0, value_dim = 0, updates = 1;

  int32_t queries() const { return heads * key_dim; }
  int32_t keys() const { return updates * queries(); }
  int32_t values() const { return updates * answers(); }
  int32_t answers() const { return heads * value_dim; }
};
Sizes sizes_of(const DeltaProductMixer& m) { return {m.heads, m.key_dim, m.value_dim, m.updates}; }
Sizes sizes_of(const CombaMixer& m) { return {m.heads, m.key_dim, m.value_dim}; }

template <class M>
EraseWeights bind_common(const M& m, bool decay, int32_t dim, const std::string& prefix,
                         WeightReader& reader) {
  const Sizes s = sizes_of(m);
  EraseWeights w;
  w.q = reader.matrix(prefix + "q_proj.weight", s.queries(), dim);
  w.k = reader.matrix(prefix + "k_proj.weight", s.keys(), dim);
  w.v = reader.matrix(prefix + "v_proj.weight", s.values(), dim);
  w.b = reader.matrix(prefix + "b_proj.weight", s.updates * s.heads, dim);
  if (m.conv) {
    w.conv_q = reader.convolution(prefix + "q_conv1d", s.queries(), m.conv->width);
    w.conv_k = reader.convolution(prefix + "k_conv1d", s.keys(), m.conv->width);
    w.conv_v = reader.convolution(prefix + "v_conv1d", s.values(), m.conv->width);
  }
  if (decay) {
    w.a = reader.matrix(prefix + "a_proj.weight", s.heads, dim);
    w.decay_a = reader.vector_exp(prefix + "A_log", s.heads);
    w.dt_bias = reader.vector(prefix + "dt_bias", s.heads);
  }
  if (m.output_gate) w.g = reader.matrix(prefix + "g_proj.weight", s.answers(), dim);
  w.norm = reader.vector(prefix + "o_norm.weight", s.value_dim);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, s.answers());
  return w;
}

// Everything that a layer projects, convolved and activated.
struct Inputs {
  Acts q, k, v, log_decay, beta, gate;
};

template <class M>
Inputs lower_inputs(const M& m, const EraseWeights& w, LayerContext& layer) {
  const Sizes s = sizes_of(m);
  Projection in(layer.spec.dim);
  const Projection::Part q = in.add(w.q), k = in.add(w.k), v = in.add(w.v);
  const Projection::Part a = in.add(w.a), b = in.add(w.b), g = in.add(w.g);
  const Acts projected = in.lower(layer, layer.in);
  SlotState history = layer.state.from(int64_t(state_size(m).recurrent / sizeof(float)));
  Inputs x{.log_decay = a.of(projected), .beta = b.of(projected), .gate = g.of(projected)};
  x.q = lower_conv_or_activation(layer, w.conv_q, s.queries(), q.of(projected), history);
  x.k = lower_conv_or_activation(layer, w.conv_k, s.keys(), k.of(projected), history);
  x.v = lower_conv_or_activation(layer, w.conv_v, s.values(), v.of(projected), history);
  if (w.a) {
    lower_elementwise(layer,
                      {.function = Elementwise::Function::SoftplusDecay,
                       .a = w.decay_a,
                       .b = w.dt_bias},
                      s.heads, x.log_decay);
  }
  return x;
}

// x / |x| for each run of `dim` numbers, in place.
void lower_unit(LayerContext& layer, int32_t groups, int32_t dim, Acts x) {
  layer.program.push_back(HeadNorm{.tokens = layer.rows.tokens,
                                   .groups = groups,
                                   .dim = dim,
                                   .eps = kL2Eps,
                                   .kind = HeadNorm::Kind::L2,
                                   .in = x,
                                   .out = x});
}

EraseStep step_of(const Sizes& s, const EraseWeights& w, const Inputs& x, LayerContext& layer) {
  return {.rows = layer.rows,
          .heads = s.heads,
          .key_dim = s.key_dim,
          .value_dim = s.value_dim,
          .updates = s.updates,
          .decay = w.a ? Decay::PerHead : Decay::None,
          .scale = 1 / std::sqrt(float(s.key_dim)),
          .q = x.q,
          .k = x.k,
          .v = x.v,
          .log_decay = x.log_decay,
          .beta = x.beta,
          .out = layer.workspace.take(layer.rows.tokens, s.answers()),
          .state = layer.state};
}

void lower_output(const Sizes& s, const EraseWeights& w, Activation gate_activation, Acts gate,
                  Acts out, LayerContext& layer) {
  layer.program.push_back(HeadNorm{.tokens = layer.rows.tokens,
                                   .groups = s.heads,
                                   .dim = s.value_dim,
                                   .eps = layer.spec.norm_eps,
                                   .weight = w.norm,
                                   .gate = gate,
                                   .gate_activation = gate_activation,
                                   .in = out,
                                   .out = out});
  lower_residual(layer, w.o, out);
}

}  // namespace

EraseWeights bind_weights(const DeltaProductMixer& m, int32_t dim, const std::string& prefix,
                          WeightReader& reader) {
  return bind_common(m, m.decay, dim, prefix, reader);
}

void lower(const DeltaProductMixer& m, const EraseWeights& w, LayerContext& layer) {
  const Sizes s = sizes_of(m);
  const Inputs x = lower_inputs(m, w, layer);
  lower_unit(layer, s.heads, s.key_dim, x.q);
  lower_unit(layer, s.updates * s.heads, s.key_dim, x.k);
  EraseStep step = step_of(s, w, x, layer);
  step.beta_scale = m.negative_eigenvalues ? 2 : 1;
  layer.program.push_back(step);
  lower_output(s, w, Activation::Silu, x.gate, step.out, layer);
}

EraseWeights bind_weights(const CombaMixer& m, int32_t dim, const std::string& prefix,
                          WeightReader& reader) {
  EraseWeights w = bind_common(m, true, dim, prefix, reader);
  const auto per_channel = [&](const std::string& name, const auto& function) {
    std::vector<float> channels;
    for (const float value : reader.numbers(prefix + name, {m.heads})) {
      channels.insert(channels.end(), size_t(m.key_dim), float(function(double(value))));
    }
    return reader.keep(std::move(channels));
  };
  w.inner_decay = per_channel("decay", [](double x) { return 1 / (1 + std::exp(-x)); });
  w.correction = per_channel("D", [](double x) { return -x; });
  return w;
}

void lower(const CombaMixer& m, const EraseWeights& w, LayerContext& layer) {
  const Sizes s = sizes_of(m);
  const int32_t tokens = layer.rows.tokens;
  const Inputs x = lower_inputs(m, w, layer);
  const Acts p = layer.workspace.take(tokens, s.keys());  // k * sigmoid(decay)
  layer.program.push_back(Elementwise{.tokens = tokens,
                                      .dim = s.keys(),
                                      .function = Elementwise::Function::Scale,
                                      .a = w.inner_decay,
                                      .x = x.k,
                                      .out = p});
  lower_elementwise(  // q - D p, before anything is normalised
      layer,
      {.function = Elementwise::Function::AddScaled, .a = w.correction, .y = p},
      s.queries(), x.q);
  for (const Acts& one : {x.q, x.k, p}) lower_unit(layer, s.heads, s.key_dim, one);
  EraseStep step = step_of(s, w, x, layer);
  step.decayed_read = false;
  step.p = p;
  layer.program.push_back(step);
  lower_output(s, w, Activation::Sigmoid, x.gate, step.out, layer);
}

}  // namespace weir
