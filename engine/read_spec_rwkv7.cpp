#include "engine/read_mixer.h"

namespace weir {
namespace {

constexpr int32_t kLayersMax = 4096;

// A head's key dimension: head_dim, or where that is null what the number of heads makes it.
int32_t read_head_dim(ConfigReader& reader, int32_t dim) {
  const int32_t silent = reader.find("head_dim") ? 0 : 64;
  int32_t head_dim = reader.integer_or_null("head_dim", silent, 1, kHeadDimMax);
  const int32_t heads = reader.integer_or_null("num_heads", 0, 1, kDimMax);
  if (head_dim == 0 && heads > 0) head_dim = dim / heads;
  const bool fits = head_dim >= 1 && head_dim <= kHeadDimMax && dim % head_dim == 0 &&
                    (heads == 0 || dim / head_dim == heads);
  if (fits) return head_dim;
  reader.refuse_text("head_dim", absl::StrCat("expected head_dim * num_heads to be hidden_size (",
                                              dim, ") with head_dim from 1 to ", kHeadDimMax,
                                              ", found head_dim ", head_dim, ", num_heads ",
                                              heads == 0 ? "null" : absl::StrCat(heads)));
  return dim;
}

// The values of all heads: one number, or one for each layer, which must be the same, as every
// layer's values are mixed with those of layer 0.
int32_t read_value_dim(ConfigReader& reader, int32_t dim, int32_t heads) {
  if (!reader.is_set("value_dim")) return dim;
  const nlohmann::json& found = *reader.find("value_dim");
  const nlohmann::json first = found.is_array() && !found.empty() ? found[0] : found;
  const auto layers = size_t(reader.integer("num_hidden_layers", 24, 1, kLayersMax));
  bool good = !found.is_array() || found.size() == layers;
  for (const nlohmann::json& one : found.is_array() ? found : nlohmann::json::array()) {
    good = good && one == first;
  }
  const std::optional<int32_t> value_dim = ConfigReader::as_integer(first, 1, kDimMax);
  if (good && value_dim && *value_dim % heads == 0 && *value_dim / heads <= kHeadDimMax) {
    return *value_dim;
  }
  reader.refuse("value_dim",
                absl::StrCat("a multiple of the number of heads (", heads, ") up to ", kHeadDimMax,
                             " times that, or the same one for each of ", layers, " layers"),
                found);
  return heads;
}

}  // namespace

Rwkv7Mixer read_rwkv7(ConfigReader& reader, int32_t dim) {
  Rwkv7Mixer mixer{.key_dim = read_head_dim(reader, dim)};
  mixer.heads = dim / mixer.key_dim;
  mixer.value_dim = read_value_dim(reader, dim, mixer.heads) / mixer.heads;
  mixer.decay_rank = reader.integer_or_null("decay_low_rank_dim", 64, 1, kDimMax);
  mixer.gate_rank = reader.integer_or_null("gate_low_rank_dim", 128, 1, kDimMax);
  mixer.rate_rank = reader.integer_or_null("a_low_rank_dim", 64, 1, kDimMax);
  mixer.value_rank = reader.integer_or_null("v_low_rank_dim", 16, 1, kDimMax);
  mixer.fused_norm = reader.boolean("fuse_norm", true);
  return mixer;
}

}  // namespace weir
