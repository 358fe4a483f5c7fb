#include <string>

#include "engine/read_mixer.h"

namespace weir {
namespace {

constexpr double kThetaMax = 1e12;

// What all places share. `heads` is already read.
AttentionMixer read_attention(ConfigReader& reader, int32_t dim, int32_t heads,
                              bool rotary = true) {
  AttentionMixer mixer{.heads = heads};
  if (dim % heads != 0 || (rotary && dim / heads % 2 != 0)) {
    reader.refuse_text("num_heads", absl::StrCat("expected hidden_size (", dim,
                                                 ") / num_heads to be whole",
                                                 rotary ? " and even" : "", ", found ", heads));
  }
  mixer.head_dim = dim / heads;
  mixer.kv_heads = reader.integer_or_null("num_kv_heads", heads, 1, kDimMax);
  if (heads % mixer.kv_heads != 0) {
    reader.refuse_text("num_kv_heads", absl::StrCat("expected a divisor of num_heads (", heads,
                                                    "), found ", mixer.kv_heads));
  }
  mixer.qkv_bias = reader.boolean("qkv_bias", false);
  return mixer;
}

void read_positions(ConfigReader& reader, AttentionMixer& mixer) {
  mixer.window = reader.integer_or_null("window_size", 0, 1, kDimMax);
  mixer.rope_theta = float(reader.number("rope_theta", 10000, 1, kThetaMax));
}

// One object of `attn`. `taken` marks the layers that have attention already.
void read_group(ConfigReader& reader, int32_t dim, std::vector<LayerSpec>& layers,
                std::vector<bool>& taken) {
  const nlohmann::json* indices = reader.find("layers");
  if (!indices || !indices->is_array()) {
    reader.refuse("layers", "a list of layer numbers", indices ? *indices : nlohmann::json());
    return;
  }
  if (!reader.find("num_heads")) reader.refuse("num_heads", "a whole number", nlohmann::json());
  const int32_t heads = reader.integer("num_heads", 1, 1, kDimMax);
  if (reader.is_set("qk_norm") && reader.boolean("qk_norm", false)) {
    reader.refuse("qk_norm", "false, as hybrid attention has none", *reader.find("qk_norm"));
  }
  if (reader.is_set("rope_scaling")) {
    reader.refuse("rope_scaling", "null", *reader.find("rope_scaling"));
  }
  if (!reader.status().ok()) return;
  AttentionMixer mixer = read_attention(reader, dim, heads);
  read_positions(reader, mixer);
  const int32_t last = int32_t(layers.size()) - 1;
  for (const nlohmann::json& index : *indices) {
    const std::optional<int32_t> layer = ConfigReader::as_integer(index, 0, last);
    if (!layer) {
      reader.refuse("layers", absl::StrCat("layer numbers from 0 to ", last), index);
      return;
    }
    if (taken[size_t(*layer)]) {
      reader.refuse("layers", "each layer at most once", index);
      return;
    }
    taken[size_t(*layer)] = true;
    layers[size_t(*layer)].mixer = mixer;
  }
}

}  // namespace

AttentionMixer read_transformer(ConfigReader& reader, int32_t dim) {
  const int32_t heads = reader.integer("num_heads", 32, 1, kDimMax);
  AttentionMixer mixer = read_attention(reader, dim, heads);
  read_positions(reader, mixer);
  mixer.qk_norm = reader.boolean("qk_norm", false);
  return mixer;
}

AttentionMixer read_forgetting(ConfigReader& reader, int32_t dim) {
  const int32_t heads = reader.integer("num_heads", 32, 1, kDimMax);
  AttentionMixer mixer = read_attention(reader, dim, heads, /*rotary=*/false);
  if (reader.is_set("window_size")) {
    // fla trims its cache to the window, and nothing else: no definition to serve.
    reader.refuse("window_size", "null for a forgetting_transformer", *reader.find("window_size"));
  }
  mixer.qk_norm = mixer.norm_per_head = reader.boolean("qk_norm", false);
  mixer.forget_gate = true;
  mixer.output_gate = reader.boolean("use_output_gate", false);
  return mixer;
}

void read_attention_layers(ConfigReader& reader, int32_t dim, std::vector<LayerSpec>& layers) {
  if (!reader.is_set("attn")) return;
  const nlohmann::json& attn = *reader.find("attn");
  std::vector<bool> taken(layers.size());
  const auto read_one = [&](const nlohmann::json& group, const std::string& name) {
    if (!group.is_object()) {
      reader.refuse(name, "an object with layers and num_heads", group);
      return;
    }
    ConfigReader inner = reader.inside(group, name);
    read_group(inner, dim, layers, taken);
  };
  if (!attn.is_array()) return read_one(attn, "attn");
  for (size_t i = 0; i < attn.size() && reader.status().ok(); ++i) {
    read_one(attn[i], absl::StrCat("attn[", i, "]"));
  }
}

}  // namespace weir
