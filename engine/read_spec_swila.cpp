#include "engine/read_mixer.h"

namespace weir {

SwilaMixer read_swila(ConfigReader& reader) {
  constexpr int32_t kMixturesMax = 64, kConvWidthMax = 64;
  // The layout is young: nothing is assumed for a key that says what the model is.
  const auto size = [&](const char* key, int32_t max) {
    if (!reader.find(key)) reader.refuse(key, "a whole number", nlohmann::json());
    return reader.integer(key, 1, 1, max);
  };
  const auto flag = [&](const char* key) {
    if (!reader.find(key)) reader.refuse(key, "true or false", nlohmann::json());
    return reader.boolean(key, false);
  };
  SwilaMixer mixer{.heads = size("num_heads", kDimMax),
                   .mixtures = size("num_mixtures", kMixturesMax),
                   .head_dim = size("head_dim", kHeadDimMax),
                   .router_rank = size("router_low_rank_dim", kDimMax),
                   .beta_rank = size("beta_low_rank_dim", kDimMax),
                   .temporal = flag("temporal"),
                   .gated = flag("gated"),
                   .conv = {.width = reader.integer("conv_size", 4, 1, kConvWidthMax)}};
  if (mixer.gated) mixer.gate_rank = size("gate_low_rank_dim", kDimMax);
  if (int64_t(mixer.heads) * mixer.head_dim * mixer.mixtures > kDimMax) {
    reader.refuse_text("num_heads", absl::StrCat("expected num_heads * head_dim * num_mixtures of "
                                                 "at most ", kDimMax, ", found ", mixer.heads,
                                                 " * ", mixer.head_dim, " * ", mixer.mixtures));
  }
  return mixer;
}

}  // namespace weir
