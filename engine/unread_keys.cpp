#include "engine/unread_keys.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace weir {
namespace {

using nlohmann::json;

// What only training and other programs read, in the files that flash-linear-attention and
// transformers write, and what is of no use where another key says so.
constexpr std::array<std::string_view, 101> kWithoutMeaning = {
    // transformers' base class
    "add_cross_attention", "architectures", "auto_map", "bad_words_ids", "begin_suppress_tokens",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "label2id",
    "length_penalty", "max_length", "min_length", "model_max_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
    // how weights begin, and what training adds to the loss
    "A_init_range", "aux_loss_scale", "capacity", "conv_init", "dt_init_floor", "dt_max", "dt_min",
    "initializer_range", "initializer_std", "rescale_prenorm_residual", "use_l2warp",
    "use_layer_wise_balance", "attention_dropout", "dropout", "hidden_dropout",
    // which of several kernels computes the same
    "attn_mode", "chunk_size", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_norm",
    "fuse_swiglu", "max_position_embeddings", "residual_in_fp32", "rms_norm",
    "use_fast_path", "use_mambapy", "ssm_cfg",
    // written by fla and not read by it any more
    "use_gk", "use_gv", "use_output_norm", "use_beta", "share_conv_kernel", "converted_from",
    // of options that may be off: then nobody asks
    "conv_size", "expand_ratio", "feature_map", "gate_logit_normalizer", "gate_low_rank_dim",
    "hidden_ratio", "intermediate_size", "layer_norm_epsilon", "lower_bound", "norm_before_gate",
    "rms_norm_eps", "rope_theta", "window_size"};

void add_unread(const json& object, const std::string& prefix, const std::set<std::string>& asked,
                std::vector<std::string>& unread) {
  for (const auto& [key, value] : object.items()) {
    const std::string name = prefix + key;
    const bool known = key.starts_with('_') || std::ranges::count(kWithoutMeaning, key) > 0;
    if (prefix.empty() && known) continue;
    if (!asked.contains(name)) unread.push_back(name);
    // Whether somebody looked into it: then each of its keys should have been asked for.
    const auto look = [&](const json& inner, const std::string& at) {
      const auto first = asked.lower_bound(at);
      if (!inner.is_object() || first == asked.end() || !first->starts_with(at)) return;
      add_unread(inner, at, asked, unread);
    };
    look(value, name + ".");
    if (!value.is_array()) continue;
    for (size_t i = 0; i < value.size(); ++i) look(value[i], absl::StrCat(name, "[", i, "]."));
  }
}

}  // namespace

std::vector<std::string> unread_keys(const json& config, const std::set<std::string>& asked) {
  std::vector<std::string> unread;
  if (config.is_object()) add_unread(config, "", asked, unread);
  return unread;
}

}  // namespace weir
