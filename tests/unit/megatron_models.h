#pragma once
#include <gtest/gtest.h>

#include <string>

#include "clients/convert/convert.h"
#include "tests/unit/megatron_writer.h"

namespace weir::test {

using nlohmann::json;

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A small model of one kind, every key of its config given.
inline json model(const std::string& kind, int softmax_every = 3) {
  const bool few = kind == "delta" || kind == "linear";
  json types = json::array();
  for (int i = 0; i < 4; ++i) types.push_back((i + 1) % softmax_every == 0 ? "softmax" : kind);
  json out = {{"model_type", "weir"},     {"hidden_size", 32},
              {"vocab_size", 64},         {"num_hidden_layers", 4},
              {"intermediate_size", 48},  {"norm_eps", 1e-5},
              {"bos_token_id", nullptr},  {"eos_token_id", 2},
              {"layer_types", types},     {"tie_word_embeddings", false}};
  if (softmax_every < 10) {
    out.update({{"num_heads", 4},
                {"num_kv_heads", 2},
                {"head_dim", 8},
                {"rope_theta", 500000.0},
                {"attention_output_gate", kind == "gdn" || kind == "gdn2"}});
  }
  if (kind == "softmax") return out;
  out.update({{"linear_num_key_heads", 2},
              {"linear_num_value_heads", few ? 2 : 4},
              {"linear_key_head_dim", 8},
              {"linear_value_head_dim", few ? 16 : 8},
              {"linear_conv_kernel_dim", 4},
              {"linear_qk_norm", kind == "linear" ? "l2_max" : "l2"}});
  if (kind == "gdn2") out["gdn2_low_rank"] = false;
  return out;
}

inline json with(json config, const json& more) {
  config.update(more);
  return config;
}

inline json cler(const json& more = json::object()) {
  json out = {{"mode", "latest"},   {"gamma", "scalar"}, {"dynamic", false},
              {"normalize", false}, {"site", "value"},   {"eps", 1e-6}};
  out.update(more);
  return {{"cler", out}};
}

inline json route(const std::string& signal, int rank = 0, bool normalize = false) {
  return {{"route", {{"signal", signal}, {"rank", rank}, {"normalize", normalize}}}};
}

// A checkpoint's folder, and one to convert it to.
struct Folders {
  TemporaryFolder all;
  std::string from = all.file("checkpoint"), to = all.file("served");
};

inline std::string error_of(const ConvertOptions& options) {
  const auto report = convert(options);
  return report.ok() ? "accepted" : std::string(report.status().message());
}
inline std::string error_of(const Folders& folders) {
  return error_of({.checkpoint = folders.from, .out = folders.to});
}
// The error of a legacy checkpoint.
inline std::string error_of(const MegatronWriter& writer, const pickled::Pairs& extra = {}) {
  const Folders folders;
  writer.write_legacy(folders.from, extra);
  const std::string error = error_of(folders);
  // Whatever went wrong, nothing is left of an attempt.
  const std::filesystem::directory_iterator entries(folders.all.path());
  const size_t left = size_t(std::distance(entries, {}));
  EXPECT_EQ(left, error == "accepted" ? 2u : 1u) << error;
  return error;
}

}  // namespace weir::test
