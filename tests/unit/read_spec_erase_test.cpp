// What config.json says of the mixers that run as EraseStep.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "engine/model.h"
#include "engine/read_spec.h"
#include "tests/unit/checkpoint_writer.h"
#include "tests/unit/host_backend.h"

namespace weir {
namespace {

using nlohmann::json;

ModelSpec spec_of(const std::string& text) {
  const auto spec = read_spec(text, "C");
  if (spec.ok()) return *spec;
  ADD_FAILURE() << text << "\n  " << spec.status();
  std::abort();
}

void expect_refusal(const char* type, const std::string& keys, const std::string& message) {
  const std::string text = std::string(R"({"model_type":")") + type + "\"," + keys + "}";
  const auto spec = read_spec(text, "C");
  EXPECT_EQ(spec.ok() ? "accepted" : std::string(spec.status().message()), "C: " + message)
      << text;
}

TEST(ReadSpec, GatedDeltaProductDefaultsAndOptions) {
  const ModelSpec spec = spec_of(R"({"model_type":"gated_deltaproduct","num_v_heads":12})");
  EXPECT_EQ(spec.layers.size(), 21u);
  // One update a token: a delta rule like any other.
  const auto& one = std::get<DeltaMixer>(spec.layers[0].mixer);
  EXPECT_EQ(one.key_heads, 6);
  EXPECT_EQ(one.value_heads, 6);  // the key exists, but not for this type
  EXPECT_EQ(one.key_dim, 256);
  EXPECT_EQ(one.value_dim, 512);
  EXPECT_EQ(one.decay, DecayGate::None);
  EXPECT_EQ(one.output_gate, OutputGate::Silu);
  EXPECT_FALSE(one.negative_eigenvalues);

  const ModelSpec other = spec_of(
      R"({"model_type":"gated_deltaproduct","num_householder":3,"use_forget_gate":true,)"
      R"("use_output_gate":false,"num_heads":4,"head_dim":64,"expand_v":1.5,"conv_size":3,)"
      R"("allow_neg_eigval":true})");
  const auto& m = std::get<DeltaProductMixer>(other.layers[0].mixer);
  EXPECT_EQ(m.updates, 3);
  EXPECT_EQ(m.heads, 4);
  EXPECT_EQ(m.key_dim, 64);
  EXPECT_EQ(m.value_dim, 96);
  EXPECT_TRUE(m.decay);
  EXPECT_TRUE(m.negative_eigenvalues);
  EXPECT_FALSE(m.output_gate);
  ASSERT_TRUE(m.conv);
  const StateSize size = state_size(m);
  EXPECT_EQ(size.recurrent, 4u * 4 * 64 * 96);
  EXPECT_EQ(size.conv, 4u * 2 * (4 * 64 + 3 * 4 * (64 + 96)));
}

TEST(ReadSpec, CombaDefaultsAndOptions) {
  const ModelSpec spec = spec_of(R"({"model_type":"comba","use_output_correction":false})");
  EXPECT_EQ(spec.layers.size(), 21u);
  const auto& m = std::get<CombaMixer>(spec.layers[0].mixer);
  EXPECT_EQ(m.heads, 6);
  EXPECT_EQ(m.key_dim, 256);
  EXPECT_EQ(m.value_dim, 512);
  EXPECT_TRUE(m.output_gate);
  ASSERT_TRUE(m.conv);
  EXPECT_EQ(state_size(m).recurrent, 4u * 6 * 256 * 512);
  EXPECT_EQ(state_size(m).conv, 4u * 3 * 6 * (2 * 256 + 512));
  for (const char* key : {"use_gate", "use_output_gate"}) {
    const ModelSpec bare = spec_of(json{{"model_type", "comba"}, {key, false}}.dump());
    EXPECT_FALSE(std::get<CombaMixer>(bare.layers[0].mixer).output_gate) << key;
  }
}

TEST(ReadSpec, Rwkv7DefaultsAndOptions) {
  const ModelSpec spec = spec_of(R"({"model_type":"rwkv7"})");
  EXPECT_EQ(spec.layers.size(), 24u);
  EXPECT_FLOAT_EQ(spec.norm_eps, 1e-5f);
  EXPECT_EQ(spec.norm, BlockNorm::Layer);
  EXPECT_TRUE(spec.embedding_norm);
  EXPECT_EQ(spec.layers[0].mlp->hidden, 8192);
  EXPECT_EQ(spec.layers[0].mlp->kind, Mlp::Kind::ShiftedSquare);
  const auto& m = std::get<Rwkv7Mixer>(spec.layers[0].mixer);
  EXPECT_EQ(m.heads, 32);
  EXPECT_EQ(m.key_dim, 64);
  EXPECT_EQ(m.value_dim, 64);
  EXPECT_EQ(m.decay_rank, 64);
  EXPECT_EQ(m.gate_rank, 128);
  EXPECT_EQ(m.rate_rank, 64);
  EXPECT_EQ(m.value_rank, 16);
  EXPECT_TRUE(m.fused_norm);
  EXPECT_TRUE(m.first);
  EXPECT_FALSE(std::get<Rwkv7Mixer>(spec.layers[1].mixer).first);
  // 1.5B: 12 MiB of state matrices, and two inputs of 2,048 numbers a layer.
  EXPECT_EQ(state_size(spec).recurrent, 12u << 20);
  EXPECT_EQ(state_size(spec).conv, 24u * 2 * 2048 * 4);

  const ModelSpec other = spec_of(
      R"({"model_type":"rwkv7","hidden_size":96,"num_hidden_layers":2,"head_dim":null,)"
      R"("num_heads":3,"value_dim":[48,48],"norm_first":false,"norm_bias":false,)"
      R"("fuse_norm":false,"hidden_ratio":3.5,"hidden_act":"sqrelu"})");
  EXPECT_EQ(other.norm, BlockNorm::LayerWithoutBias);
  EXPECT_FALSE(other.embedding_norm);
  EXPECT_EQ(other.layers[0].mlp->hidden, 352);  // 336 rounded up to a multiple of 32
  const auto& o = std::get<Rwkv7Mixer>(other.layers[0].mixer);
  EXPECT_EQ(o.heads, 3);
  EXPECT_EQ(o.key_dim, 32);
  EXPECT_EQ(o.value_dim, 16);
  EXPECT_FALSE(o.fused_norm);
}

// A rank that config.json leaves out, or has wrong, is the stored tensors'.
TEST(ReadSpec, Rwkv7RanksAreThoseOfTheTensors) {
  const std::string from = std::string(WEIR_SOURCE_DIR) + "/tests/vectors/random-rwkv7";
  const test::TemporaryFolder folder;
  std::filesystem::copy_file(from + "/model.safetensors", folder.path() + "/model.safetensors");
  json config;
  std::ifstream(from + "/config.json") >> config;
  config.erase("decay_low_rank_dim");
  config["gate_low_rank_dim"] = nullptr;
  config["a_low_rank_dim"] = 7;
  test::write_file(folder.path() + "/config.json", config.dump());
  test::HostBackend backend;
  const auto model = load_model(folder.path(), backend);
  ASSERT_TRUE(model.ok()) << model.status();
  for (const LayerSpec& layer : model->spec.layers) {
    const auto& m = std::get<Rwkv7Mixer>(layer.mixer);
    EXPECT_EQ(m.decay_rank, 3);
    EXPECT_EQ(m.gate_rank, 5);
    EXPECT_EQ(m.rate_rank, 4);
    EXPECT_EQ(m.value_rank, 2);
  }
}

TEST(ReadSpec, RefusesWhatTheseMixersCannotBe) {
  expect_refusal("comba", R"("num_v_heads":12)",
                 "num_v_heads: expected num_heads (6) for comba, found 12");
  expect_refusal("comba", R"("allow_neg_eigval":true)",
                 "allow_neg_eigval: expected false for comba, found true");
  expect_refusal("rwkv7", R"("hidden_act":"swish")",
                 "hidden_act: expected one of sqrelu, found the string \"swish\"");
  expect_refusal("rwkv7", R"("attn":{"layers":[0],"num_heads":4})",
                 "attn: expected null for a rwkv7, found an object");
  expect_refusal("rwkv7", R"("attnres_block_size":2)",
                 "attnres_block_size: expected null for a rwkv7, found 2");
  const std::string sizes = "head_dim: expected head_dim * num_heads to be hidden_size (2048) with "
                            "head_dim from 1 to 1024, found ";
  expect_refusal("rwkv7", R"("num_heads":16)", sizes + "head_dim 64, num_heads 16");
  expect_refusal("rwkv7", R"("head_dim":null,"num_heads":3)",
                 sizes + "head_dim 682, num_heads 3");
  expect_refusal("rwkv7", R"("head_dim":null)", sizes + "head_dim 0, num_heads null");
  for (const char* value : {R"([2048,1024])", "[]", "2047", R"("2048")"}) {
    expect_refusal("rwkv7", absl::StrCat(R"("num_hidden_layers":2,"value_dim":)", value),
                   absl::StrCat("value_dim: expected a multiple of the number of heads (32) up to "
                                "1024 times that, or the same one for each of 2 layers, found ",
                                value[0] == '[' ? "a list" : value[0] == '2' ? "2047"
                                                                : "the string \"2048\""));
  }
  expect_refusal("gated_deltaproduct", R"("num_householder":0)",
                 "num_householder: expected a whole number from 1 to 1024, found 0");
  expect_refusal("gated_deltaproduct", R"("num_householder":400)",
                 "num_householder: expected all its keys, and values, to be at most 1048576 "
                 "numbers, found 1228800");
}

}  // namespace
}  // namespace weir
