// DeltaNet, Gated DeltaNet, KDA and Gated DeltaNet-2: their tensors and their ops.
#include <utility>

#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {
namespace {

// How many heads have a decay of their own, and how many numbers that is a token.
struct DecayShape {
  int32_t heads = 0, channels = 0;
};

DecayShape decay_shape(const DeltaMixer& m) {
  switch (m.decay) {
    case DecayGate::None: return {};
    case DecayGate::PerHead: return {m.value_heads, m.value_heads};
    case DecayGate::PerChannel: return {m.value_heads, m.value_heads * m.key_dim};
    case DecayGate::PerKeyChannel: return {m.key_heads, m.key_heads * m.key_dim};
  }
  return {};
}

Decay decay_kind(DecayGate gate) {
  if (gate == DecayGate::None) return Decay::None;
  return gate == DecayGate::PerHead ? Decay::PerHead : Decay::PerChannel;
}

}  // namespace

DeltaWeights bind_weights(const DeltaMixer& m, int32_t dim, const std::string& prefix,
                  WeightReader& reader) {
  const int32_t keys = m.key_heads * m.key_dim, values = m.value_heads * m.value_dim;
  DeltaWeights w;
  w.q = reader.matrix(prefix + "q_proj.weight", keys, dim);
  w.k = reader.matrix(prefix + "k_proj.weight", keys, dim);
  w.v = reader.matrix(prefix + "v_proj.weight", values, dim);
  if (m.conv) {
    const auto conv = [&](const std::string& name, int32_t channels, const float*& weight,
                          const float*& bias) {
      const std::string bias_name = prefix + name + ".bias";
      weight = reader.conv(prefix + name + ".weight", channels, m.conv->width);
      if (reader.has(bias_name)) bias = reader.vector(bias_name, channels);
    };
    conv("q_conv1d", keys, w.conv_q, w.conv_q_bias);
    conv("k_conv1d", keys, w.conv_k, w.conv_k_bias);
    conv("v_conv1d", values, w.conv_v, w.conv_v_bias);
  }
  const DecayShape decay = decay_shape(m);
  if (m.decay == DecayGate::PerHead) {
    w.a = reader.matrix(prefix + "a_proj.weight", decay.channels, dim);
    reader.ignore(prefix + "D");  // in files of 2024-12 to 2025-03; nothing reads it
  } else if (m.decay != DecayGate::None && m.full_rank_decay) {
    w.a = reader.matrix(prefix + "a_proj.weight", decay.channels, dim);
  } else if (m.decay != DecayGate::None) {
    w.f0 = reader.matrix(prefix + "f_proj.0.weight", m.value_dim, dim);
    w.f1 = reader.matrix(prefix + "f_proj.1.weight", decay.channels, m.value_dim);
  }
  if (m.decay != DecayGate::None) {
    w.decay_a = reader.vector_exp(prefix + "A_log", decay.heads);
    w.dt_bias = reader.vector(prefix + "dt_bias", decay.channels);
  }
  if (m.strength == Strength::Beta) {
    w.b = reader.matrix(prefix + "b_proj.weight", m.value_heads, dim);
  } else if (m.strength == Strength::EraseWrite) {
    w.b = reader.matrix(prefix + "b_proj.weight", keys, dim);
    w.w = reader.matrix(prefix + "w_proj.weight", values, dim);
  }
  if (m.output_gate == OutputGate::Silu) {
    w.g = reader.matrix(prefix + "g_proj.weight", values, dim);
  } else if (m.output_gate != OutputGate::None) {
    w.g0 = reader.matrix(prefix + "g_proj.0.weight", m.value_dim, dim);
    w.g1 = reader.matrix(prefix + "g_proj.1.weight", values, m.value_dim);
    w.g1_bias = reader.vector(prefix + "g_proj.1.bias", values);
  }
  w.norm = reader.vector(prefix + "o_norm.weight", m.value_dim);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, values);
  return w;
}

void lower(const DeltaMixer& m, const DeltaWeights& w, LayerContext& layer) {
  Projection in(layer.spec.dim), unnormed(layer.spec.dim);
  Projection& low_rank = m.gates_read_residual ? unnormed : in;
  // A backend that makes rows in turn has first what others wait for first, and the gate, which the
  // mixer's answers meet, last.
  const Projection::Part f0 = low_rank.add(w.f0), g0 = low_rank.add(w.g0);
  const Projection::Part q = in.add(w.q), k = in.add(w.k), v = in.add(w.v);
  const Projection::Part a = in.add(w.a), b = in.add(w.b), write = in.add(w.w);
  const Projection::Part g = in.add(w.g);
  const Acts projected = in.lower(layer, layer.in);
  const Acts low = m.gates_read_residual ? unnormed.lower(layer, layer.raw) : projected;

  const DecayShape decay = decay_shape(m);
  DeltaMix mix{.rows = layer.rows,
               .key_heads = m.key_heads,
               .value_heads = m.value_heads,
               .key_dim = m.key_dim,
               .value_dim = m.value_dim,
               .q = q.of(projected),
               .k = k.of(projected),
               .v = v.of(projected),
               .conv_width = m.conv ? m.conv->width : 0,
               .conv_q = w.conv_q,
               .conv_k = w.conv_k,
               .conv_v = w.conv_v,
               .conv_q_bias = w.conv_q_bias,
               .conv_k_bias = w.conv_k_bias,
               .conv_v_bias = w.conv_v_bias,
               .qk_activation = m.qk_activation,
               .qk_norm = m.qk_norm,
               .decay = decay_kind(m.decay),
               .decay_heads = decay.heads,
               .decay_in = a.of(projected),
               .decay_a = w.decay_a,
               .dt_bias = w.dt_bias,
               .lower_bound = m.lower_bound,
               .beta_scale = m.negative_eigenvalues ? 2.0f : 1.0f,
               .erases = m.strength != Strength::Additive,
               .norm_weight = w.norm,
               .norm_eps = layer.spec.norm_eps,
               .gate = g.of(projected),
               .gate_activation = m.output_gate == OutputGate::LowRankSigmoid ? Activation::Sigmoid
                                                                              : Activation::Silu,
               .state = layer.state,
               .history = layer.state.from(int64_t(state_size(m).recurrent / sizeof(float))),
               .pending = layer.pending};
  if (w.f0) mix.decay_in = lower_linear(layer, w.f1, nullptr, f0.of(low));
  if (w.g0) mix.gate = lower_linear(layer, w.g1, w.g1_bias, g0.of(low));
  if (m.strength == Strength::Beta) {
    mix.beta = b.of(projected);
  } else if (m.strength == Strength::EraseWrite) {
    mix.erase = b.of(projected);
    mix.write = write.of(projected);
  }
  lower_value_route(m, layer, mix);
  mix.out = layer.workspace.take(layer.rows.tokens, int64_t(m.value_heads) * m.value_dim);
  mix.read_once = true;
  layer.program.push_back(mix);
  lower_residual(layer, w.o, mix.out);
}

}  // namespace weir
