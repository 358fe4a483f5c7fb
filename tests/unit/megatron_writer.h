#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/unit/dist_writer.h"
#include "tests/unit/hashed_weir_model.h"

namespace weir::test {

// Checkpoints of Megatron-LM whose weights are functions of their names: for a config of Weir's
// layout, the tensors and arguments that training such a model would have saved, in both formats.
class MegatronWriter {
 public:
  explicit MegatronWriter(const nlohmann::json& config) : c_(config) {
    add("embedding.word_embeddings.weight", {c_["vocab_size"], dim_});
    for (size_t layer = 0; layer < c_["layer_types"].size(); ++layer) add_layer(int64_t(layer));
    add("decoder.final_layernorm.weight", {dim_});
    if (!c_["tie_word_embeddings"]) add("output_layer.weight", {c_["vocab_size"], dim_});
    if (c_.contains("attention_residuals")) {
      for (size_t i = 1; i < 2 * c_["layer_types"].size(); ++i) {
        add(absl::StrCat("decoder.attn_res_queries.", i), {dim_});
      }
      add("decoder.attn_res_queries.final", {dim_});
    }
    set_arguments();
  }

  TestTensors& tensors() { return tensors_; }                        // by legacy name
  std::map<std::string, std::string>& arguments() { return arguments_; }  // pickled values

  // A `torch` checkpoint below `folder`. Extra entries of the model: name to pickled value.
  void write_legacy(const std::string& folder, const pickled::Pairs& extra = {}) const {
    const std::string rank = folder + "/iter_0000010/mp_rank_00";
    std::filesystem::create_directories(rank);
    write_file(folder + "/latest_checkpointed_iteration.txt", "10");
    TorchWriter writer;
    pickled::Pairs model;
    for (const auto& [name, tensor] : tensors_) model.emplace_back(name, writer.tensor(tensor));
    model.insert(model.end(), extra.begin(), extra.end());
    write_file(rank + "/model_optim_rng.pt",
               writer.bytes(pickled::dict({{"args", pickled_arguments()},
                                           {"checkpoint_version", pickled::real(3)},
                                           {"model", pickled::ordered_dict(model)}})));
  }

  // A `torch_dist` checkpoint: fused tensors in parts, and every tensor that can be in two shards,
  // cut along its rows or its columns. `stacked`: layers as rows of one tensor instead.
  void write_distributed(const std::string& folder, bool stacked) const {
    const std::string iteration = folder + "/iter_0000010";
    std::filesystem::create_directories(iteration);
    write_file(folder + "/latest_checkpointed_iteration.txt", "10\n");
    write_file(iteration + "/metadata.json", R"({"sharded_backend": "torch_dist"})");
    write_file(iteration + "/common.pt",
               TorchWriter().bytes(pickled::dict({{"args", pickled_arguments()}})));
    DistWriter writer;
    TestTensors parts;
    for (const auto& [name, tensor] : tensors_) add_parts(name, tensor, parts);
    if (stacked) {
      add_stacked(parts, writer);
    } else {
      size_t axis = 0;
      for (const auto& [name, tensor] : parts) writer.add_halves(name, tensor, axis++ % 2);
    }
    writer.add_object("decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1");
    writer.add_tensor("optimizer.state.exp_avg.x", TensorType::F32, {5}, {});
    writer.write(iteration);
  }

 private:
  using Shape = std::vector<int64_t>;

  void add(const std::string& name, const Shape& shape) {
    TestTensor tensor{.shape = shape};
    const int64_t columns = shape.empty() ? 1 : shape.back();
    for (int64_t i = 0; i < elements(shape); ++i) {
      tensor.values.push_back(float(megatron_element(name, columns, i)));
    }
    tensors_[name] = tensor;
  }

  void add_layer(int64_t layer) {
    const std::string kind = c_["layer_types"][size_t(layer)];
    const std::string at = absl::StrCat("decoder.layers.", layer, ".");
    const std::string from = at + "self_attention.";
    if (kind == "softmax") {
      const int64_t heads = c_["num_heads"], groups = c_["num_kv_heads"], width = c_["head_dim"];
      const int64_t each = heads / groups * (c_["attention_output_gate"] ? 2 : 1) + 2;
      add(from + "linear_qkv.layer_norm_weight", {dim_});
      add(from + "linear_qkv.weight", {groups * each * width, dim_});
      add(from + "linear_proj.weight", {dim_, heads * width});
    } else {
      add_recurrent(kind, layer);
      if (c_.contains("cler")) add_cler(from, layer);
      if (c_.contains("route")) add_route(layer);
    }
    const int64_t inner = c_["intermediate_size"];
    add(at + "mlp.linear_fc1.layer_norm_weight", {dim_});
    add(at + "mlp.linear_fc1.weight", {2 * inner, dim_});
    add(at + "mlp.linear_fc2.weight", {dim_, inner});
  }

  // The rows of in_proj, by torch_dist's names for them.
  std::vector<std::pair<std::string, int64_t>> projections(const std::string& kind) const {
    if (kind == "gdn") {
      return {{"query", qk_}, {"key", qk_}, {"value", vd_}, {"z", vd_}, {"beta", heads_},
              {"alpha", heads_}};
    }
    if (kind == "gdn2" && c_["gdn2_low_rank"]) {
      return {{"query", qk_}, {"key", qk_}, {"value", vd_}, {"erase", qk_}, {"write", vd_}};
    }
    if (kind == "gdn2") {
      return {{"query", qk_}, {"key", qk_}, {"value", vd_}, {"out_gate", vd_}, {"erase", qk_},
              {"write", vd_}, {"alpha", qk_}};
    }
    return {{"query", qk_}, {"key", qk_}, {"value", vd_}, {"beta", heads_}};
  }

  void add_recurrent(const std::string& kind, int64_t layer) {
    const std::string at = absl::StrCat("decoder.layers.", layer, ".");
    const std::string from = at + "self_attention.";
    add(kind == "kda" ? at + "input_layernorm.weight" : from + "in_proj.layer_norm_weight",
        {dim_});
    int64_t rows = 0;
    for (const auto& [name, count] : projections(kind)) rows += count;
    add(from + "in_proj.weight", {rows, dim_});
    add(from + "conv1d.weight", {2 * qk_ + vd_, 1, c_["linear_conv_kernel_dim"]});
    if (kind == "gdn" || kind == "kda") add(from + "A_log", {heads_});
    if (kind == "gdn") add(from + "dt_bias", {heads_});
    if (kind == "kda") {
      add(from + "dt_bias", {heads_ * dk_});
      add(from + "bottleneck_proj.weight", {2 * dv_, dim_});
      add(from + "f_out_proj.weight", {heads_ * dk_, dv_});
      add(from + "g_out_proj.weight", {vd_, dv_});
      add(from + "g_out_proj.bias", {vd_});
    }
    if (kind == "gdn2") {
      add(from + "A_log", {int64_t(c_["linear_num_key_heads"])});
      add(from + "dt_bias", {qk_});
    }
    if (kind == "gdn2" && c_["gdn2_low_rank"]) {
      add(from + "f_proj.0.weight", {dv_, dim_});
      add(from + "f_proj.1.weight", {qk_, dv_});
      add(from + "g_proj.0.weight", {dv_, dim_});
      add(from + "g_proj.1.weight", {vd_, dv_});
      add(from + "g_proj.1.bias", {vd_});
    }
    add(from + "out_norm.weight", {dv_});
    add(from + "out_proj.weight", {dim_, vd_});
  }

  void add_cler(const std::string& from, int64_t layer) {
    const nlohmann::json& cler = c_["cler"];
    const std::string mode = cler["mode"], gamma = cler["gamma"];
    const bool dynamic = cler["dynamic"];
    if (mode == "attnres") {
      add(from + "cler_attn_query", {heads_, dv_});
      if (dynamic) {
        add(from + "cler_attn_self_gate.weight", {1, dv_});
        add(from + "cler_attn_self_gate.bias", {1});
      } else {
        add(from + "cler_attn_self_bias", {heads_});
      }
      return;
    }
    if (mode == "dense_softmax" && layer > 0) {
      add(absl::StrCat("decoder.cler_route_queries.", layer), {heads_, dv_});
    }
    if (dynamic) {
      add(from + "cler_gate.weight", {1, dv_});
      add(from + "cler_gate.bias", {1});
    } else {
      add(from + "cler_gamma", gamma == "scalar" ? Shape{}
                               : gamma == "head" ? Shape{heads_}
                                                 : Shape{heads_, dv_});
    }
  }

  void add_route(int64_t layer) {
    const std::string at = absl::StrCat("decoder.cler_hidden_proj.", layer, ".");
    const std::string signal = c_["route"]["signal"];
    const int64_t rank = c_["route"]["rank"];
    const int64_t width = signal == "self" ? dim_ : signal == "both" ? 2 * vd_ : vd_;
    if (rank > 0) {
      add(at + "0.weight", {rank, width});
      add(at + "1.weight", {dim_, rank});
    } else {
      add(at + "weight", {dim_, width});
    }
    if (signal == "gated_value") add(absl::StrCat("decoder.cler_hidden_gate.", layer), {2});
  }

  void set_arguments();

  std::string pickled_arguments() const {
    return pickled::object("argparse", "Namespace",
                           pickled::dict({arguments_.begin(), arguments_.end()}));
  }

  // in_proj and conv1d in parts, each with its own name.
  void add_parts(const std::string& name, const TestTensor& tensor, TestTensors& out) const {
    std::vector<std::pair<std::string, int64_t>> parts;
    if (name.ends_with("in_proj.weight")) parts = projections(mixer_);
    if (name.ends_with("conv1d.weight")) parts = {{"query", qk_}, {"key", qk_}, {"value", vd_}};
    if (parts.empty()) {
      out[name] = tensor;
      return;
    }
    const int64_t row = elements(tensor.shape) / tensor.shape[0];
    auto next = tensor.values.begin();
    for (const auto& [part, rows] : parts) {
      TestTensor& piece = out[name + "." + part] = {tensor.type, tensor.shape, {}};
      piece.shape[0] = rows;
      piece.values.assign(next, next + rows * row);
      next += rows * row;
    }
  }

  // Layer l as shard l of a tensor with a leading layer axis.
  static void add_stacked(const TestTensors& tensors, DistWriter& writer) {
    std::map<std::string, std::map<int64_t, const TestTensor*>> layers;
    const std::string prefix = "decoder.layers.";
    for (const auto& [name, tensor] : tensors) {
      if (!name.starts_with(prefix)) {
        writer.add_halves(name, tensor, 0);
        continue;
      }
      const size_t dot = name.find('.', prefix.size());
      const int64_t layer = std::stoll(name.substr(prefix.size(), dot - prefix.size()));
      layers[prefix + name.substr(dot + 1)][layer] = &tensor;
    }
    for (const auto& [name, rows] : layers) {
      std::vector<DistWriter::Shard> shards;
      for (const auto& [layer, tensor] : rows) {
        DistWriter::Shard shard{Shape(tensor->shape.size() + 1, 0), *tensor};
        shard.first[0] = layer;
        shard.tensor.shape.insert(shard.tensor.shape.begin(), 1);
        shards.push_back(shard);
      }
      Shape shape = shards[0].tensor.shape;
      shape[0] = int64_t(shards.size());
      writer.add_tensor(name, shards[0].tensor.type, shape, shards);
    }
  }

  nlohmann::json c_;
  TestTensors tensors_;
  std::map<std::string, std::string> arguments_;
  int64_t dim_ = c_["hidden_size"];
  int64_t dk_ = c_.value("linear_key_head_dim", 0), dv_ = c_.value("linear_value_head_dim", 0);
  int64_t heads_ = c_.value("linear_num_value_heads", 0);
  int64_t qk_ = c_.value("linear_num_key_heads", 0) * dk_, vd_ = heads_ * dv_;
  std::string mixer_;                       // the recurrent layers' kind; "": none
};

inline void MegatronWriter::set_arguments() {
  using namespace pickled;
  std::vector<std::string> pattern;
  for (const auto& type : c_["layer_types"]) {
    pattern.push_back(integer(type == "softmax" ? 0 : 1));
    if (type != "softmax") mixer_ = type;
  }
  const bool low_rank = c_.value("gdn2_low_rank", false);
  const bool torch = c_.value("linear_qk_norm", "l2") == "l2_max";
  const std::map<std::string, std::string> variants = {
      {"delta", "delta_net"}, {"gdn", "gated_delta_net"}, {"kda", "kda"},
      {"gdn2", low_rank ? "gated_delta_net2" : "gated_delta_net_2"},
      {"linear", "linear_transformer"}};
  arguments_ = {
      {"num_layers", integer(int64_t(pattern.size()))},
      {"hidden_size", integer(dim_)},
      {"ffn_hidden_size", integer(c_["intermediate_size"])},
      {"num_attention_heads", integer(c_.value("num_heads", 4))},
      {"group_query_attention", boolean(true)},
      {"num_query_groups", integer(c_.value("num_kv_heads", 4))},
      {"kv_channels", integer(c_.value("head_dim", 8))},
      {"rotary_base", integer(c_.value("rope_theta", 500000))},
      {"rotary_percent", real(1)},
      {"rotary_interleaved", boolean(false)},
      {"position_embedding_type", text("rope")},
      {"layernorm_epsilon", real(c_["norm_eps"])},
      {"normalization", text("RMSNorm")},
      {"swiglu", boolean(true)},
      {"add_bias_linear", boolean(false)},
      {"qk_layernorm", boolean(false)},
      {"num_experts", none()},
      {"untie_embeddings_and_output_weights", boolean(!c_["tie_word_embeddings"])},
      {"params_dtype", global("torch", "bfloat16")},
      {"attention_backend", call("megatron.core.transformer.enums", "AttnBackend", {integer(5)})},
      {"attention_output_gate", boolean(true)},  // also where no layer has one: shapes count
      {"tensor_model_parallel_size", integer(1)}};
  // Megatron's own list of what a checkpoint's arguments restore leaves these two out.
  const double residual_eps = c_.contains("attention_residuals")
                                  ? c_["attention_residuals"].value("eps", 1e-6)
                                  : 1e-6;
  if (residual_eps != 1e-6) {
    arguments_["attn_res_enabled"] = boolean(true);
    arguments_["attn_res_eps"] = real(residual_eps);
  }
  if (mixer_.empty()) return;
  arguments_["experimental_attention_variant"] =
      text(variants.at(mixer_) + (torch ? "_pytorch" : ""));
  arguments_["linear_attention_freq"] = list(pattern);
  arguments_["linear_conv_kernel_dim"] = integer(c_["linear_conv_kernel_dim"]);
  arguments_["linear_key_head_dim"] = integer(dk_);
  arguments_["linear_value_head_dim"] = integer(dv_);
  arguments_["linear_num_key_heads"] = integer(c_["linear_num_key_heads"]);
  const bool stale = mixer_ == "delta" || mixer_ == "linear";  // there training ignores it
  arguments_["linear_num_value_heads"] = integer(stale ? 77 : heads_);
  arguments_["cler_enabled"] = boolean(c_.contains("cler") || c_.contains("route"));
  arguments_["cler_gamma_init"] = real(0.01);
  if (c_.contains("cler")) {
    const nlohmann::json& cler = c_["cler"];
    arguments_["cler_routing_mode"] = text(cler["mode"]);
    arguments_["cler_gamma_mode"] = text(cler["gamma"]);
    arguments_["cler_dynamic_gate"] = boolean(cler["dynamic"]);
    arguments_["cler_normalize_residual"] = boolean(cler["normalize"]);
    arguments_["cler_injection_site"] = text(cler["site"]);
    arguments_["cler_residual_norm_eps"] = real(cler["eps"]);
  }
  if (c_.contains("route")) {
    const std::string signal = c_["route"]["signal"];
    arguments_["cler_hidden_routing"] = boolean(true);
    arguments_["cler_hidden_rank"] = integer(c_["route"]["rank"]);
    arguments_["cler_hidden_route_value"] = boolean(signal == "value");
    arguments_["cler_hidden_gate_by_error"] = boolean(signal == "gated_value");
    arguments_["cler_hidden_route_both"] = boolean(signal == "both");
    arguments_["cler_hidden_self_transform"] = boolean(signal == "self");
    arguments_["cler_hidden_normalize_input"] = boolean(c_["route"]["normalize"]);
  }
}

}  // namespace weir::test
