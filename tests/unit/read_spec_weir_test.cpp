// Weir's own layout: what its keys mean, what is refused by name, and state arithmetic.
#include <gtest/gtest.h>

#include "engine/read_spec.h"
#include "nlohmann/json.hpp"

namespace weir {
namespace {

using nlohmann::json;

// The 350M Gated DeltaNet of the family: 20 layers, every third of them softmax.
json final_gdn() {
  json types = json::array();
  for (int i = 0; i < 20; ++i) types.push_back((i + 1) % 3 == 0 ? "softmax" : "gdn");
  return {{"model_type", "weir"},
          {"hidden_size", 1024},
          {"vocab_size", 32000},
          {"num_hidden_layers", 20},
          {"intermediate_size", 2816},
          {"layer_types", types},
          {"num_heads", 16},
          {"num_kv_heads", 4},
          {"head_dim", 64},
          {"attention_output_gate", true},
          {"linear_num_key_heads", 4},
          {"linear_num_value_heads", 8},
          {"linear_key_head_dim", 64},
          {"linear_value_head_dim", 64}};
}

// final_gdn() with some keys replaced.
json with(const json& changes) {
  json config = final_gdn();
  config.update(changes);
  return config;
}
json without(const char* key) {
  json config = final_gdn();
  config.erase(key);
  return config;
}
ModelSpec spec_of(const json& config) {
  const auto spec = read_spec(config.dump(), "C");
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? *spec : ModelSpec{};
}
std::string error_of(const json& config) {
  const auto spec = read_spec(config.dump(), "C");
  return spec.ok() ? "accepted" : std::string(spec.status().message());
}

TEST(ReadSpecWeir, Defaults) {
  const ModelSpec spec = spec_of(final_gdn());
  EXPECT_FLOAT_EQ(spec.norm_eps, 1e-5f);
  EXPECT_FALSE(spec.tied_embeddings);
  EXPECT_EQ(spec.bos, -1);
  EXPECT_EQ(spec.eos, std::vector<Token>{2});
  ASSERT_EQ(spec.layers.size(), 20u);
  EXPECT_EQ(spec.layers[0].mlp->hidden, 2816);
  const auto& gdn = std::get<DeltaMixer>(spec.layers[0].mixer);
  EXPECT_EQ(gdn.value_heads, 8);
  EXPECT_EQ(gdn.conv->width, 4);
  EXPECT_EQ(gdn.qk_norm, QkNorm::L2);
  EXPECT_FALSE(spec.layers[0].route.error || spec.layers[0].route.hidden);
  const auto& softmax = std::get<AttentionMixer>(spec.layers[2].mixer);
  EXPECT_EQ(softmax.kv_heads, 4);
  EXPECT_EQ(softmax.rope_theta, 500000);
  EXPECT_TRUE(softmax.output_gate);
  EXPECT_FALSE(spec.depth_residual.has_value());
}

// 14 recurrent layers of 8 x 64 x 64 and 3 x 1024 channels, 6 softmax layers of 4 groups of 64.
// What crosses layers inside a token is no state.
TEST(ReadSpecWeir, StateOfTheFamily) {
  for (const json& routing : {json::object(), json{{"route", {{"signal", "value"}}}},
                              json{{"cler", {{"mode", "attnres"}}}},
                              json{{"attention_residuals", json::object()}}}) {
    const StateSize size = state_size(spec_of(with(routing)));
    EXPECT_EQ(size.recurrent, 14u * 8 * 64 * 64 * sizeof(float));
    EXPECT_EQ(size.conv, 14u * 3 * 1024 * sizeof(float));
    EXPECT_EQ(size.kv_per_token, 6u * 2 * 4 * 64 * sizeof(float));
  }
  json pure = json::array();
  for (int i = 0; i < 20; ++i) pure.push_back("gdn");
  EXPECT_EQ(state_size(spec_of(with({{"layer_types", pure}}))).kv_per_token, 0u);
}

TEST(ReadSpecWeir, KindsOfLayers) {
  const json kinds = {"delta", "gdn", "kda", "gdn2", "linear"};
  const auto mixer = [&](size_t layer, bool low_rank) {
    const ModelSpec spec = spec_of(
        with({{"layer_types", kinds}, {"num_hidden_layers", 5}, {"gdn2_low_rank", low_rank}}));
    return std::get<DeltaMixer>(spec.layers.at(layer).mixer);
  };
  EXPECT_EQ(mixer(0, false).decay, DecayGate::None);
  EXPECT_EQ(mixer(0, false).strength, Strength::Beta);
  EXPECT_EQ(mixer(1, false).decay, DecayGate::PerHead);
  EXPECT_EQ(mixer(2, false).decay, DecayGate::PerChannel);
  EXPECT_EQ(mixer(2, false).output_gate, OutputGate::LowRankSigmoid);
  EXPECT_EQ(mixer(3, false).strength, Strength::EraseWrite);
  EXPECT_TRUE(mixer(3, false).full_rank_decay);
  EXPECT_EQ(mixer(3, false).output_gate, OutputGate::Silu);
  EXPECT_FALSE(mixer(3, true).full_rank_decay);
  EXPECT_TRUE(mixer(3, true).gates_read_residual);
  EXPECT_EQ(mixer(3, true).output_gate, OutputGate::LowRankSilu);
  EXPECT_EQ(mixer(4, false).strength, Strength::Additive);
}

TEST(ReadSpecWeir, RoutesGoToRecurrentLayers) {
  const ModelSpec cler = spec_of(with({{"cler",
                                        {{"mode", "dense_mean"},
                                         {"gamma", "channel"},
                                         {"site", "both"},
                                         {"normalize", true},
                                         {"eps", 1e-4}}}}));
  EXPECT_FALSE(cler.layers[2].route.error.has_value());
  const ErrorRoute& first = *cler.layers[0].route.error;
  const ErrorRoute& fourth = *cler.layers[4].route.error;
  EXPECT_EQ(first.sources, 0);
  EXPECT_EQ(fourth.sources, 3);
  EXPECT_EQ(fourth.mode, ErrorRoute::Mode::Mean);
  EXPECT_EQ(fourth.gamma, ErrorRoute::Gamma::PerChannel);
  EXPECT_TRUE(fourth.to_values && fourth.to_answers && fourth.normalize);
  EXPECT_FLOAT_EQ(fourth.eps, 1e-4f);
  const ModelSpec hidden = spec_of(with({{"route", {{"signal", "both"}, {"rank", 64}}}}));
  EXPECT_FALSE(hidden.layers[2].route.hidden.has_value());
  EXPECT_EQ(hidden.layers[19].route.hidden->signal, HiddenRoute::Signal::Both);
  EXPECT_EQ(hidden.layers[19].route.hidden->rank, 64);
}

TEST(ReadSpecWeir, DepthResidual) {
  const ModelSpec spec = spec_of(with({{"attention_residuals", {{"eps", 1e-3}}}}));
  ASSERT_TRUE(spec.depth_residual.has_value());
  EXPECT_EQ(spec.depth_residual->block, 1);
  EXPECT_FLOAT_EQ(spec.depth_residual->eps, 1e-3f);
  EXPECT_FALSE(spec.depth_residual->gains);
}

TEST(ReadSpecWeir, RefusesByKey) {
  const json one_kind = {"gdn2"};
  const std::vector<std::pair<json, const char*>> cases = {
      {without("hidden_size"), "C: hidden_size: expected a whole number, found null"},
      {without("intermediate_size"), "C: intermediate_size: expected a whole number, found null"},
      {without("layer_types"), "C: layer_types: expected a list of num_hidden_layers (20) names"},
      {without("head_dim"), "C: head_dim: expected a whole number, found null"},
      {without("linear_key_head_dim"), "C: linear_key_head_dim: expected a whole number"},
      {with({{"moe", 8}}), "C: moe: expected no such key, found 8"},
      {with({{"layer_types", {"gdn"}}}), "C: layer_types: expected a list of num_hidden_layers"},
      {with({{"num_hidden_layers", 1}, {"layer_types", {"mamba"}}}),
       "C: layer_types: expected each one of softmax, delta, gdn, kda, gdn2, linear, found"},
      {with({{"num_heads", 6}}), "C: num_heads: expected a multiple of num_kv_heads (4), found 6"},
      {with({{"head_dim", 63}}), "C: head_dim: expected an even number, found 63"},
      {with({{"linear_num_value_heads", 6}}), "C: linear_num_value_heads: expected a multiple of"},
      {with({{"linear_num_key_heads", 1 << 12}, {"linear_num_value_heads", 1 << 12},
             {"linear_key_head_dim", 1024}}),
       "C: linear_num_key_heads: expected all heads together to have at most"},
      {with({{"linear_qk_norm", "sum"}}), "C: linear_qk_norm: expected one of l2, l2_max"},
      {with({{"cler", 1}}), "C: cler: expected an object or null, found 1"},
      {with({{"cler", {{"mode", "sparse"}}}}), "C: cler.mode: expected one of latest"},
      {with({{"cler", {{"detach", true}}}}), "C: cler.detach: expected no such key"},
      {with({{"cler", {{"dynamic", true}, {"site", "both"}}}}),
       "C: cler.site: expected value with dynamic"},
      {with({{"cler", {{"mode", "attnres"}, {"site", "output"}}}}),
       "C: cler.site: expected value with mode attnres"},
      {with({{"cler", {{"mode", "attnres"}, {"normalize", true}}}}),
       "C: cler.normalize: expected false with mode attnres"},
      {with({{"cler", json::object()}, {"route", {{"signal", "value"}}}}),
       "C: route: expected null, as cler is set"},
      {with({{"route", json::object()}}), "C: route.signal: expected a name, found null"},
      {with({{"route", {{"signal", "keys"}}}}), "C: route.signal: expected one of error, value"},
      {with({{"route", {{"signal", "self"}, {"normalize", true}}}}),
       "C: route.normalize: expected false with signal self"},
      {with({{"route", {{"signal", "self"}}}, {"attention_residuals", json::object()}}),
       "C: route.signal: expected another one with attention_residuals"},
      {with({{"num_hidden_layers", 1}, {"layer_types", one_kind},
             {"route", {{"signal", "value"}}}}),
       "C: route: expected null with a gdn2 layer"},
      {with({{"num_hidden_layers", 1}, {"layer_types", one_kind}, {"cler", json::object()}}),
       "C: cler: expected null with a gdn2 layer"},
      {with({{"attention_residuals", {{"block", 2}}}}),
       "C: attention_residuals.block: expected no such key, found 2"},
      {with({{"attn", {{"layers", {1}}}}}), "C: attn: expected no such key"},
      {with({{"rope_scaling", {{"factor", 2}}}}), "C: rope_scaling: expected null"},
  };
  for (const auto& [config, message] : cases) {
    EXPECT_EQ(error_of(config).substr(0, std::string(message).size()), message)
        << error_of(config);
  }
}

}  // namespace
}  // namespace weir
