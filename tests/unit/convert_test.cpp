#include "clients/convert/convert.h"

#include <gtest/gtest.h>

#include "engine/json.h"
#include "tests/unit/golden_bench.h"
#include "tests/unit/megatron_models.h"

namespace weir {
namespace {

namespace fs = std::filesystem;
namespace pickled = test::pickled;
using test::cler;
using test::error_of;
using test::Folders;
using test::has;
using test::json;
using test::MegatronWriter;
using test::model;
using test::route;
using test::with;

struct Case {
  const char* name;
  json config;
};

std::vector<Case> cases() {
  const json low = {{"gdn2_low_rank", true}, {"linear_qk_norm", "l2_max"}};
  const json residuals = {{"attention_residuals", {{"eps", 1e-6}}}};
  const json torch = {{"linear_qk_norm", "l2_max"}};
  return {{"softmax", model("softmax", 1)},
          {"tied", with(model("softmax", 1), {{"tie_word_embeddings", true}})},
          {"delta", model("delta")},
          {"delta_pytorch", with(model("delta"), torch)},
          {"delta_pure", model("delta", 100)},
          {"gdn", model("gdn")},
          {"gdn_pure", model("gdn", 100)},
          {"kda", model("kda")},
          {"gdn2", model("gdn2")},
          {"gdn2_low_rank", with(model("gdn2"), low)},
          {"linear", model("linear")},
          {"residuals", with(model("gdn"), residuals)},
          // Numbers that are not the defaults.
          {"numbers", with(with(model("gdn"), cler({{"eps", 1e-3}, {"normalize", true}})),
                           {{"norm_eps", 1e-3},
                            {"rope_theta", 1234.0},
                            {"attention_residuals", {{"eps", 1e-4}}}})},
          {"route_value", with(model("gdn"), route("value"))},
          {"route_error_rank", with(model("delta"), route("error", 4))},
          {"route_gated", with(model("gdn"), route("gated_value", 0, true))},
          {"route_both", with(model("gdn"), route("both"))},
          {"route_self", with(model("gdn"), route("self", 4))},
          {"residuals_route", with(with(model("gdn"), residuals), route("value", 4))},
          {"cler_scalar", with(model("delta"), cler())},
          {"cler_head", with(model("gdn"), cler({{"gamma", "head"}, {"normalize", true}}))},
          {"cler_channel", with(model("gdn"), cler({{"gamma", "channel"}}))},
          {"cler_output", with(with(model("gdn"), torch), cler({{"site", "output"}}))},
          {"cler_softmax", with(model("gdn"), cler({{"mode", "dense_softmax"}}))},
          {"cler_dynamic", with(model("gdn"), cler({{"dynamic", true}}))},
          {"cler_attnres", with(model("gdn"), cler({{"mode", "attnres"}}))},
          {"cler_attnres_dynamic",
           with(model("gdn"), cler({{"mode", "attnres"}, {"dynamic", true}}))}};
}

json read_config(const std::string& folder) {
  return *parse_json(*read_text_file(folder + "/config.json", 1 << 20), folder);
}

// Every key has a value, null where this config has none: what HashedWeirModel takes.
json with_every_key(json config) {
  for (const char* key : {"attention_residuals", "route", "cler"}) config.emplace(key, nullptr);
  const json every_key = model("gdn2");
  for (const auto& [key, value] : every_key.items()) config.emplace(key, value);
  return config;
}

// The folder that was written against the one that the config and the tensors' names give.
void expect_model(const std::string& folder, const json& config) {
  json found = read_config(folder);
  EXPECT_EQ(found["converted_from"], "Megatron-LM, iter_0000010");
  found.erase("converted_from");
  EXPECT_EQ(found, config);
  const auto tensors = Safetensors::open_folder(folder);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  test::HashedWeirModel expected(with_every_key(config));
  if (config["tie_word_embeddings"]) expected.tensors().erase("lm_head.weight");
  EXPECT_EQ(tensors->tensors().size(), expected.tensors().size());
  for (const auto& [name, tensor] : expected.tensors()) {
    const TensorView* view = tensors->find(name);
    ASSERT_NE(view, nullptr) << name;
    EXPECT_EQ(view->elements(), test::elements(tensor.shape)) << name;
    if (name.find("cler_gamma") == std::string::npos) {  // a scalar may be [] or [1]
      EXPECT_EQ(view->shape, tensor.shape) << name;
    }
    ASSERT_EQ(view->data.size(), tensor.values.size() * sizeof(float)) << name;
    EXPECT_EQ(std::memcmp(view->data.data(), tensor.values.data(), view->data.size()), 0) << name;
  }
}

// Fails on a tensor in the wrong place, of the wrong rows, or missing, and on a wrong config.
TEST(Convert, WritesTheModelOfALegacyCheckpoint) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    const Folders folders;
    MegatronWriter(one.config).write_legacy(folders.from,
                                            {{"decoder.x._extra_state", pickled::none()}});
    ASSERT_EQ(error_of(folders), "accepted");
    expect_model(folders.to, one.config);
  }
}

TEST(Convert, WritesTheModelOfADistributedCheckpoint) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    const std::string name = one.name;
    const Folders folders;
    MegatronWriter(one.config).write_distributed(folders.from, false);
    ASSERT_EQ(error_of(folders), "accepted");
    expect_model(folders.to, one.config);
    if (name != "softmax" && !name.ends_with("_pure")) continue;
    const Folders stacked;  // layers alike share one tensor with a layer axis
    MegatronWriter(one.config).write_distributed(stacked.from, true);
    ASSERT_EQ(error_of(stacked), "accepted");
    expect_model(stacked.to, one.config);
  }
}

// A folder that was converted answers like one that was written: every bit of the logits.
TEST(Convert, TheConvertedModelIsServed) {
  std::vector<Token> tokens;
  for (int i = 0; i < 12; ++i) tokens.push_back((7 * i + 3) % 64);
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    const Folders folders;
    MegatronWriter(one.config).write_distributed(folders.from, false);
    ASSERT_EQ(error_of(folders), "accepted");
    const std::string written = folders.all.file("written");
    fs::create_directories(written);
    test::HashedWeirModel expected(with_every_key(one.config));
    if (one.config["tie_word_embeddings"]) expected.tensors().erase("lm_head.weight");
    expected.write(written);
    test::Bench converted(folders.to, {.threads = 1}), direct(written, {.threads = 1});
    EXPECT_EQ(test::alone(converted, tokens, 12), test::alone(direct, tokens, 12));
  }
}

TEST(Convert, ReportsWhatWasLeftOut) {
  const Folders folders;
  MegatronWriter(model("gdn")).write_distributed(folders.from, false);
  const auto report = convert({.checkpoint = folders.from, .out = folders.to});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->source, folders.from + "/iter_0000010");
  EXPECT_EQ(report->skipped, (std::map<std::string, size_t>{
                                 {"decoder.layers.*.mlp.linear_fc*._extra_state/shard_*_*", 1},
                                 {"optimizer.state.exp_avg.x", 1}}));
  EXPECT_EQ(report->bytes, fs::file_size(folders.to + "/model.safetensors"));
}

TEST(Convert, CopiesTheTokenizerAndTakesTheIterationsFolder) {
  const Folders folders;
  MegatronWriter(model("gdn")).write_legacy(folders.from);
  test::write_file(folders.all.file("llama.model"), "pieces");
  const ConvertOptions options{.checkpoint = folders.from + "/iter_0000010/",
                               .out = folders.to + "/",
                               .tokenizer = folders.all.file("llama.model"),
                               .eos = 7};
  ASSERT_EQ(error_of(options), "accepted");
  EXPECT_EQ(test::read_file(folders.to + "/tokenizer.model"), "pieces");
  EXPECT_EQ(read_config(folders.to)["eos_token_id"], 7);
  EXPECT_TRUE(has(error_of(options), "expected no such folder, or an empty one"));
  ConvertOptions without = options;
  without.tokenizer = folders.all.file("absent");
  EXPECT_TRUE(has(error_of(without), "absent: cannot open"));
}

TEST(Convert, AddsOneToGainsThatAreStoredWithoutIt) {
  const json config = model("gdn");
  MegatronWriter writer(config);
  writer.arguments()["apply_layernorm_1p"] = pickled::boolean(true);
  const std::string stored = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight";
  writer.tensors()[stored].type = TensorType::BF16;
  for (float& value : writer.tensors()[stored].values) value = 0.25f;
  for (const std::string name : {"embedding.word_embeddings.weight", "output_layer.weight"}) {
    writer.tensors()[name].type = TensorType::BF16;
  }
  const Folders folders;
  writer.write_legacy(folders.from);
  ASSERT_EQ(error_of(folders), "accepted");
  const auto tensors = Safetensors::open_folder(folders.to);
  ASSERT_TRUE(tensors.ok()) << tensors.status();  // so two-byte elements did not break alignment
  EXPECT_EQ(tensors->find("lm_head.weight")->type, TensorType::BF16);
  for (const char* name : {"model.layers.0.mlp_norm.weight", "model.norm.weight",
                           "model.layers.0.attn_norm.weight", "model.layers.0.attn.o_norm.weight",
                           "model.layers.2.attn_norm.weight"}) {
    const TensorView* view = tensors->find(name);
    ASSERT_NE(view, nullptr) << name;
    EXPECT_EQ(view->type, TensorType::F32) << name;
    float first = 0;
    std::memcpy(&first, view->data.data(), 4);
    EXPECT_TRUE(first >= 1.25f && first < 2.2f) << name << " " << first;
  }
  float first = 0;
  std::memcpy(&first, tensors->find("model.layers.0.mlp_norm.weight")->data.data(), 4);
  EXPECT_EQ(first, 1.25f);
}

}  // namespace
}  // namespace weir
