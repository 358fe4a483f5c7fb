#include <cstdint>
#include <string_view>

#include "engine/read_spec.h"
#include "kernels/check.h"

// Any bytes as config.json: refused, or a spec whose sizes are in range.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto spec = weir::read_spec(text, "fuzz");
  if (!spec.ok()) {
    WEIR_CHECK(!spec.status().message().empty());
    return 0;
  }
  WEIR_CHECK(spec->dim > 0 && spec->vocab > 0 && !spec->layers.empty());
  WEIR_CHECK(spec->bos < spec->vocab && spec->norm_eps > 0);
  for (const weir::Token eos : spec->eos) WEIR_CHECK(eos >= 0 && eos < spec->vocab);
  for (const weir::LayerSpec& layer : spec->layers) {
    WEIR_CHECK(!layer.mlp || layer.mlp->hidden > 0);
    const bool routed = layer.route.error || layer.route.hidden;
    WEIR_CHECK(!routed || std::holds_alternative<weir::DeltaMixer>(layer.mixer));
    if (const auto* m = std::get_if<weir::DeltaMixer>(&layer.mixer)) {
      WEIR_CHECK(m->key_heads > 0 && m->key_dim > 0 && m->value_dim > 0);
      WEIR_CHECK(m->value_heads % m->key_heads == 0);
      WEIR_CHECK(int64_t(m->value_heads) * m->value_dim <= 1 << 20);
    } else if (const auto* m = std::get_if<weir::AttentionMixer>(&layer.mixer)) {
      WEIR_CHECK(m->head_dim > 0 && m->heads % m->kv_heads == 0);
      const bool whole = m->heads * m->head_dim == spec->dim;
      WEIR_CHECK((whole || spec->model_type == "weir") && m->window >= 0);
    } else if (const auto* m = std::get_if<weir::MomMixer>(&layer.mixer)) {
      WEIR_CHECK(m->chosen > 0 && m->chosen <= m->memories && m->conv.width > 0);
    }
  }
  WEIR_CHECK(state_size(*spec).slot() < size_t(1) << 50);
  return 0;
}
