#include "engine/spec.h"

namespace weir {
namespace {

constexpr size_t kFloat = sizeof(float);

StateSize size_of(const DeltaMixer& m) {
  const size_t channels = 2 * size_t(m.key_heads) * m.key_dim + size_t(m.value_heads) * m.value_dim;
  return {.recurrent = size_t(m.value_heads) * m.value_dim * m.key_dim * kFloat,
          .conv = m.conv ? channels * size_t(m.conv->width - 1) * kFloat : 0};
}

StateSize size_of(const AttentionMixer& m) {
  const size_t per_token = 2 * size_t(m.kv_heads) * m.head_dim * kFloat;
  if (m.window > 0) return {.ring = per_token * size_t(m.window)};
  return {.kv_per_token = per_token};
}

}  // namespace

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

StateSize state_size(const ModelSpec& spec) {
  StateSize sum;
  for (const LayerSpec& layer : spec.layers) sum += state_size(layer.mixer);
  return sum;
}

}  // namespace weir
