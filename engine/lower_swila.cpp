// Switching Linear Attention: its tensors and its ops.
#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {
namespace {

LowRank bind_low_rank(const std::string& name, int32_t inner, int32_t rows, int32_t dim,
                      WeightReader& reader) {
  return {reader.matrix(name + ".0.weight", inner, dim),
          reader.matrix(name + ".1.weight", rows, inner)};
}

}  // namespace

SwilaWeights bind_weights(const SwilaMixer& m, int32_t dim, const std::string& prefix,
                          WeightReader& reader) {
  const int32_t channels = m.heads * m.head_dim, mixed = channels * m.mixtures;
  SwilaWeights w;
  w.q = reader.matrix(prefix + "q_proj.weight", channels, dim);
  w.k = reader.matrix(prefix + "k_proj.weight", channels, dim);
  w.v = reader.matrix(prefix + "v_proj.weight", channels, dim);
  w.conv_q = reader.conv(prefix + "q_conv1d.weight", channels, m.conv.width);
  w.conv_k = reader.conv(prefix + "k_conv1d.weight", channels, m.conv.width);
  w.conv_v = reader.conv(prefix + "v_conv1d.weight", channels, m.conv.width);
  w.key_router = bind_low_rank(prefix + "k_router", m.router_rank, mixed, dim, reader);
  w.query_router = bind_low_rank(prefix + "q_router", m.router_rank, mixed, dim, reader);
  w.beta = bind_low_rank(prefix + "b_proj", m.beta_rank, mixed, dim, reader);
  if (m.temporal) {
    w.key_mix = reader.matrix(prefix + "gk_proj.weight", channels, dim);
    w.query_mix = reader.matrix(prefix + "gq_proj.weight", channels, dim);
    w.key_mix_bias = reader.vector(prefix + "gk_proj.bias", channels);
    w.query_mix_bias = reader.vector(prefix + "gq_proj.bias", channels);
  }
  if (m.gated) {
    w.decay = bind_low_rank(prefix + "f_proj", m.gate_rank, mixed, dim, reader);
    w.decay_a = reader.vector_exp(prefix + "A_log", m.heads * m.mixtures);
    w.dt_bias = reader.vector(prefix + "dt_bias", mixed);
  }
  w.norm = reader.vector(prefix + "o_norm.weight", m.head_dim);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, channels);
  return w;
}

void lower(const SwilaMixer& m, const SwilaWeights& w, LayerContext& layer) {
  Projection in(layer.spec.dim);
  // A backend that makes rows in turn has first what other projections wait for.
  const Projection::Part key_router = in.add(w.key_router.down);
  const Projection::Part query_router = in.add(w.query_router.down);
  const Projection::Part beta = in.add(w.beta.down), decay = in.add(w.decay.down);
  const Projection::Part q = in.add(w.q), k = in.add(w.k), v = in.add(w.v);
  const Projection::Part key_mix = in.add(w.key_mix, w.key_mix_bias);
  const Projection::Part query_mix = in.add(w.query_mix, w.query_mix_bias);
  const Acts projected = in.lower(layer, layer.in);
  const auto up = [&](const LowRank& map, const Projection::Part& part) {
    return lower_linear(layer, map.up, nullptr, part.of(projected));
  };

  const int64_t floats = int64_t(m.heads) * m.mixtures * m.head_dim;
  const int64_t matrices = floats * m.head_dim, priors = m.temporal ? floats : 0;
  SwilaMix mix{.rows = layer.rows,
               .heads = m.heads,
               .mixtures = m.mixtures,
               .dim = m.head_dim,
               .q = q.of(projected),
               .k = k.of(projected),
               .v = v.of(projected),
               .conv_width = m.conv.width,
               .conv_q = w.conv_q,
               .conv_k = w.conv_k,
               .conv_v = w.conv_v,
               .key_router = up(w.key_router, key_router),
               .query_router = up(w.query_router, query_router),
               .beta = up(w.beta, beta),
               .key_mix = key_mix.of(projected),
               .query_mix = query_mix.of(projected),
               .gated = m.gated,
               .decay_a = w.decay_a,
               .dt_bias = w.dt_bias,
               .norm_weight = w.norm,
               .norm_eps = layer.spec.norm_eps,
               .state = layer.state,
               .posterior = layer.state.from(matrices),
               .prior = layer.state.from(matrices + priors),
               .history = layer.state.from(matrices + 2 * priors),
               .pending = layer.pending};
  if (m.gated) mix.decay_in = up(w.decay, decay);
  mix.out = layer.workspace.take(layer.rows.tokens, int64_t(m.heads) * m.head_dim);
  layer.program.push_back(mix);
  lower_residual(layer, w.o, mix.out);
}

}  // namespace weir
