// The family that only adds: gated linear attention, RetNet, HGRN2, linear attention, gated slot
// attention, Mamba-2.
#include <cmath>
#include <limits>
#include <string>

#include "engine/read_mixer.h"

namespace weir {
namespace {

constexpr int32_t kConvWidthMax = 64;
constexpr double kExpandMax = 64;

// int(dim * expand) / heads, as Python computes it.
int32_t head_dim(ConfigReader& reader, const std::string& key, double fallback, int32_t dim,
                 int32_t heads) {
  const auto all = int32_t(double(dim) * reader.number(key.c_str(), fallback, 0, kExpandMax));
  if (all >= 1 && all <= kDimMax && all % heads == 0 && all / heads <= kHeadDimMax) {
    return all / heads;
  }
  reader.refuse_text(key, absl::StrCat("expected int(hidden_size * ", key,
                                       ") to be a multiple of num_heads (", heads, ") from 1 to ",
                                       kDimMax, ", at most ", kHeadDimMax, " a head, found ", all));
  return 1;
}

int32_t read_kv_heads(ConfigReader& reader, int32_t heads) {
  const int32_t kv_heads = reader.integer_or_null("num_kv_heads", heads, 1, kDimMax);
  if (heads % kv_heads == 0) return kv_heads;
  reader.refuse_text("num_kv_heads", absl::StrCat("expected a divisor of num_heads (", heads,
                                                  "), found ", kv_heads));
  return heads;
}

std::optional<ShortConv> read_optional_conv(ConfigReader& reader) {
  const int32_t width = reader.integer("conv_size", 4, 1, kConvWidthMax);
  if (!reader.boolean("use_short_conv", false)) return std::nullopt;
  return ShortConv{.width = width};
}

Activation read_feature(ConfigReader& reader) {
  if (!reader.is_set("feature_map")) return Activation::None;
  return reader.choice<Activation>("feature_map", Activation::None,
                                   {{"relu", Activation::Relu},
                                    {"sigmoid", Activation::Sigmoid},
                                    {"logsigmoid", Activation::LogSigmoid},
                                    {"silu", Activation::Silu},
                                    {"swish", Activation::Silu},
                                    {"sqrelu", Activation::ReluSquared},
                                    {"gelu", Activation::GeluTanh}});
}

}  // namespace

GlaMixer read_gla(ConfigReader& reader, int32_t dim) {
  GlaMixer mixer{.heads = reader.integer("num_heads", 4, 1, kDimMax)};
  mixer.kv_heads = read_kv_heads(reader, mixer.heads);
  mixer.key_dim = head_dim(reader, "expand_k", 0.5, dim, mixer.heads);
  mixer.value_dim = head_dim(reader, "expand_v", 1.0, dim, mixer.heads);
  mixer.conv = read_optional_conv(reader);
  mixer.feature = read_feature(reader);
  mixer.output_gate = reader.boolean("use_output_gate", true);
  if (reader.is_set("clamp_min")) {
    mixer.clamp_min = float(reader.number("clamp_min", 0, -1e30, 1e30));
  }
  return mixer;
}

RetNetMixer read_retnet(ConfigReader& reader, int32_t dim) {
  RetNetMixer mixer{.heads = reader.integer("num_heads", 8, 1, kDimMax)};
  mixer.kv_heads = read_kv_heads(reader, mixer.heads);
  mixer.key_dim = head_dim(reader, "expand_k", 1.0, dim, mixer.heads);
  mixer.value_dim = head_dim(reader, "expand_v", 2.0, dim, mixer.heads);
  mixer.feature = read_feature(reader);
  mixer.output_gate = reader.boolean("use_output_gate", true);
  if (mixer.key_dim % 2 != 0) {
    reader.refuse_text("expand_k", absl::StrCat("expected an even key dimension of a head, found ",
                                                mixer.key_dim));
  }
  return mixer;
}

Hgrn2Mixer read_hgrn2(ConfigReader& reader, int32_t dim) {
  Hgrn2Mixer mixer;
  if (reader.is_set("expand_ratio") || !reader.find("expand_ratio")) {
    mixer.head_dim = reader.integer("expand_ratio", 128, 1, kHeadDimMax);
    mixer.heads = dim / mixer.head_dim;
  } else {
    mixer.heads = reader.integer("num_heads", 1, 1, kDimMax);
    mixer.head_dim = dim / mixer.heads;
  }
  if (mixer.heads < 1 || mixer.heads * mixer.head_dim != dim || mixer.head_dim > kHeadDimMax) {
    reader.refuse_text("expand_ratio", absl::StrCat("expected heads that divide hidden_size (", dim,
                                                    "), found ", mixer.heads, " of ",
                                                    mixer.head_dim));
  }
  mixer.value_dim = mixer.head_dim;
  mixer.conv = read_optional_conv(reader);
  mixer.lower_bound = reader.boolean("use_lower_bound", true);
  return mixer;
}

LinearMixer read_linear_attn(ConfigReader& reader, int32_t dim) {
  LinearMixer mixer{.heads = reader.integer("num_heads", 4, 1, kDimMax)};
  mixer.kv_heads = read_kv_heads(reader, mixer.heads);
  mixer.key_dim = head_dim(reader, "expand_k", 1.0, dim, mixer.heads);
  mixer.value_dim = head_dim(reader, "expand_v", 1.0, dim, mixer.heads);
  mixer.feature = reader.choice<LinearFeature>(
      "feature_map", LinearFeature::ElementwiseProduct,
      {{"elementwise_product", LinearFeature::ElementwiseProduct},
       {"hedgehog", LinearFeature::Hedgehog},
       {"t2r", LinearFeature::T2r},
       {"elu", LinearFeature::EluPlusOne},
       {"relu", LinearFeature::Relu},
       {"identity", LinearFeature::Identity},
       {"dpfp", LinearFeature::Dpfp}});
  mixer.tied_feature = reader.boolean("tie_feature_map_qk", false);
  mixer.norm_q = reader.boolean("norm_q", false);
  mixer.norm_k = reader.boolean("norm_k", false);
  mixer.normalise = reader.boolean("norm_feature_map", false);
  return mixer;
}

GsaMixer read_gsa(ConfigReader& reader, int32_t dim) {
  GsaMixer mixer{.heads = reader.integer("num_heads", 4, 1, kDimMax)};
  mixer.kv_heads = read_kv_heads(reader, mixer.heads);
  // The layer's own arguments are misspelt, and so are some files.
  const auto expand = [&](const char* key, const char* misspelt) {
    return reader.find(key) ? key : reader.find(misspelt) ? misspelt : key;
  };
  mixer.key_dim = head_dim(reader, expand("expand_k", "exapnd_k"), 1.0, dim, mixer.heads);
  mixer.value_dim = head_dim(reader, expand("expand_v", "exapnd_v"), 1.0, dim, mixer.heads);
  const int32_t usual = reader.find("num_slots") ? mixer.key_dim : 64;
  mixer.slots = reader.integer_or_null("num_slots", usual, 1, kDimMax);
  if (int64_t(mixer.heads) * mixer.slots > kDimMax) {
    reader.refuse_text("num_slots", absl::StrCat("expected num_heads * num_slots of at most ",
                                                 kDimMax, ", found ", mixer.heads, " * ",
                                                 mixer.slots));
  }
  mixer.conv = read_optional_conv(reader);
  mixer.feature = reader.choice<GsaMixer::Feature>("feature_map", GsaMixer::Feature::Swish,
                                                   {{"swish", GsaMixer::Feature::Swish},
                                                    {"relu", GsaMixer::Feature::Relu},
                                                    {"t2r", GsaMixer::Feature::T2r}});
  mixer.gate_divisor = float(reader.number("gate_logit_normalizer", 8, 1e-6, 1e6));
  return mixer;
}

namespace {

std::optional<double> number_or_infinity(const nlohmann::json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  return std::nullopt;
}

// [min, max] of dt; the maximum may be the bare word Infinity.
void read_dt_limits(ConfigReader& reader, Mamba2Mixer& mixer) {
  mixer.dt_max = std::numeric_limits<float>::infinity();
  const char* key = reader.find("dt_limit") ? "dt_limit" : "time_step_limit";
  const nlohmann::json* limits = reader.find(key);
  if (!limits) return;
  const bool pair = limits->is_array() && limits->size() == 2 && (*limits)[0].is_number();
  const std::optional<double> max = pair ? number_or_infinity((*limits)[1]) : std::nullopt;
  if (!max || (*limits)[0].get<double>() < 0 || *max < (*limits)[0].get<double>()) {
    reader.refuse(key, "two numbers, 0 <= min <= max", *limits);
    return;
  }
  mixer.dt_min = (*limits)[0].get<float>();
  mixer.dt_max = float(*max);
}

}  // namespace

Mamba2Mixer read_mamba2(ConfigReader& reader, int32_t dim) {
  Mamba2Mixer mixer{.head_dim = reader.integer("head_dim", 64, 1, kHeadDimMax),
                    .state_dim = reader.integer("state_size", 128, 1, kHeadDimMax),
                    .groups = reader.integer("n_groups", 1, 1, kDimMax),
                    .conv = {.width = reader.integer("conv_kernel", 4, 1, kConvWidthMax)},
                    .bias = reader.boolean("use_bias", false),
                    .conv_bias = reader.boolean("use_conv_bias", true),
                    .norm = reader.boolean("rmsnorm", true),
                    .norm_before_gate = reader.boolean("norm_before_gate", false),
                    .skip_per_value = reader.boolean("D_has_hdim", false)};
  const auto inner = int64_t(double(dim) * reader.number("expand", 2, 0, kExpandMax));
  mixer.heads = int32_t(inner / mixer.head_dim);
  const int32_t told = reader.integer_or_null("num_heads", mixer.heads, 1, kDimMax);
  if (inner < 1 || inner > kDimMax || inner % mixer.head_dim != 0 || told != mixer.heads ||
      mixer.heads % mixer.groups != 0) {
    reader.refuse_text("num_heads", absl::StrCat("expected expand * hidden_size / head_dim = ",
                                                 double(inner) / mixer.head_dim,
                                                 ", whole and a multiple of n_groups (",
                                                 mixer.groups, "), found ", told));
    mixer.heads = mixer.groups;
  }
  if (int64_t(mixer.groups) * mixer.state_dim > kDimMax) {
    reader.refuse_text("state_size", absl::StrCat("expected n_groups * state_size of at most ",
                                                  kDimMax));
  }
  read_dt_limits(reader, mixer);
  return mixer;
}

}  // namespace weir
