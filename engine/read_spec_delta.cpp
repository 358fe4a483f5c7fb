#include <algorithm>
#include <cmath>

#include "engine/read_mixer.h"

namespace weir {
namespace {

constexpr int32_t kConvWidthMax = 64;
constexpr int32_t kMemoriesMax = 32;
constexpr int32_t kUpdatesMax = 1024;
constexpr double kExpandMax = 64;

std::optional<ShortConv> read_conv(ConfigReader& reader) {
  const bool used = reader.boolean("use_short_conv", true);
  const int32_t width = reader.integer("conv_size", 4, 1, kConvWidthMax);
  if (!used) return std::nullopt;
  return ShortConv{.width = width};
}

// int(dim * expand) as Python computes it.
int32_t expanded(ConfigReader& reader, const char* key, double fallback, int32_t dim) {
  const double product = double(dim) * reader.number(key, fallback, 0, kExpandMax);
  return int32_t(product);
}

void check_sizes(ConfigReader& reader, const DeltaMixer& mixer) {
  const auto check = [&](const char* key, const char* what, int64_t found, int64_t max) {
    if (found >= 1 && found <= max) return;
    reader.refuse_text(key, absl::StrCat("expected a ", what, " from 1 to ", max, ", found ",
                                         found));
  };
  check("head_dim", "key dimension of a head", mixer.key_dim, kHeadDimMax);
  check("expand_v", "value dimension of a head", mixer.value_dim, kHeadDimMax);
  check("num_heads", "key dimension of all heads", int64_t(mixer.key_heads) * mixer.key_dim,
        kDimMax);
  check("num_heads", "value dimension of all heads", int64_t(mixer.value_heads) * mixer.value_dim,
        kDimMax);
}

// What gated_deltanet and later ones share: head_dim is explicit; most may have more value heads.
DeltaMixer read_heads(ConfigReader& reader, int32_t heads, int32_t head_dim, double expand_v,
                      bool groups = true) {
  DeltaMixer mixer;
  mixer.key_heads = mixer.value_heads = reader.integer("num_heads", heads, 1, kDimMax);
  if (groups) {
    mixer.value_heads = reader.integer_or_null("num_v_heads", mixer.key_heads, 1, kDimMax);
  }
  if (mixer.value_heads % mixer.key_heads != 0) {
    reader.refuse_text("num_v_heads", absl::StrCat("expected a multiple of num_heads (",
                                                   mixer.key_heads, "), found ",
                                                   mixer.value_heads));
  }
  mixer.key_dim = reader.integer("head_dim", head_dim, 1, kHeadDimMax);
  mixer.value_dim = expanded(reader, "expand_v", expand_v, mixer.key_dim);
  const double exact = mixer.key_dim * reader.number("expand_v", expand_v, 0, kExpandMax);
  if (std::abs(exact - mixer.value_dim) > 1e-5 * exact) {
    reader.refuse_text("expand_v", absl::StrCat("expected a whole head_dim * expand_v, found ",
                                                exact));
  }
  mixer.conv = read_conv(reader);
  mixer.negative_eigenvalues = reader.boolean("allow_neg_eigval", false);
  check_sizes(reader, mixer);
  return mixer;
}

}  // namespace

DeltaMixer read_delta_net(ConfigReader& reader, int32_t dim) {
  DeltaMixer mixer{.decay = DecayGate::None};
  mixer.key_heads = mixer.value_heads = reader.integer("num_heads", 16, 1, kDimMax);
  const auto head_dim = [&](const char* key) {
    const int32_t all = expanded(reader, key, 1.0, dim);
    if (all < 1 || all > kDimMax || all % mixer.key_heads != 0) {
      reader.refuse_text(key, absl::StrCat("expected int(hidden_size * ", key,
                                           ") to be a multiple of num_heads (", mixer.key_heads,
                                           ") from 1 to ", kDimMax, ", found ", all));
    }
    return all / mixer.key_heads;
  };
  mixer.key_dim = head_dim("expand_k");
  mixer.value_dim = head_dim("expand_v");
  mixer.strength = reader.boolean("use_beta", true) ? Strength::Beta : Strength::One;
  mixer.output_gate = reader.boolean("use_gate", false) ? OutputGate::Silu : OutputGate::None;
  mixer.conv = read_conv(reader);
  mixer.negative_eigenvalues = reader.boolean("allow_neg_eigval", false);
  mixer.qk_activation =
      reader.choice<Activation>("qk_activation", Activation::Silu,
                                {{"silu", Activation::Silu},
                                 {"relu", Activation::Relu},
                                 {"elu", Activation::EluPlusOne},
                                 {"identity", Activation::None}});
  mixer.qk_norm =
      reader.choice<QkNorm>("qk_norm", QkNorm::L2, {{"l2", QkNorm::L2}, {"sum", QkNorm::Sum}});
  check_sizes(reader, mixer);
  return mixer;
}

DeltaMixer read_gated_deltanet(ConfigReader& reader) {
  DeltaMixer mixer = read_heads(reader, 6, 256, 2.0);
  mixer.output_gate = reader.boolean("use_gate", true) ? OutputGate::Silu : OutputGate::None;
  return mixer;
}

// fla drops no token from a memory that is full: `capacity` has no effect there, nor here.
MomMixer read_mom(ConfigReader& reader) {
  DeltaMixer sizes;
  sizes.key_heads = sizes.value_heads = reader.integer("num_heads", 4, 1, kDimMax);
  sizes.key_dim = reader.integer("head_dim", 256, 1, kHeadDimMax);
  sizes.value_dim = expanded(reader, "expand_v", 1.0, sizes.key_dim);
  check_sizes(reader, sizes);
  reader.choice<int>("mom_backend", 0, {{"gated_deltanet", 0}});
  MomMixer mixer{.heads = sizes.key_heads,
                 .key_dim = sizes.key_dim,
                 .value_dim = sizes.value_dim,
                 .memories = reader.integer("num_memories", 4, 1, kMemoriesMax),
                 .shared = reader.boolean("shared_mem", true),
                 .single_projection = reader.boolean("single_kv_proj", false),
                 .output_gate = reader.boolean("use_output_gate", true)};
  mixer.chosen = reader.integer("topk", std::min(2, mixer.memories), 1, mixer.memories);
  const std::optional<ShortConv> conv = read_conv(reader);
  if (!conv) {
    reader.refuse("use_short_conv", "true for a mom", *reader.find("use_short_conv"));
  }
  mixer.conv = conv.value_or(ShortConv{});
  return mixer;
}

Mixer read_gated_deltaproduct(ConfigReader& reader) {
  DeltaMixer one = read_heads(reader, 6, 256, 2.0, false);
  const int32_t updates = reader.integer("num_householder", 1, 1, kUpdatesMax);
  const bool decay = reader.boolean("use_forget_gate", false);
  const bool gate = reader.boolean("use_output_gate", true);
  if (updates == 1) {
    one.decay = decay ? DecayGate::PerHead : DecayGate::None;
    one.output_gate = gate ? OutputGate::Silu : OutputGate::None;
    return one;
  }
  const int64_t widest = int64_t(one.key_heads) * std::max(one.key_dim, one.value_dim);
  if (updates * widest > kDimMax) {
    reader.refuse_text("num_householder", absl::StrCat("expected all its keys, and values, to be "
                                                       "at most ", kDimMax, " numbers, found ",
                                                       updates * widest));
  }
  return DeltaProductMixer{.heads = one.key_heads,
                           .key_dim = one.key_dim,
                           .value_dim = one.value_dim,
                           .updates = updates,
                           .decay = decay,
                           .negative_eigenvalues = one.negative_eigenvalues,
                           .output_gate = gate,
                           .conv = one.conv};
}

CombaMixer read_comba(ConfigReader& reader) {
  const DeltaMixer sizes = read_heads(reader, 6, 256, 2.0);
  if (sizes.value_heads != sizes.key_heads) {
    reader.refuse_text("num_v_heads", absl::StrCat("expected num_heads (", sizes.key_heads,
                                                   ") for comba, found ", sizes.value_heads));
  }
  if (sizes.negative_eigenvalues) {
    reader.refuse("allow_neg_eigval", "false for comba", *reader.find("allow_neg_eigval"));
  }
  // Files of mid-2025 call the gate's key as gated_deltanet does. use_output_correction,
  // use_inner_decay and correction_factor exist, and the layer is never told of them.
  const char* gate = reader.find("use_output_gate") ? "use_output_gate" : "use_gate";
  return {.heads = sizes.key_heads,
          .key_dim = sizes.key_dim,
          .value_dim = sizes.value_dim,
          .output_gate = reader.boolean(gate, true),
          .conv = sizes.conv};
}

DeltaMixer read_kda(ConfigReader& reader) {
  DeltaMixer mixer = read_heads(reader, 16, 128, 1.0);
  mixer.decay = DecayGate::PerChannel;
  mixer.output_gate = OutputGate::LowRankSigmoid;
  const bool safe_gate = reader.boolean("safe_gate", false);
  if (reader.is_set("lower_bound")) {
    mixer.lower_bound = float(reader.number("lower_bound", -5, -5, 0));
    if (mixer.lower_bound == 0) {
      reader.refuse("lower_bound", "a number in [-5, 0)", *reader.find("lower_bound"));
    }
  } else if (safe_gate) {
    reader.refuse_text("lower_bound", "expected a number in [-5, 0), as safe_gate is true, "
                                      "found none");
  }
  return mixer;
}

DeltaMixer read_gdn2(ConfigReader& reader) {
  DeltaMixer mixer = read_heads(reader, 16, 128, 1.0);
  mixer.decay = DecayGate::PerKeyChannel;
  mixer.strength = Strength::EraseWrite;
  mixer.output_gate = OutputGate::LowRankSigmoid;
  if (reader.boolean("safe_gate", false)) {
    reader.refuse("safe_gate", "false for gdn2", *reader.find("safe_gate"));
  }
  if (reader.is_set("lower_bound")) {
    reader.refuse("lower_bound", "null for gdn2", *reader.find("lower_bound"));
  }
  return mixer;
}

}  // namespace weir
