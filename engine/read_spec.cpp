#include "engine/read_spec.h"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/config_reader.h"
#include "engine/read_mixer.h"
#include "engine/unread_keys.h"

namespace weir {
namespace {

using nlohmann::json;

constexpr size_t kConfigBytesMax = 16 << 20;

// What is served: how a type's mixer is read, and what a silent config.json means for it.
struct ServedType {
  const char* name;
  Mixer (*read)(ConfigReader& reader, int32_t dim) = nullptr;
  void (*read_layers)(ConfigReader& reader, ModelSpec& spec) = nullptr;  // in place of `read`
  int32_t layers = 24;
  double norm_eps = 1e-6;
  double hidden_ratio = 4;     // of the MLP; 0: there is none
  bool attention = true;       // takes the `attn` option
  bool depth_residual = true;  // takes `attnres_block_size`
  TensorNames names = TensorNames::Fla;
  Mlp::Kind mlp = Mlp::Kind::Gated;
  bool bos = true;             // prompts begin with token 1
};
constexpr std::array kServed = {
    ServedType{
        .name = "transformer",
        .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_transformer(r, dim); },
        .attention = false},
    ServedType{
        .name = "delta_net",
        .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_delta_net(r, dim); }},
    ServedType{.name = "gated_deltanet",
               .read = [](ConfigReader& r, int32_t) -> Mixer { return read_gated_deltanet(r); },
               .layers = 21},
    ServedType{.name = "comba",
               .read = [](ConfigReader& r, int32_t) -> Mixer { return read_comba(r); },
               .layers = 21},
    ServedType{.name = "gated_deltaproduct",
               .read = [](ConfigReader& r, int32_t) { return read_gated_deltaproduct(r); },
               .layers = 21},
    ServedType{.name = "kda",
               .read = [](ConfigReader& r, int32_t) -> Mixer { return read_kda(r); }},
    ServedType{.name = "gdn2",
               .read = [](ConfigReader& r, int32_t) -> Mixer { return read_gdn2(r); }},
    ServedType{.name = "swila",
               .read = [](ConfigReader& r, int32_t) -> Mixer { return read_swila(r); },
               .depth_residual = false},
    ServedType{.name = "gla",
               .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_gla(r, dim); }},
    ServedType{.name = "retnet",
               .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_retnet(r, dim); },
               .hidden_ratio = 2},
    ServedType{.name = "hgrn2",
               .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_hgrn2(r, dim); }},
    ServedType{
        .name = "linear_attn",
        .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_linear_attn(r, dim); }},
    ServedType{.name = "gsa",
               .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_gsa(r, dim); }},
    ServedType{
        .name = "forgetting_transformer",
        .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_forgetting(r, dim); },
        .attention = false},
    ServedType{.name = "rwkv7",
               .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_rwkv7(r, dim); },
               .norm_eps = 1e-5,
               .attention = false,
               .depth_residual = false,
               .names = TensorNames::Rwkv,
               .mlp = Mlp::Kind::ShiftedSquare},
    ServedType{.name = "mom",
               .read = [](ConfigReader& r, int32_t) -> Mixer { return read_mom(r); },
               .attention = false},  // fla's own model takes the option and then fails
    ServedType{.name = "mamba2",
               .read = [](ConfigReader& r, int32_t dim) -> Mixer { return read_mamba2(r, dim); },
               .layers = 48,
               .norm_eps = 1e-5,
               .hidden_ratio = 0,
               .attention = false,
               .depth_residual = false,
               .names = TensorNames::Mamba},
    ServedType{.name = "weir", .read_layers = read_weir_layers, .norm_eps = 1e-5, .bos = false},
};

// Types of the flash-linear-attention family, and its neighbours, that are known and not served.
constexpr std::array kNotServed = {"abc",
                                   "bitnet",
                                   "deltaformer",
                                   "hgrn",
                                   "kimi_linear",
                                   "lightnet",
                                   "log_linear_mamba2",
                                   "mamba",
                                   "mamba3",
                                   "mesa_net",
                                   "mla",
                                   "moba",
                                   "mom_gated_deltanet",
                                   "nsa",
                                   "parallax",
                                   "path_attn",
                                   "precond_gated_deltanet",
                                   "precond_kda",
                                   "qwen3_5",
                                   "qwen3_5_text",
                                   "qwen3_next",
                                   "raven",
                                   "rodimus",
                                   "rwkv6",
                                   "samba",
                                   "simple_gla",
                                   "wall_transformer",
                                   "yoco"};

// Keys that would change the mathematics whatever their value.
constexpr std::array kMustBeNull = {
    "rope_scaling",            "rope_parameters",        "quantization_config",
    "final_logit_softcapping", "attn_logit_softcapping", "sliding_window",
    "partial_rotary_factor"};

void refuse_unserved_keys(ConfigReader& reader, Mlp::Kind mlp) {
  for (const char* key : kMustBeNull) {
    if (reader.is_set(key)) reader.refuse(key, "null (it is not served)", *reader.find(key));
  }
  if (!reader.boolean("elementwise_affine", true)) {
    reader.refuse("elementwise_affine", "true (norms without weights are not served)",
                  *reader.find("elementwise_affine"));
  }
  if (mlp == Mlp::Kind::ShiftedSquare) {
    reader.choice<int>("hidden_act", 0, {{"sqrelu", 0}});
  } else {
    reader.choice<int>("hidden_act", 0, {{"swish", 0}, {"silu", 0}});
  }
}

std::string served_names() {
  std::string names;
  for (const ServedType& type : kServed)
    absl::StrAppend(&names, names.empty() ? "" : ", ", type.name);
  return names;
}

// Null after a refusal.
const ServedType* read_model_type(ConfigReader& reader) {
  const json* type = reader.find("model_type");
  if (!type || !type->is_string()) {
    reader.refuse("model_type", "one of " + served_names(), type ? *type : json());
    return nullptr;
  }
  const std::string& name = type->get_ref<const std::string&>();
  for (const ServedType& served : kServed) {
    if (name == served.name) return &served;
  }
  const bool known = std::find(kNotServed.begin(), kNotServed.end(), name) != kNotServed.end();
  reader.refuse_text("model_type",
                     absl::StrCat("expected one of ", served_names(), "; found ", describe(*type),
                                  known ? ", a known type that is not served" : ""));
  return nullptr;
}

// The MLP's width. Where the file is silent it follows from hidden_ratio, rounded up to 256, or,
// without a gate, to 32.
int32_t read_mlp(ConfigReader& reader, int32_t dim, const ServedType& type) {
  double ratio = reader.find("hidden_ratio") ? 4 : type.hidden_ratio;  // null counts as 4
  if (reader.is_set("hidden_ratio")) ratio = reader.number("hidden_ratio", 4, 0, 1024);
  if (reader.is_set("intermediate_size")) {
    return reader.integer("intermediate_size", 1, 1, kDimMax);
  }
  const bool gated = type.mlp == Mlp::Kind::Gated;
  const int64_t exact = int64_t(gated ? dim * ratio * 2 / 3 : dim * ratio);
  const int64_t multiple = gated ? 256 : 32;
  const int64_t rounded = (exact + multiple - 1) / multiple * multiple;
  if (rounded < 1 || rounded > kDimMax) {
    reader.refuse_text("hidden_ratio", absl::StrCat("expected an MLP width from 1 to ", kDimMax,
                                                    ", found ", rounded));
    return 1;
  }
  return int32_t(rounded);
}

// fla's attention residuals: null, 1 or an even number of halves.
std::optional<DepthResidual> read_depth_residual(ConfigReader& reader, const ServedType& type,
                                                 float norm_eps) {
  constexpr const char* kKey = "attnres_block_size";
  if (!reader.is_set(kKey)) return {};
  if (!type.depth_residual) {
    reader.refuse(kKey, absl::StrCat("null for a ", type.name), *reader.find(kKey));
    return {};
  }
  const int32_t block = reader.integer(kKey, 1, 1, 2 * kLayersMax);
  if (block != 1 && block % 2 != 0) reader.refuse(kKey, "1 or an even number", block);
  return DepthResidual{.block = block, .eps = norm_eps};
}

void read_special_tokens(ConfigReader& reader, bool usual_bos, ModelSpec& spec) {
  const int32_t last = spec.vocab - 1;
  const std::string expected = absl::StrCat("a token id from 0 to ", last);
  const bool silent = !reader.find("bos_token_id");
  const bool no_bos = silent ? !usual_bos : !reader.is_set("bos_token_id");
  spec.bos = no_bos ? -1 : reader.integer("bos_token_id", std::min(1, last), 0, last);

  const json* eos = reader.find("eos_token_id");
  if (!eos) spec.eos = {std::min(2, last)};
  if (!eos || eos->is_null()) return;
  const auto add = [&](const json& value) {
    const std::optional<int32_t> id = ConfigReader::as_integer(value, 0, last);
    if (!id) return reader.refuse("eos_token_id", expected, value);
    if (std::find(spec.eos.begin(), spec.eos.end(), *id) == spec.eos.end()) spec.eos.push_back(*id);
  };
  constexpr size_t kEosMax = 64;
  if (eos->is_array() && eos->size() > kEosMax) {
    reader.refuse("eos_token_id", absl::StrCat("at most ", kEosMax, " ids"), eos->size());
  } else if (eos->is_array()) {
    for (const json& value : *eos) add(value);
  } else {
    add(*eos);
  }
}

ModelSpec read_model(ConfigReader& reader) {
  ModelSpec spec;
  const ServedType* type = read_model_type(reader);
  if (!type) return spec;  // what other keys mean depends on it
  spec.model_type = type->name;
  refuse_unserved_keys(reader, type->mlp);
  spec.dim = reader.integer("hidden_size", 2048, 1, kDimMax);
  spec.vocab = reader.integer("vocab_size", 32000, 1, kDimMax);
  spec.names = type->names;
  const char* eps_key = "norm_eps";
  for (const char* old : {"rms_norm_eps", "layer_norm_epsilon"}) {
    if (!reader.find(eps_key) && reader.find(old)) eps_key = old;
  }
  spec.norm_eps = float(reader.number(eps_key, type->norm_eps, 1e-30, 1));
  if (type->names == TensorNames::Rwkv) {
    const bool bias = reader.boolean("norm_bias", true);
    spec.norm = bias ? BlockNorm::Layer : BlockNorm::LayerWithoutBias;
    spec.embedding_norm = reader.boolean("norm_first", true);
  }
  spec.tied_embeddings = reader.boolean("tie_word_embeddings", false);
  read_special_tokens(reader, type->bos, spec);
  if (type->read_layers != nullptr) {
    type->read_layers(reader, spec);
    return spec;
  }

  const int32_t layers = reader.integer("num_hidden_layers", type->layers, 1, kLayersMax);
  LayerSpec layer{.mixer = type->read(reader, spec.dim)};
  if (type->hidden_ratio > 0) {
    layer.mlp = Mlp{.hidden = read_mlp(reader, spec.dim, *type), .kind = type->mlp};
  }
  spec.layers.assign(size_t(layers), layer);
  for (int32_t i = 0; i < layers; ++i) {
    auto* hgrn2 = std::get_if<Hgrn2Mixer>(&spec.layers[size_t(i)].mixer);
    if (hgrn2) hgrn2->layer = i, hgrn2->layers = layers;
  }
  if (auto* rwkv7 = std::get_if<Rwkv7Mixer>(&spec.layers.front().mixer)) rwkv7->first = true;
  spec.depth_residual = read_depth_residual(reader, *type, spec.norm_eps);
  if (type->attention) {
    read_attention_layers(reader, spec.dim, spec.layers);
  } else if (reader.is_set("attn")) {
    reader.refuse("attn", absl::StrCat("null for a ", type->name), *reader.find("attn"));
  }
  return spec;
}

}  // namespace

absl::StatusOr<ModelSpec> read_spec(std::string_view text, const std::string& path,
                                    std::vector<std::string>* unread) {
  const absl::StatusOr<json> config = parse_json(text, path);
  if (!config.ok()) return config.status();
  if (!config->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected an object, found ", describe(*config)));
  }
  absl::Status status;
  std::set<std::string> asked;
  ConfigReader reader(*config, path, "", status, &asked);
  ModelSpec spec = read_model(reader);
  if (!status.ok()) return status;
  if (unread) *unread = unread_keys(*config, asked);
  return spec;
}

absl::StatusOr<ModelSpec> read_spec_folder(const std::string& folder,
                                           std::vector<std::string>* unread) {
  const std::string path = folder + "/config.json";
  const absl::StatusOr<std::string> text = read_text_file(path, kConfigBytesMax);
  if (!text.ok()) return text.status();
  return read_spec(*text, path, unread);
}

}  // namespace weir
