// Additive linear attention: its tensors and its ops.
#include <cmath>

#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {
namespace {

FeatureWeights bind_feature(const LinearMixer& m, const std::string& prefix, WeightReader& reader) {
  const auto map = [&](const std::string& name, const float*& weight, const float*& bias) {
    weight = reader.table(name + ".weight", m.key_dim, m.key_dim);
    bias = reader.vector(name + ".bias", m.key_dim);
  };
  FeatureWeights w;
  switch (m.feature) {
    case LinearFeature::ElementwiseProduct:
      map(prefix + "layer1", w.weight, w.bias);
      map(prefix + "layer2", w.weight2, w.bias2);
      break;
    case LinearFeature::Hedgehog: map(prefix + "layer", w.weight, w.bias); break;
    case LinearFeature::T2r:
      w.weight = reader.table(prefix + "layer.weight", m.key_dim, m.key_dim);
      break;
    case LinearFeature::EluPlusOne:
    case LinearFeature::Relu:
    case LinearFeature::Identity:
    case LinearFeature::Dpfp: break;
  }
  return w;
}

// A tied map is one module under two names, of which a file may hold either, or both.
void bind_features(const LinearMixer& m, const std::string& prefix, WeightReader& reader,
                   LinearMixerWeights& w) {
  const std::string q = prefix + "feature_map_q.", k = prefix + "feature_map_k.";
  const char* first = m.feature == LinearFeature::ElementwiseProduct ? "layer1.weight"
                                                                     : "layer.weight";
  if (!m.tied_feature || reader.has(q + first)) w.feature_q = bind_feature(m, q, reader);
  if (!m.tied_feature || reader.has(k + first) || !reader.has(q + first)) {
    w.feature_k = bind_feature(m, k, reader);
  }
  if (!m.tied_feature) return;
  if (!w.feature_q.weight) w.feature_q = w.feature_k;
  w.feature_k = w.feature_q;
}

FeatureMap::Kind kind_of(LinearFeature feature) {
  switch (feature) {
    case LinearFeature::ElementwiseProduct: return FeatureMap::Kind::RowProduct;
    case LinearFeature::Hedgehog: return FeatureMap::Kind::SoftmaxPair;
    case LinearFeature::T2r: return FeatureMap::Kind::RowLinear;
    case LinearFeature::Dpfp: return FeatureMap::Kind::Dpfp;
    case LinearFeature::EluPlusOne:
    case LinearFeature::Relu:
    case LinearFeature::Identity: break;
  }
  return FeatureMap::Kind::Copy;
}

Activation activation_of(LinearFeature feature) {
  if (feature == LinearFeature::EluPlusOne) return Activation::EluPlusOne;
  const bool relu = feature == LinearFeature::T2r || feature == LinearFeature::Relu;
  return relu ? Activation::Relu : Activation::None;
}

}  // namespace

LinearMixerWeights bind_weights(const LinearMixer& m, int32_t dim, const std::string& prefix,
                                WeightReader& reader) {
  LinearMixerWeights w;
  w.q = reader.matrix(prefix + "q_proj.weight", m.heads * m.key_dim, dim);
  w.k = reader.matrix(prefix + "k_proj.weight", m.kv_heads * m.key_dim, dim);
  w.v = reader.matrix(prefix + "v_proj.weight", m.kv_heads * m.value_dim, dim);
  bind_features(m, prefix, reader, w);
  w.norm = reader.vector(prefix + "norm.weight", m.value_dim);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, m.heads * m.value_dim);
  return w;
}

void lower(const LinearMixer& m, const LinearMixerWeights& w, LayerContext& layer) {
  Projection in(layer.spec.dim);
  const Projection::Part q_part = in.add(w.q), k_part = in.add(w.k), v = in.add(w.v);
  const Acts projected = in.lower(layer, layer.in);
  const auto feature = [&](Acts x, int32_t heads, const FeatureWeights& weights, bool normalise) {
    const Acts out = layer.workspace.take(layer.rows.tokens, int64_t(heads) * m.feature_dim());
    layer.program.push_back(FeatureMap{.tokens = layer.rows.tokens,
                                       .heads = heads,
                                       .dim = m.key_dim,
                                       .kind = kind_of(m.feature),
                                       .activation = activation_of(m.feature),
                                       .normalise = normalise,
                                       .weight = weights.weight,
                                       .bias = weights.bias,
                                       .weight2 = weights.weight2,
                                       .bias2 = weights.bias2,
                                       .in = x,
                                       .out = out});
    return out;
  };
  const Acts q = feature(q_part.of(projected), m.heads, w.feature_q, m.norm_q);
  const Acts k = feature(k_part.of(projected), m.kv_heads, w.feature_k, m.norm_k);
  const Acts out = layer.workspace.take(layer.rows.tokens, int64_t(m.heads) * m.value_dim);
  const int64_t matrices = int64_t(m.kv_heads) * m.feature_dim() * m.value_dim;
  layer.program.push_back(OuterStep{.rows = layer.rows,
                                    .heads = m.kv_heads,
                                    .key_heads = m.kv_heads,
                                    .value_heads = m.kv_heads,
                                    .query_heads = m.heads,
                                    .key_dim = m.feature_dim(),
                                    .value_dim = m.value_dim,
                                    .scale = 1 / std::sqrt(float(m.feature_dim())),
                                    .normalise = m.normalise,
                                    .q = q,
                                    .k = k,
                                    .v = v.of(projected),
                                    .out = out,
                                    .state = layer.state,
                                    .sums = layer.state.from(matrices)});
  layer.program.push_back(HeadNorm{.tokens = layer.rows.tokens,
                                   .groups = m.heads,
                                   .dim = m.value_dim,
                                   .eps = layer.spec.norm_eps,
                                   .weight = w.norm,
                                   .in = out,
                                   .out = out});
  lower_residual(layer, w.o, out);
}

}  // namespace weir
