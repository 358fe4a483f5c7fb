#include "clients/convert/megatron_arguments.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "clients/convert/argument_reader.h"

namespace weir {
namespace {

constexpr int64_t kSizeMax = 1 << 24;

// Arguments that change the mathematics in ways that are not served; they must be off.
constexpr const char* kOff[] = {
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "rotary_interleaved",
    "use_rope_scaling", "no_rope_freq", "multi_latent_attention", "num_experts",
    "mtp_num_layers", "window_size", "squared_relu", "openai_gelu", "quick_geglu",
    "glu_linear_offset", "activation_func_clamp_value", "hybrid_override_pattern",
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json",
    "apply_residual_connection_post_layernorm"};

// Arguments of this family that are read below, and those that only training reads.
constexpr const char* kKnown[] = {
    "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "kda_use_fla_wrapper", "attn_res_enabled", "attn_res_eps", "cler_enabled", "cler_gamma_mode",
    "cler_routing_mode", "cler_normalize_residual", "cler_residual_norm_eps", "cler_dynamic_gate",
    "cler_injection_site", "cler_hidden_routing", "cler_hidden_rank", "cler_hidden_route_value",
    "cler_hidden_gate_by_error", "cler_hidden_route_both", "cler_hidden_self_transform",
    "cler_hidden_normalize_input", "cler_detach_residual"};
constexpr const char* kFamily[] = {"cler_", "attn_res_", "linear_", "kda_"};

struct Variant {
  const char* name;
  const char* mixer;
  bool torch_variant;
};
constexpr Variant kVariants[] = {
    {"delta_net", "delta", false},
    {"delta_net_pytorch", "delta", true},
    {"cler_delta_net_pytorch", "delta", true},
    {"gated_delta_net", "gdn", false},
    {"gated_delta_net_pytorch", "gdn", true},
    {"gated_delta_net_2", "gdn2", false},
    {"gated_delta_net2_pytorch", "gdn2", true},
    {"kda", "kda", false},
    {"linear_transformer_pytorch", "linear", true},
};

bool is_off(const Value* value) {
  const bool* truth = as<bool>(value);
  const int64_t* number = as<int64_t>(value);
  return value == nullptr || as<None>(value) || (truth && !*truth) || (number && *number == 0);
}

void refuse_unknown(const Value* arguments, ArgumentReader& reader,
                    const std::set<std::string>& ignored) {
  const Object* object = as<Object>(arguments);
  const Dict* members = object ? as<Dict>(object->state) : nullptr;
  if (members == nullptr) return;
  for (const auto& [key, value] : members->items) {
    const std::string name(as<Text>(key) ? as<Text>(key)->bytes : "");
    const auto begins = [&](const char* prefix) { return name.starts_with(prefix); };
    const auto is = [&](const char* known) { return name == known; };
    if (std::ranges::none_of(kFamily, begins) || std::ranges::any_of(kKnown, is)) continue;
    // What a weight began as does not matter to one that was trained.
    if (is_off(value) || name.find("_init") != std::string::npos || ignored.contains(name)) {
      continue;
    }
    reader.refuse_text(absl::Utf8SafeCHexEscape(name),
                       absl::StrCat("not known, and set to ", describe(value),
                                    "; --ignore_argument lets it pass"));
  }
}

void read_shell(ArgumentReader& reader, MegatronArguments& out) {
  for (const char* name : kOff) {
    const Value* value = reader.find(name);
    if (!is_off(value)) reader.refuse(name, "it to be off", describe(value));
  }
  reader.choice("normalization", {"RMSNorm"});
  reader.choice("position_embedding_type", {"rope"});
  if (!reader.boolean("swiglu", false)) reader.refuse("swiglu", "True", "False");
  if (reader.number("rotary_percent", 1, 0, 1) != 1) {
    reader.refuse("rotary_percent", "1", describe(reader.find("rotary_percent")));
  }
  if (reader.number("rotary_seq_len_interpolation_factor", 1, 0, 1e6) != 1) {
    reader.refuse("rotary_seq_len_interpolation_factor", "1 or None",
                  describe(reader.find("rotary_seq_len_interpolation_factor")));
  }
  out.layers = reader.size("num_layers", 4096);
  out.hidden = reader.size("hidden_size", kSizeMax);
  out.ffn_hidden = reader.size("ffn_hidden_size", kSizeMax);
  out.heads = reader.size("num_attention_heads", 65536);
  out.kv_heads = reader.boolean("group_query_attention", false)
                     ? reader.size("num_query_groups", 65536)
                     : out.heads;
  if (out.heads % out.kv_heads != 0) {
    reader.refuse("num_query_groups", absl::StrCat("a divisor of ", out.heads, " heads"),
                  absl::StrCat(out.kv_heads));
  }
  out.head_dim = reader.integer("kv_channels", out.hidden / out.heads, 1, 65536);
  out.rope_theta = reader.number("rotary_base", 10000, 1, 1e12);
  const double fallback_eps = reader.number("norm_epsilon", 1e-5, 0, 1);
  out.norm_eps = reader.number("layernorm_epsilon", fallback_eps, 0, 1);
  out.gain_plus_one = reader.boolean("apply_layernorm_1p", false) ||
                      reader.boolean("layernorm_zero_centered_gamma", false);
  out.tied_embeddings = !reader.boolean("untie_embeddings_and_output_weights", false);
}

void read_pattern(ArgumentReader& reader, MegatronArguments& out) {
  const Value* freq = reader.find("linear_attention_freq");
  if (freq == nullptr) return;
  out.recurrent.assign(size_t(out.layers), true);
  if (as<int64_t>(freq)) {
    const int64_t every = reader.integer("linear_attention_freq", 1, 1, kSizeMax);
    for (int64_t i = 0; i < out.layers; ++i) out.recurrent[size_t(i)] = (i + 1) % every != 0;
    return;
  }
  const auto items = items_of(freq);
  if (items.size() != size_t(out.layers)) {
    return reader.refuse("linear_attention_freq",
                         absl::StrCat("a number, or a list of ", out.layers, " of 0 and 1"),
                         as<List>(freq) ? absl::StrCat("a list of ", items.size())
                                        : describe(freq));
  }
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t* item = as<int64_t>(items[i]);
    if (item == nullptr || (*item != 0 && *item != 1)) {
      return reader.refuse("linear_attention_freq", "a list of 0 and 1", describe(items[i]));
    }
    out.recurrent[i] = *item == 1;
  }
}

void read_mixer(ArgumentReader& reader, MegatronArguments& out) {
  const Value* variant = reader.find("experimental_attention_variant");
  if (variant == nullptr) {
    out.recurrent.assign(size_t(out.layers), false);
    return;
  }
  std::vector<std::string> names;
  for (const Variant& known : kVariants) names.push_back(known.name);
  const std::string name = reader.choice("experimental_attention_variant", names);
  const auto known = std::ranges::find_if(kVariants, [&](auto& row) { return row.name == name; });
  out.mixer = known->mixer;
  out.torch_variant = known->torch_variant;
  read_pattern(reader, out);
  out.conv_width = reader.integer("linear_conv_kernel_dim", 4, 2, 64);
  out.key_heads = reader.size("linear_num_key_heads", 65536);
  out.key_dim = reader.size("linear_key_head_dim", 65536);
  out.value_dim = reader.size("linear_value_head_dim", 65536);
  // The training code of these two takes the key heads, whatever the argument says.
  const bool by_key = out.mixer == "delta" || out.mixer == "linear";
  out.value_heads = by_key ? out.key_heads : reader.size("linear_num_value_heads", 65536);
  if (out.value_heads % out.key_heads != 0) {
    reader.refuse("linear_num_value_heads", absl::StrCat("a multiple of ", out.key_heads),
                  absl::StrCat(out.value_heads));
  }
}

void read_route(ArgumentReader& reader, MegatronArguments& out) {
  const bool value = reader.boolean("cler_hidden_route_value", false);
  const bool gated = reader.boolean("cler_hidden_gate_by_error", false);
  const bool both = reader.boolean("cler_hidden_route_both", false);
  const bool self = reader.boolean("cler_hidden_self_transform", false);
  // Gating is of the values, so naming them besides says nothing new.
  if (int(value || gated) + int(both) + int(self) > 1) {
    return reader.refuse_text("cler_hidden_routing",
                              "expected one of cler_hidden_route_value, _gate_by_error, "
                              "_route_both and _self_transform, found several");
  }
  // The *_pytorch classes never publish their values: such a model routes nothing.
  if (out.torch_variant && (value || gated || both)) {
    return reader.refuse_text("cler_hidden_routing",
                              "routes values, which the *_pytorch classes do not give");
  }
  out.has_route = true;
  out.route.signal = gated   ? "gated_value"
                     : value ? "value"
                     : both  ? "both"
                     : self  ? "self"
                             : "error";
  out.route.rank = reader.integer("cler_hidden_rank", 0, 0, kSizeMax);
  out.route.normalize = reader.boolean("cler_hidden_normalize_input", false) && !self;
}

void read_cler(ArgumentReader& reader, MegatronArguments& out) {
  if (!reader.boolean("cler_enabled", false)) return;
  if (out.mixer != "delta" && out.mixer != "gdn") {
    return reader.refuse_text("cler_enabled", "only delta_net and gated_delta_net route, found " +
                                                  describe(reader.find(
                                                      "experimental_attention_variant")));
  }
  if (reader.boolean("cler_hidden_routing", false)) return read_route(reader, out);
  out.has_cler = true;
  MegatronArguments::Cler& cler = out.cler;
  cler.mode =
      reader.choice("cler_routing_mode", {"latest", "dense_mean", "dense_softmax", "attnres"});
  cler.gamma = reader.choice("cler_gamma_mode", {"scalar", "head", "channel"});
  cler.site = reader.choice("cler_injection_site", {"value", "output", "both"});
  cler.dynamic = reader.boolean("cler_dynamic_gate", false);
  cler.normalize = reader.boolean("cler_normalize_residual", false);
  cler.eps = reader.number("cler_residual_norm_eps", 1e-6, 0, 1);
  if ((cler.dynamic || cler.mode == "attnres") && (out.mixer != "gdn" || out.torch_variant)) {
    reader.refuse_text(cler.dynamic ? "cler_dynamic_gate" : "cler_routing_mode",
                       "only gated_delta_net has it");
  }
  if (cler.site != "value" && !out.torch_variant) {
    reader.refuse_text("cler_injection_site", "only the *_pytorch classes have it");
  }
  cler.normalize = cler.normalize && cler.mode != "attnres";  // whose logits normalise alone
}

}  // namespace

absl::StatusOr<MegatronArguments> read_arguments(const Value* arguments, const std::string& path,
                                                 const std::set<std::string>& ignored) {
  ArgumentReader reader(arguments, path);
  MegatronArguments out;
  read_shell(reader, out);
  read_mixer(reader, out);
  read_cler(reader, out);
  out.attention_residuals = reader.boolean("attn_res_enabled", false);
  out.attention_residuals_eps = reader.number("attn_res_eps", 1e-6, 0, 1);
  refuse_unknown(arguments, reader, ignored);
  if (!reader.status().ok()) return reader.status();
  return out;
}

}  // namespace weir
