// Weir's own layout, which Megatron checkpoints are converted to: weir_layout.md.
#include <array>
#include <string>
#include <utility>

#include "engine/read_mixer.h"

namespace weir {
namespace {

using nlohmann::json;

constexpr int32_t kConvWidthMax = 64;
constexpr double kThetaMax = 1e12;

constexpr std::array kKeys = {
    "model_type",           "hidden_size",             "vocab_size",
    "num_hidden_layers",    "intermediate_size",       "norm_eps",
    "tie_word_embeddings",  "bos_token_id",            "eos_token_id",
    "layer_types",          "num_heads",               "num_kv_heads",
    "head_dim",             "rope_theta",              "attention_output_gate",
    "linear_num_key_heads", "linear_num_value_heads",  "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "linear_qk_norm",
    "gdn2_low_rank",        "cler",                    "route",
    "attention_residuals",  "architectures",           "torch_dtype",
    "transformers_version", "converted_from"};

int32_t required(ConfigReader& reader, const char* key, int32_t max) {
  if (!reader.find(key)) reader.refuse(key, "a whole number", json());
  return reader.integer(key, 1, 1, max);
}

int32_t multiple(ConfigReader& reader, const char* key, const char* of, int32_t divisor) {
  const int32_t read = required(reader, key, kDimMax);
  if (read % divisor != 0) {
    reader.refuse_text(key, absl::StrCat("expected a multiple of ", of, " (", divisor, "), found ",
                                         read));
  }
  return read;
}

void check_product(ConfigReader& reader, const char* key, int32_t heads, int32_t dim) {
  if (int64_t(heads) * dim <= kDimMax) return;
  reader.refuse_text(key, absl::StrCat("expected all heads together to have at most ", kDimMax,
                                       " numbers, found ", heads, " * ", dim));
}

AttentionMixer read_softmax(ConfigReader& reader) {
  AttentionMixer m;
  m.kv_heads = required(reader, "num_kv_heads", kDimMax);
  m.heads = multiple(reader, "num_heads", "num_kv_heads", m.kv_heads);
  m.head_dim = required(reader, "head_dim", kHeadDimMax);
  if (m.head_dim % 2 != 0) reader.refuse("head_dim", "an even number", m.head_dim);
  check_product(reader, "num_heads", m.heads, m.head_dim);
  m.rope_theta = float(reader.number("rope_theta", 500000, 1, kThetaMax));
  m.output_gate = reader.boolean("attention_output_gate", false);
  return m;
}

DeltaMixer read_recurrent(ConfigReader& reader) {
  DeltaMixer m;
  m.key_heads = required(reader, "linear_num_key_heads", kDimMax);
  m.value_heads =
      multiple(reader, "linear_num_value_heads", "linear_num_key_heads", m.key_heads);
  m.key_dim = required(reader, "linear_key_head_dim", kHeadDimMax);
  m.value_dim = required(reader, "linear_value_head_dim", kHeadDimMax);
  check_product(reader, "linear_num_key_heads", m.key_heads, m.key_dim);
  check_product(reader, "linear_num_value_heads", m.value_heads, m.value_dim);
  m.conv = ShortConv{.width = reader.integer("linear_conv_kernel_dim", 4, 1, kConvWidthMax)};
  m.qk_norm = reader.choice<QkNorm>("linear_qk_norm", QkNorm::L2,
                                    {{"l2", QkNorm::L2}, {"l2_max", QkNorm::L2Max}});
  return m;
}

enum class Kind : uint8_t { Softmax, Delta, Gdn, Kda, Gdn2, Linear };
constexpr std::array kKindNames = {"softmax", "delta", "gdn", "kda", "gdn2", "linear"};

// What a kind's mixer is, given the sizes that all recurrent layers share.
DeltaMixer mixer_of(Kind kind, DeltaMixer m, bool low_rank) {
  switch (kind) {
    case Kind::Softmax: break;
    case Kind::Delta:
    case Kind::Linear:
      m.decay = DecayGate::None;
      m.output_gate = OutputGate::None;
      m.strength = kind == Kind::Delta ? Strength::Beta : Strength::Additive;
      break;
    case Kind::Gdn: break;
    case Kind::Kda:
      m.decay = DecayGate::PerChannel;
      m.output_gate = OutputGate::LowRankSigmoid;
      break;
    case Kind::Gdn2:
      m.decay = DecayGate::PerKeyChannel;
      m.strength = Strength::EraseWrite;
      m.full_rank_decay = !low_rank;
      m.output_gate = low_rank ? OutputGate::LowRankSilu : OutputGate::Silu;
      m.gates_read_residual = low_rank;
      break;
  }
  return m;
}

std::vector<Kind> read_kinds(ConfigReader& reader, int32_t layers) {
  const json* types = reader.find("layer_types");
  if (!types || !types->is_array() || types->size() != size_t(layers)) {
    reader.refuse("layer_types", absl::StrCat("a list of num_hidden_layers (", layers, ") names"),
                  types ? *types : json());
    return {};
  }
  std::vector<Kind> kinds;
  for (const json& type : *types) {
    const auto* at = std::find(kKindNames.begin(), kKindNames.end(),
                               type.is_string() ? type.get_ref<const std::string&>() : "");
    if (at == kKindNames.end()) {
      reader.refuse("layer_types", "each one of softmax, delta, gdn, kda, gdn2, linear", type);
      return {};
    }
    kinds.push_back(Kind(at - kKindNames.begin()));
  }
  return kinds;
}

// The object under a key, or nothing.
const json* object_at(ConfigReader& reader, const char* key) {
  if (!reader.is_set(key)) return nullptr;
  const json* object = reader.find(key);
  if (object->is_object()) return object;
  reader.refuse(key, "an object or null", *object);
  return nullptr;
}

std::optional<ErrorRoute> read_error_route(ConfigReader& outer) {
  const json* object = object_at(outer, "cler");
  if (!object) return {};
  ConfigReader reader = outer.inside(*object, "cler");
  constexpr std::array kNames = {"mode", "gamma", "dynamic", "normalize", "site", "eps"};
  reader.refuse_others(kNames);
  using Mode = ErrorRoute::Mode;
  using Gamma = ErrorRoute::Gamma;
  ErrorRoute route;
  route.mode = reader.choice<Mode>("mode", Mode::Latest, {{"latest", Mode::Latest},
                                                          {"dense_mean", Mode::Mean},
                                                          {"dense_softmax", Mode::Softmax},
                                                          {"attnres", Mode::Attend}});
  route.gamma = reader.choice<Gamma>("gamma", Gamma::Scalar, {{"scalar", Gamma::Scalar},
                                                              {"head", Gamma::PerHead},
                                                              {"channel", Gamma::PerChannel}});
  const bool dynamic = reader.boolean("dynamic", false);
  if (dynamic) route.gamma = Gamma::FromValues;
  route.normalize = reader.boolean("normalize", false);
  route.eps = float(reader.number("eps", 1e-6, 1e-30, 1));
  const auto site = reader.choice<int>("site", 1, {{"value", 1}, {"output", 2}, {"both", 3}});
  route.to_values = (site & 1) != 0;
  route.to_answers = (site & 2) != 0;
  const bool attends = route.mode == Mode::Attend;
  if (route.to_answers && (attends || dynamic)) {
    reader.refuse("site", attends ? "value with mode attnres" : "value with dynamic",
                  *reader.find("site"));
  }
  if (route.normalize && attends) {
    reader.refuse("normalize", "false with mode attnres", *reader.find("normalize"));
  }
  return route;
}

std::optional<HiddenRoute> read_hidden_route(ConfigReader& outer, bool depth_residual) {
  const json* object = object_at(outer, "route");
  if (!object) return {};
  if (outer.is_set("cler")) outer.refuse("route", "null, as cler is set", *object);
  ConfigReader reader = outer.inside(*object, "route");
  constexpr std::array kNames = {"signal", "rank", "normalize"};
  reader.refuse_others(kNames);
  using Signal = HiddenRoute::Signal;
  const std::vector<std::pair<const char*, Signal>> signals = {{"error", Signal::Error},
                                                               {"value", Signal::Value},
                                                               {"gated_value", Signal::GatedValue},
                                                               {"both", Signal::Both},
                                                               {"self", Signal::Self}};
  if (!reader.find("signal")) reader.refuse("signal", "a name", json());
  HiddenRoute route{.signal = reader.choice<Signal>("signal", Signal::Value, signals),
                    .rank = reader.integer("rank", 0, 0, kDimMax),
                    .normalize = reader.boolean("normalize", false)};
  if (route.signal != Signal::Self) return route;
  if (route.normalize) {
    reader.refuse("normalize", "false with signal self", *reader.find("normalize"));
  }
  if (depth_residual) {
    reader.refuse("signal", "another one with attention_residuals", *reader.find("signal"));
  }
  return route;
}

// One source a half, each normed without a gain.
std::optional<DepthResidual> read_attention_residuals(ConfigReader& outer) {
  const json* object = object_at(outer, "attention_residuals");
  if (!object) return {};
  ConfigReader reader = outer.inside(*object, "attention_residuals");
  reader.refuse_others(std::array{"eps"});
  return DepthResidual{
      .block = 1, .eps = float(reader.number("eps", 1e-6, 1e-30, 1)), .gains = false};
}

// Routing is between delta and gdn layers; softmax layers neither give nor take.
void read_routes(ConfigReader& reader, const std::vector<Kind>& kinds, ModelSpec& spec) {
  Route route{.error = read_error_route(reader),
              .hidden = read_hidden_route(reader, spec.depth_residual.has_value())};
  if (!route.error && !route.hidden) return;
  int32_t emitted = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] == Kind::Softmax) continue;
    if (kinds[i] != Kind::Delta && kinds[i] != Kind::Gdn) {
      const char* const key = route.error ? "cler" : "route";
      reader.refuse(key, absl::StrCat("null with a ", kKindNames[size_t(kinds[i])], " layer"),
                    *reader.find(key));
      return;
    }
    spec.layers[i].route = route;
    if (route.error) spec.layers[i].route.error->sources = emitted++;
  }
}

}  // namespace

void read_weir_layers(ConfigReader& reader, ModelSpec& spec) {
  reader.refuse_others(kKeys);
  for (const char* key : {"hidden_size", "vocab_size", "num_hidden_layers"}) {
    if (!reader.find(key)) reader.refuse(key, "a whole number", json());
  }
  const int32_t layers = reader.integer("num_hidden_layers", 1, 1, kLayersMax);
  const Mlp mlp{.hidden = required(reader, "intermediate_size", kDimMax)};
  const std::vector<Kind> kinds = read_kinds(reader, layers);
  const auto softmax = [](Kind kind) { return kind == Kind::Softmax; };
  AttentionMixer attention;
  if (std::any_of(kinds.begin(), kinds.end(), softmax)) attention = read_softmax(reader);
  DeltaMixer recurrent;
  if (!std::all_of(kinds.begin(), kinds.end(), softmax)) recurrent = read_recurrent(reader);
  const bool low_rank = reader.boolean("gdn2_low_rank", false);
  for (const Kind kind : kinds) {
    LayerSpec layer{.mixer = attention, .mlp = mlp};
    if (!softmax(kind)) layer.mixer = mixer_of(kind, recurrent, low_rank);
    spec.layers.push_back(std::move(layer));
  }
  spec.depth_residual = read_attention_residuals(reader);
  read_routes(reader, kinds, spec);
}

}  // namespace weir
