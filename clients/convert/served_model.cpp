#include "clients/convert/served_model.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "clients/convert/tensor_plan.h"

namespace weir {
namespace {

using Elements = TensorPlan::Elements;

// A share of a recurrent layer's fused projection: its name in the checkpoint and in the folder.
struct Projection {
  Part part;
  const char* served = nullptr;             // null: not served
};

class Planner {
 public:
  Planner(const MegatronCheckpoint& checkpoint, const MegatronArguments& arguments)
      : args_(arguments), plan_(checkpoint, arguments.layers) {}

  absl::StatusOr<ServedModel> plan(int64_t eos) {
    shell();
    for (int64_t layer = 0; layer < args_.layers; ++layer) plan_layer(layer);
    attention_residuals();
    plan_.refuse_tensors_left();
    if (!plan_.status().ok()) return plan_.status();
    ServedModel model{.config = config(eos)};
    model.tensors = std::move(plan_).tensors();
    return model;
  }

 private:
  void write_gain(const std::string& name, const Shape& shape, Elements elements) {
    plan_.write(name, shape, std::move(elements), args_.gain_plus_one);
  }
  // A tensor that only gets another name.
  void rename(const std::string& from, const std::string& to, const Shape& shape) {
    plan_.write(to, shape, plan_.take(from, shape));
  }

  void shell() {
    const int64_t d = args_.hidden;
    const std::string embedding = "embedding.word_embeddings.weight";
    const Shape found = plan_.shape(embedding);
    vocab_ = found.empty() ? 0 : found[0];
    rename(embedding, "model.embeddings.weight", {vocab_, d});
    write_gain("model.norm.weight", {d}, plan_.take("decoder.final_layernorm.weight", {d}));
    if (!args_.tied_embeddings) rename("output_layer.weight", "lm_head.weight", {vocab_, d});
  }

  void plan_layer(int64_t layer) {
    from_ = absl::StrCat("decoder.layers.", layer, ".");
    attention_ = from_ + "self_attention.";
    to_ = absl::StrCat("model.layers.", layer, ".");
    const bool softmax = plan_.has(attention_ + "linear_qkv.weight");
    if (!args_.recurrent.empty() && args_.recurrent[size_t(layer)] == softmax) {
      plan_.refuse(attention_ + "linear_qkv.weight",
                   softmax ? "expected nothing: linear_attention_freq says the layer is recurrent"
                           : "expected a softmax layer by linear_attention_freq, found nothing");
    }
    layer_types_.push_back(softmax ? "softmax" : args_.mixer);
    if (softmax) {
      softmax_layer();
    } else {
      recurrent_layer(layer);
    }
    const int64_t d = args_.hidden, f = args_.ffn_hidden;
    write_gain(to_ + "mlp_norm.weight", {d},
               plan_.take_first_of({from_ + "mlp.linear_fc1.layer_norm_weight",
                                    from_ + "pre_mlp_layernorm.weight"},
                                   {d}));
    const auto halves =
        plan_.take_parts(from_ + "mlp.linear_fc1.weight", {{"_w", f}, {"_v", f}}, {d});
    plan_.write(to_ + "mlp.gate_proj.weight", {f, d}, halves[0]);
    plan_.write(to_ + "mlp.up_proj.weight", {f, d}, halves[1]);
    rename(from_ + "mlp.linear_fc2.weight", to_ + "mlp.down_proj.weight", {d, f});
  }

  void mix_norm(const char* fused) {
    write_gain(to_ + "attn_norm.weight", {args_.hidden},
               plan_.take_first_of({attention_ + fused + ".layer_norm_weight",
                                    from_ + "input_layernorm.weight"},
                                   {args_.hidden}));
  }

  // linear_qkv holds a block for each group: its query heads, their gates if there are any, its
  // key, its value.
  void softmax_layer() {
    mix_norm("linear_qkv");
    const int64_t d = args_.hidden, hd = args_.head_dim, groups = args_.kv_heads,
                  per = args_.heads / groups;
    const std::string name = attention_ + "linear_qkv.weight";
    const Shape found = plan_.shape(name);
    const bool gated = !found.empty() && found[0] == groups * (2 * per + 2) * hd;
    if (gate_ && *gate_ != gated) plan_.refuse(name, "expected an output gate in all or no layers");
    gate_ = gated;
    const Elements all = plan_.take(name, {groups * ((gated ? 2 : 1) * per + 2) * hd, d});
    if (all.empty()) return;
    Elements q, g, k, v;
    int64_t first = all[0].first;
    const auto take_rows = [&](Elements& to, int64_t heads) {
      to.push_back({.source = all[0].source, .first = first, .count = heads * hd * d});
      first += heads * hd * d;
    };
    for (int64_t group = 0; group < groups; ++group) {
      take_rows(q, per);
      if (gated) take_rows(g, per);
      take_rows(k, 1);
      take_rows(v, 1);
    }
    const int64_t rows = args_.heads * hd;
    plan_.write(to_ + "attn.q_proj.weight", {rows, d}, q);
    plan_.write(to_ + "attn.g_proj.weight", {rows, d}, g);
    plan_.write(to_ + "attn.k_proj.weight", {groups * hd, d}, k);
    plan_.write(to_ + "attn.v_proj.weight", {groups * hd, d}, v);
    rename(attention_ + "linear_proj.weight", to_ + "attn.o_proj.weight", {d, rows});
  }

  void recurrent_layer(int64_t layer) {
    if (args_.mixer.empty()) {
      return plan_.refuse(attention_ + "linear_qkv.weight",
                          "expected a softmax layer, as experimental_attention_variant is None; "
                          "found nothing");
    }
    if (plan_.has(attention_ + "fla_layer.q_proj.weight")) {
      fla_layer();
    } else {
      fused_layer();
    }
    if (first_recurrent_ < 0) first_recurrent_ = layer;
    if (args_.has_cler) cler(layer == first_recurrent_);
    if (args_.has_route) route(layer);
  }

  std::vector<Projection> projections(bool low_rank) const {
    const int64_t qk = args_.key_heads * args_.key_dim, vd = args_.value_heads * args_.value_dim,
                  heads = args_.value_heads;
    std::vector<Projection> out = {{{".query", qk}, "q_proj"},
                                   {{".key", qk}, "k_proj"},
                                   {{".value", vd}, "v_proj"}};
    const auto add = [&](const char* name, int64_t rows, const char* served) {
      out.push_back({{name, rows}, served});
    };
    if (args_.mixer == "gdn") {
      add(".z", vd, "g_proj");
      add(".beta", heads, "b_proj");
      add(".alpha", heads, "a_proj");
    } else if (args_.mixer == "gdn2") {
      if (!low_rank) add(".out_gate", vd, "g_proj");
      add(".erase", qk, "b_proj");
      add(".write", vd, "w_proj");
      if (!low_rank) add(".alpha", qk, "a_proj");
    } else {  // the additive memory of `linear` never uses its beta
      add(".beta", heads, args_.mixer == "linear" ? nullptr : "b_proj");
    }
    return out;
  }

  void fused_layer() {
    const int64_t d = args_.hidden, vd = args_.value_heads * args_.value_dim;
    const std::string& mixer = args_.mixer;
    const bool low_rank = mixer == "gdn2" && plan_.has(attention_ + "f_proj.0.weight");
    if (low_rank_ && *low_rank_ != low_rank) {
      plan_.refuse(attention_ + "f_proj.0.weight", "expected in all or no layers");
    }
    low_rank_ = low_rank;
    // The low-rank gates read the residual stream as it is, which a norm of its own would change.
    if (low_rank) {
      write_gain(to_ + "attn_norm.weight", {d},
                 plan_.take(attention_ + "in_proj.layer_norm_weight", {d}));
    } else {
      mix_norm("in_proj");
    }
    const std::vector<Projection> shares = projections(low_rank);
    std::vector<Part> parts;
    for (const Projection& share : shares) parts.push_back(share.part);
    const auto elements = plan_.take_parts(attention_ + "in_proj.weight", parts, {d});
    for (size_t i = 0; i < shares.size(); ++i) {
      if (shares[i].served == nullptr) continue;
      plan_.write(absl::StrCat(to_, "attn.", shares[i].served, ".weight"), {parts[i].rows, d},
                  elements[i]);
    }
    convolution(parts);
    if (mixer == "kda") kda_low_rank();
    if (low_rank) gdn2_low_rank();
    if (mixer == "gdn" || mixer == "kda" || mixer == "gdn2") decay();
    write_gain(to_ + "attn.o_norm.weight", {args_.value_dim},
               plan_.take(attention_ + "out_norm.weight", {args_.value_dim}));
    rename(attention_ + "out_proj.weight", to_ + "attn.o_proj.weight", {d, vd});
  }

  // `parts` begins with query, key and value; only those are convolved.
  void convolution(std::vector<Part> parts) {
    parts.resize(3);
    const auto elements =
        plan_.take_parts(attention_ + "conv1d.weight", parts, {1, args_.conv_width});
    for (size_t i = 0; i < parts.size(); ++i) {
      const char letter = "qkv"[i];
      plan_.write(absl::StrCat(to_, "attn.", std::string(1, letter), "_conv1d.weight"),
                  {parts[i].rows, 1, args_.conv_width}, elements[i]);
    }
  }

  void kda_low_rank() {
    const int64_t d = args_.hidden, dv = args_.value_dim, vd = args_.value_heads * dv;
    const auto halves =
        plan_.take_parts(attention_ + "bottleneck_proj.weight", {{".f", dv}, {".g", dv}}, {d});
    plan_.write(to_ + "attn.f_proj.0.weight", {dv, d}, halves[0]);
    plan_.write(to_ + "attn.g_proj.0.weight", {dv, d}, halves[1]);
    rename(attention_ + "f_out_proj.weight", to_ + "attn.f_proj.1.weight",
           {args_.value_heads * args_.key_dim, dv});
    rename(attention_ + "g_out_proj.weight", to_ + "attn.g_proj.1.weight", {vd, dv});
    rename(attention_ + "g_out_proj.bias", to_ + "attn.g_proj.1.bias", {vd});
  }

  void gdn2_low_rank() {
    const int64_t d = args_.hidden, dv = args_.value_dim, vd = args_.value_heads * dv;
    const int64_t qk = args_.key_heads * args_.key_dim;
    rename(attention_ + "f_proj.0.weight", to_ + "attn.f_proj.0.weight", {dv, d});
    rename(attention_ + "f_proj.1.weight", to_ + "attn.f_proj.1.weight", {qk, dv});
    rename(attention_ + "g_proj.0.weight", to_ + "attn.g_proj.0.weight", {dv, d});
    rename(attention_ + "g_proj.1.weight", to_ + "attn.g_proj.1.weight", {vd, dv});
    rename(attention_ + "g_proj.1.bias", to_ + "attn.g_proj.1.bias", {vd});
  }

  // One decay a value head (gdn), its channels (kda), or a key head's channels (gdn2).
  void decay() {
    const int64_t heads = args_.mixer == "gdn2" ? args_.key_heads : args_.value_heads;
    const int64_t biases = args_.mixer == "gdn" ? heads : heads * args_.key_dim;
    rename(attention_ + "A_log", to_ + "attn.A_log", {heads});
    rename(attention_ + "dt_bias", to_ + "attn.dt_bias", {biases});
  }

  // KDA through fla's own layer: its names are those of the folder.
  void fla_layer() {
    mix_norm("in_proj");
    const std::string from = attention_ + "fla_layer.", to = to_ + "attn.";
    const int64_t d = args_.hidden, dv = args_.value_dim, heads = args_.value_heads,
                  vd = heads * dv, qk = args_.key_heads * args_.key_dim, taps = args_.conv_width;
    const std::vector<std::pair<std::string, Shape>> tensors = {
        {"q_proj.weight", {qk, d}},          {"k_proj.weight", {qk, d}},
        {"v_proj.weight", {vd, d}},          {"b_proj.weight", {heads, d}},
        {"f_proj.0.weight", {dv, d}},        {"f_proj.1.weight", {heads * args_.key_dim, dv}},
        {"g_proj.0.weight", {dv, d}},        {"g_proj.1.weight", {vd, dv}},
        {"g_proj.1.bias", {vd}},             {"q_conv1d.weight", {qk, 1, taps}},
        {"k_conv1d.weight", {qk, 1, taps}},  {"v_conv1d.weight", {vd, 1, taps}},
        {"A_log", {heads}},                  {"dt_bias", {heads * args_.key_dim}},
        {"o_norm.weight", {dv}},             {"o_proj.weight", {d, vd}}};
    for (const auto& [name, shape] : tensors) rename(from + name, to + name, shape);
  }

  void cler(bool first) {
    const MegatronArguments::Cler& cler = args_.cler;
    const int64_t heads = args_.value_heads, dv = args_.value_dim;
    // Nothing is routed to the first recurrent layer, which may lack what would receive it.
    const auto rename_cler = [&](const std::string& from, const char* name, const Shape& shape) {
      if (!first || plan_.has(from)) rename(from, to_ + "attn." + name, shape);
    };
    if (cler.mode == "attnres") {
      rename_cler(attention_ + "cler_attn_query", "cler_query", {heads, dv});
      if (cler.dynamic) {
        rename_cler(attention_ + "cler_attn_self_gate.weight", "cler_self_gate.weight", {1, dv});
        rename_cler(attention_ + "cler_attn_self_gate.bias", "cler_self_gate.bias", {1});
      } else {
        rename_cler(attention_ + "cler_attn_self_bias", "cler_self_bias", {heads});
      }
      return;
    }
    if (cler.mode == "dense_softmax") {
      rename_cler(absl::StrCat("decoder.cler_route_queries.", layer_types_.size() - 1),
                  "cler_query", {heads, dv});
    }
    if (cler.dynamic) {
      rename_cler(attention_ + "cler_gate.weight", "cler_gate.weight", {1, dv});
      rename_cler(attention_ + "cler_gate.bias", "cler_gate.bias", {1});
    } else {
      const Shape shape = cler.gamma == "scalar" ? Shape{1}
                          : cler.gamma == "head" ? Shape{heads}
                                                 : Shape{heads, dv};
      rename_cler(attention_ + "cler_gamma", "cler_gamma", shape);
    }
  }

  void route(int64_t layer) {
    const MegatronArguments::Route& route = args_.route;
    const int64_t d = args_.hidden, vd = args_.value_heads * args_.value_dim;
    const int64_t width = route.signal == "self" ? d : route.signal == "both" ? 2 * vd : vd;
    const std::string from = absl::StrCat("decoder.cler_hidden_proj.", layer, ".");
    if (route.rank == 0) {
      rename(from + "weight", to_ + "route_proj.weight", {d, width});
    } else {
      rename(from + "0.weight", to_ + "route_proj.0.weight", {route.rank, width});
      rename(from + "1.weight", to_ + "route_proj.1.weight", {d, route.rank});
    }
    if (route.signal == "gated_value") {
      rename(absl::StrCat("decoder.cler_hidden_gate.", layer), to_ + "route_gate", {2});
    }
    plan_.drop(attention_ + "cler_gamma");  // written before 2026-06-02, and never read
  }

  // The argument is not always kept, so the tensors count.
  void attention_residuals() {
    const std::string at = "decoder.attn_res_queries.";
    residuals_ = args_.attention_residuals || plan_.has(at + "final");
    if (!residuals_) return;
    const Shape shape = {args_.hidden};
    for (int64_t layer = 0; layer < args_.layers; ++layer) {
      const std::string to = absl::StrCat("model.layers.", layer, ".");
      if (layer > 0) rename(absl::StrCat(at, 2 * layer), to + "attn_res_proj.weight", shape);
      rename(absl::StrCat(at, 2 * layer + 1), to + "mlp_res_proj.weight", shape);
    }
    rename(at + "final", "model.res_proj.weight", shape);
  }

  nlohmann::json config(int64_t eos) const {
    const bool softmax = std::ranges::count(layer_types_, "softmax") > 0;
    nlohmann::json out = {{"model_type", "weir"},
                          {"hidden_size", args_.hidden},
                          {"vocab_size", vocab_},
                          {"num_hidden_layers", args_.layers},
                          {"intermediate_size", args_.ffn_hidden},
                          {"norm_eps", args_.norm_eps},
                          {"tie_word_embeddings", args_.tied_embeddings},
                          {"bos_token_id", nullptr},
                          {"eos_token_id", eos},
                          {"layer_types", layer_types_}};
    if (softmax) {
      out["num_heads"] = args_.heads;
      out["num_kv_heads"] = args_.kv_heads;
      out["head_dim"] = args_.head_dim;
      out["rope_theta"] = args_.rope_theta;
      out["attention_output_gate"] = gate_.value_or(false);
    }
    if (first_recurrent_ >= 0) {
      out["linear_num_key_heads"] = args_.key_heads;
      out["linear_num_value_heads"] = args_.value_heads;
      out["linear_key_head_dim"] = args_.key_dim;
      out["linear_value_head_dim"] = args_.value_dim;
      out["linear_conv_kernel_dim"] = args_.conv_width;
      out["linear_qk_norm"] = args_.torch_variant ? "l2_max" : "l2";
      if (args_.mixer == "gdn2") out["gdn2_low_rank"] = low_rank_.value_or(false);
    }
    if (args_.has_cler) {
      out["cler"] = {{"mode", args_.cler.mode},       {"gamma", args_.cler.gamma},
                     {"dynamic", args_.cler.dynamic}, {"normalize", args_.cler.normalize},
                     {"site", args_.cler.site},       {"eps", args_.cler.eps}};
    }
    if (args_.has_route) {
      out["route"] = {{"signal", args_.route.signal},
                      {"rank", args_.route.rank},
                      {"normalize", args_.route.normalize}};
    }
    if (residuals_) out["attention_residuals"] = {{"eps", args_.attention_residuals_eps}};
    return out;
  }

  const MegatronArguments& args_;
  TensorPlan plan_;
  int64_t vocab_ = 0, first_recurrent_ = -1;
  std::vector<std::string> layer_types_;
  std::optional<bool> gate_, low_rank_;     // whether the layers so far have it
  bool residuals_ = false;
  std::string from_, attention_, to_;       // of the layer being planned
};

}  // namespace

absl::StatusOr<ServedModel> plan_served_model(const MegatronCheckpoint& checkpoint,
                                              const MegatronArguments& arguments, int64_t eos) {
  return Planner(checkpoint, arguments).plan(eos);
}

}  // namespace weir
