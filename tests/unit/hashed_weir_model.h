#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/unit/checkpoint_writer.h"

namespace weir::test {

// Checkpoints of the Megatron family whose weights are functions of their Megatron names, in Weir's
// layout (engine/weir_layout.md). Nothing but names has to be stored to make one.

// A number in [-1, 1): element `index` of a tensor's hash, FNV-1a of its name seeding splitmix64.
inline double hashed(const std::string& name, int64_t index) {
  uint64_t seed = 0xCBF29CE484222325;
  for (const char letter : name) seed = (seed ^ uint8_t(letter)) * 0x100000001B3;
  uint64_t z = seed + (uint64_t(index) + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  z ^= z >> 31;
  return std::ldexp(double(z >> 11), -52) - 1;
}

// Element `index` of a Megatron tensor with this many columns, by what kind its name says it is.
inline double megatron_element(const std::string& name, int64_t columns, int64_t index) {
  const double u = hashed(name, index);
  const auto has = [&](const char* text) { return name.find(text) != std::string::npos; };
  if (has("norm")) return 1 + 0.1 * u;
  if (name.ends_with("A_log")) return std::log(1 + 15 * (u + 1) / 2);
  if (name.ends_with("dt_bias")) return u - 3;
  if (name.ends_with("cler_gamma")) return 0.3 + 0.2 * u;
  if (has("cler_hidden_gate")) return (index == 0 ? 1 : 0) + 0.2 * u;
  if (has("conv1d") || name.ends_with("bias")) return 0.5 * u;
  if (has("quer") || name.starts_with("embedding")) return u;
  return u * std::sqrt(3 / double(columns));
}

// Rows of a Megatron tensor: `count` from row `first` on of each block of `block` rows; 0: all that
// are wanted, from one block.
struct MegatronRows {
  int64_t first = 0, count = 0, block = 0;
};

class HashedWeirModel {
 public:
  explicit HashedWeirModel(const nlohmann::json& config) : c_(config) {
    add("model.embeddings.weight", {vocab_, dim_}, "embedding.word_embeddings.weight");
    for (int64_t layer = 0; layer < int64_t(c_["layer_types"].size()); ++layer) add_layer(layer);
    if (!c_["attention_residuals"].is_null()) {
      add("model.res_proj.weight", {dim_}, "decoder.attn_res_queries.final");
    }
    add("model.norm.weight", {dim_}, "decoder.final_layernorm.weight");
    add("lm_head.weight", {vocab_, dim_}, "output_layer.weight");
  }
  TestTensors& tensors() { return tensors_; }
  void write(const std::string& folder) const { write_checkpoint(folder, c_, tensors_); }

 private:
  void add(const std::string& name, const std::vector<int64_t>& shape, const std::string& megatron,
           MegatronRows rows = {}) {
    TestTensor tensor{.shape = shape};
    const int64_t columns = shape.empty() ? 1 : shape.back();
    const int64_t each = shape.size() < 2 ? 1 : elements(shape) / shape.front();
    const int64_t all = elements(shape) / each;
    if (rows.count == 0) rows.count = all;
    for (int64_t row = 0; row < all; ++row) {
      const int64_t from = row / rows.count * rows.block + rows.first + row % rows.count;
      for (int64_t i = 0; i < each; ++i) {
        tensor.values.push_back(float(megatron_element(megatron, columns, from * each + i)));
      }
    }
    tensors_[name] = tensor;
  }

  void add_layer(int64_t layer) {
    const std::string kind = c_["layer_types"][size_t(layer)];
    const std::string at = absl::StrCat("model.layers.", layer, ".");
    const std::string from = absl::StrCat("decoder.layers.", layer, ".");
    const bool softmax = kind == "softmax";
    add(at + "attn_norm.weight", {dim_},
        from + (kind == "kda" ? "input_layernorm.weight"
                : softmax     ? "self_attention.linear_qkv.layer_norm_weight"
                              : "self_attention.in_proj.layer_norm_weight"));
    softmax ? add_softmax(at + "attn.", from + "self_attention.")
            : add_recurrent(kind, at + "attn.", from + "self_attention.");
    add(at + "mlp_norm.weight", {dim_}, from + "mlp.linear_fc1.layer_norm_weight");
    add(at + "mlp.gate_proj.weight", {inner_, dim_}, from + "mlp.linear_fc1.weight");
    add(at + "mlp.up_proj.weight", {inner_, dim_}, from + "mlp.linear_fc1.weight",
        {.first = inner_});
    add(at + "mlp.down_proj.weight", {dim_, inner_}, from + "mlp.linear_fc2.weight");
    if (!c_["attention_residuals"].is_null()) {
      const std::string queries = "decoder.attn_res_queries.";
      const int64_t half = 2 * layer;
      if (half > 0) add(at + "attn_res_proj.weight", {dim_}, absl::StrCat(queries, half));
      add(at + "mlp_res_proj.weight", {dim_}, absl::StrCat(queries, half + 1));
    }
    if (softmax) return;
    if (!c_["route"].is_null()) add_route(at, absl::StrCat(".", layer));
    if (!c_["cler"].is_null()) add_cler(at + "attn.", from + "self_attention.", layer);
  }

  void add_softmax(const std::string& at, const std::string& from) {
    const int64_t heads = c_["num_heads"], groups = c_["num_kv_heads"], width = c_["head_dim"];
    const int64_t per = heads / groups * width, gate = c_["attention_output_gate"] ? per : 0;
    const int64_t block = per + gate + 2 * width;
    const std::string fused = from + "linear_qkv.weight";
    add(at + "q_proj.weight", {groups * per, dim_}, fused, {0, per, block});
    if (gate > 0) add(at + "g_proj.weight", {groups * gate, dim_}, fused, {per, gate, block});
    add(at + "k_proj.weight", {groups * width, dim_}, fused, {per + gate, width, block});
    add(at + "v_proj.weight", {groups * width, dim_}, fused, {per + gate + width, width, block});
    add(at + "o_proj.weight", {dim_, groups * per}, from + "linear_proj.weight");
  }

  void add_recurrent(const std::string& kind, const std::string& at, const std::string& from) {
    int64_t row = 0;
    const auto next = [&](const char* name, int64_t rows) {
      add(at + name + "_proj.weight", {rows, dim_}, from + "in_proj.weight", {.first = row});
      row += rows;
    };
    const bool low_rank = c_["gdn2_low_rank"];
    next("q", keys_);
    next("k", keys_);
    next("v", values_);
    if (kind == "delta" || kind == "gdn" || kind == "kda") {
      if (kind == "gdn") next("g", values_);
      next("b", heads_);
      if (kind == "gdn") next("a", heads_);
    } else if (kind == "gdn2") {
      if (!low_rank) next("g", values_);
      next("b", keys_);
      next("w", values_);
      if (!low_rank) next("a", keys_);
    }
    if (kind == "gdn") add_decay(at, from, heads_, heads_);
    if (kind == "gdn2") add_decay(at, from, key_heads_, keys_);
    if (kind == "gdn2" && low_rank) {
      for (const std::string name : {"f_proj.0.weight", "g_proj.0.weight"}) {
        add(at + name, {value_dim_, dim_}, from + name);
      }
      add(at + "f_proj.1.weight", {keys_, value_dim_}, from + "f_proj.1.weight");
      add(at + "g_proj.1.weight", {values_, value_dim_}, from + "g_proj.1.weight");
      add(at + "g_proj.1.bias", {values_}, from + "g_proj.1.bias");
    }
    if (kind == "kda") add_kda(at, from);
    add(at + "q_conv1d.weight", {keys_, 1, 4}, from + "conv1d.weight");
    add(at + "k_conv1d.weight", {keys_, 1, 4}, from + "conv1d.weight", {.first = keys_});
    add(at + "v_conv1d.weight", {values_, 1, 4}, from + "conv1d.weight", {.first = 2 * keys_});
    add(at + "o_norm.weight", {value_dim_}, from + "out_norm.weight");
    add(at + "o_proj.weight", {dim_, values_}, from + "out_proj.weight");
  }

  void add_decay(const std::string& at, const std::string& from, int64_t heads, int64_t numbers) {
    add(at + "A_log", {heads}, from + "A_log");
    add(at + "dt_bias", {numbers}, from + "dt_bias");
  }

  void add_kda(const std::string& at, const std::string& from) {
    const int64_t decays = heads_ * key_dim_;
    add_decay(at, from, heads_, decays);
    const std::string both = from + "bottleneck_proj.weight";
    add(at + "f_proj.0.weight", {value_dim_, dim_}, both);
    add(at + "g_proj.0.weight", {value_dim_, dim_}, both, {.first = value_dim_});
    add(at + "f_proj.1.weight", {decays, value_dim_}, from + "f_out_proj.weight");
    add(at + "g_proj.1.weight", {values_, value_dim_}, from + "g_out_proj.weight");
    add(at + "g_proj.1.bias", {values_}, from + "g_out_proj.bias");
  }

  void add_route(const std::string& at, const std::string& layer) {
    const std::string signal = c_["route"]["signal"], from = "decoder.cler_hidden_proj" + layer;
    const int64_t rank = c_["route"].value("rank", 0);
    const int64_t in = signal == "self" ? dim_ : signal == "both" ? 2 * values_ : values_;
    if (rank > 0) {
      add(at + "route_proj.0.weight", {rank, in}, from + ".0.weight");
      add(at + "route_proj.1.weight", {dim_, rank}, from + ".1.weight");
    } else {
      add(at + "route_proj.weight", {dim_, in}, from + ".weight");
    }
    if (signal == "gated_value") add(at + "route_gate", {2}, "decoder.cler_hidden_gate" + layer);
  }

  void add_cler(const std::string& at, const std::string& from, int64_t layer) {
    const nlohmann::json& cler = c_["cler"];
    const std::string mode = cler.value("mode", "latest"), gamma = cler.value("gamma", "scalar");
    const bool attends = mode == "attnres";
    if (mode == "dense_softmax" && layer > 0) {
      add(at + "cler_query", {heads_, value_dim_},
          absl::StrCat("decoder.cler_route_queries.", layer));
    }
    if (attends) add(at + "cler_query", {heads_, value_dim_}, from + "cler_attn_query");
    if (cler.value("dynamic", false)) {
      const std::string gate = attends ? "cler_self_gate." : "cler_gate.";
      const std::string old = from + (attends ? "cler_attn_self_gate." : "cler_gate.");
      add(at + gate + "weight", {1, value_dim_}, old + "weight");
      add(at + gate + "bias", {1}, old + "bias");
    } else if (attends) {
      add(at + "cler_self_bias", {heads_}, from + "cler_attn_self_bias");
    } else if (gamma == "scalar") {
      add(at + "cler_gamma", {}, from + "cler_gamma");
    } else if (gamma == "head") {
      add(at + "cler_gamma", {heads_}, from + "cler_gamma");
    } else {
      add(at + "cler_gamma", {heads_, value_dim_}, from + "cler_gamma");
    }
  }

  nlohmann::json c_;
  TestTensors tensors_;
  int64_t dim_ = c_["hidden_size"], inner_ = c_["intermediate_size"], vocab_ = c_["vocab_size"];
  int64_t key_heads_ = c_["linear_num_key_heads"], heads_ = c_["linear_num_value_heads"];
  int64_t key_dim_ = c_["linear_key_head_dim"], value_dim_ = c_["linear_value_head_dim"];
  int64_t keys_ = key_heads_ * key_dim_, values_ = heads_ * value_dim_;
};

}  // namespace weir::test
