#include "engine/spec.h"

#include "kernels/pending.h"

namespace weir {
namespace {

constexpr size_t kFloat = sizeof(float);

StateSize size_of(const DeltaMixer& m) {
  const size_t channels = 2 * size_t(m.key_heads) * m.key_dim + size_t(m.value_heads) * m.value_dim;
  return {.recurrent = size_t(m.value_heads) * m.value_dim * m.key_dim * kFloat,
          .conv = m.conv ? channels * size_t(m.conv->width - 1) * kFloat : 0};
}

StateSize size_of(const AttentionMixer& m) {
  const size_t gates = m.forget_gate ? 2 * size_t(m.heads) * kFloat : 0;
  const size_t per_token = 2 * size_t(m.kv_heads) * m.head_dim * kFloat + gates;
  if (m.window > 0) return {.ring = per_token * size_t(m.window)};
  return {.kv_per_token = per_token};
}

StateSize size_of(const SwilaMixer& m) {
  const size_t channels = size_t(m.heads) * m.head_dim;
  const size_t mixed = channels * m.mixtures;
  return {.recurrent = (mixed * m.head_dim + (m.temporal ? 2 * mixed : 0)) * kFloat,
          .conv = 3 * channels * size_t(m.conv.width - 1) * kFloat};
}

size_t history_bytes(const std::optional<ShortConv>& conv, size_t channels) {
  return conv ? channels * size_t(conv->width - 1) * kFloat : 0;
}

StateSize size_of(const GlaMixer& m) {
  const size_t queries = size_t(m.heads) * m.key_dim, keys = size_t(m.kv_heads) * m.key_dim;
  return {.recurrent = keys * m.value_dim * kFloat,
          .conv = history_bytes(m.conv, queries + keys + size_t(m.kv_heads) * m.value_dim)};
}

StateSize size_of(const RetNetMixer& m) {
  return {.recurrent = size_t(m.heads) * m.key_dim * m.value_dim * kFloat};
}

StateSize size_of(const Hgrn2Mixer& m) {
  const size_t keys = size_t(m.heads) * m.head_dim;
  return {.recurrent = keys * m.value_dim * kFloat,
          .conv = history_bytes(m.conv, 2 * keys + size_t(m.heads) * m.value_dim)};
}

StateSize size_of(const LinearMixer& m) {
  const size_t keys = size_t(m.kv_heads) * m.feature_dim();
  return {.recurrent = (keys * m.value_dim + (m.normalise ? keys : 0)) * kFloat};
}

StateSize size_of(const GsaMixer& m) {
  const auto kv_heads = size_t(m.kv_heads);
  const size_t channels = size_t(m.heads) * m.key_dim + kv_heads * (m.key_dim + m.value_dim);
  return {.recurrent = kv_heads * m.slots * size_t(m.key_dim + m.value_dim) * kFloat,
          .conv = history_bytes(m.conv, channels)};
}

StateSize size_of(const Mamba2Mixer& m) {
  return {.recurrent = size_t(m.inner()) * m.state_dim * kFloat,
          .conv = history_bytes(m.conv, size_t(m.conv_channels()))};
}

StateSize size_of(const DeltaProductMixer& m) {
  const size_t keys = size_t(m.heads) * m.key_dim, values = size_t(m.heads) * m.value_dim;
  return {.recurrent = keys * m.value_dim * kFloat,
          .conv = history_bytes(m.conv, keys + m.updates * (keys + values))};
}

StateSize size_of(const CombaMixer& m) {
  const size_t keys = size_t(m.heads) * m.key_dim, values = size_t(m.heads) * m.value_dim;
  return {.recurrent = keys * m.value_dim * kFloat,
          .conv = history_bytes(m.conv, 2 * keys + values)};
}

StateSize size_of(const Rwkv7Mixer& m) {
  const size_t keys = size_t(m.heads) * m.key_dim;
  return {.recurrent = keys * m.value_dim * kFloat, .conv = keys * kFloat};  // dim is keys
}

// Besides each state, how many tokens it has had: one that had none begins at zero.
StateSize size_of(const MomMixer& m) {
  const size_t state = size_t(m.heads) * m.key_dim * m.value_dim;
  return {.recurrent = (size_t(m.states()) * state + size_t(m.memories)) * kFloat,
          .conv = size_t(m.states()) * history_bytes(m.conv, size_t(m.conv_channels()))};
}

size_t waiting_of(int32_t heads, const PendingLayout& layout) {
  return size_t(heads) * size_t(layout.floats()) * kFloat;
}
size_t waiting_of(const DeltaMixer& m) {
  return waiting_of(m.value_heads, {.values = m.value_dim, .key_dim = m.key_dim});
}
size_t waiting_of(const SwilaMixer& m) {
  return waiting_of(m.heads, {.values = m.mixtures * m.head_dim,
                              .key_dim = m.head_dim,
                              .groups = m.gated ? m.mixtures : 1});
}
template <typename Mixer>
size_t waiting_of(const Mixer&) {
  return 0;
}

}  // namespace

int32_t LinearMixer::feature_dim() const {
  if (feature == LinearFeature::Hedgehog) return 2 * key_dim;
  return feature == LinearFeature::Dpfp ? 8 * key_dim : key_dim;
}

StateSize& StateSize::operator+=(const StateSize& other) {
  recurrent += other.recurrent;
  conv += other.conv;
  ring += other.ring;
  kv_per_token += other.kv_per_token;
  return *this;
}

StateSize state_size(const Mixer& mixer) {
  return std::visit([](const auto& m) { return size_of(m); }, mixer);
}

StateSize state_size(const LayerSpec& layer, int32_t dim) {
  StateSize size = state_size(layer.mixer);
  const bool shifted = layer.mlp && layer.mlp->kind == Mlp::Kind::ShiftedSquare;
  if (shifted) size.conv += size_t(dim) * kFloat;
  return size;
}

StateSize state_size(const ModelSpec& spec) {
  StateSize sum;
  for (const LayerSpec& layer : spec.layers) sum += state_size(layer, spec.dim);
  return sum;
}

size_t waiting_bytes(const LayerSpec& layer) {
  return std::visit([](const auto& m) { return waiting_of(m); }, layer.mixer);
}

size_t waiting_bytes(const ModelSpec& spec) {
  size_t sum = 0;
  for (const LayerSpec& layer : spec.layers) sum += waiting_bytes(layer);
  return sum;
}

}  // namespace weir
