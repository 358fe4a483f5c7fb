#include "engine/read_spec.h"

#include <gtest/gtest.h>

#include "tests/unit/checkpoint_writer.h"

namespace weir {
namespace {

using nlohmann::json;

std::string error_of(const std::string& text) {
  const auto spec = read_spec(text, "C");
  return spec.ok() ? "accepted" : std::string(spec.status().message());
}

ModelSpec spec_of(const std::string& text) {
  const auto spec = read_spec(text, "C");
  EXPECT_TRUE(spec.ok()) << text << "\n  " << spec.status();
  if (spec.ok()) return *spec;
  return spec_of(R"({"model_type":"kda"})");
}

const DeltaMixer& delta(const ModelSpec& spec, size_t layer = 0) {
  return std::get<DeltaMixer>(spec.layers[layer].mixer);
}
const AttentionMixer& attention(const ModelSpec& spec, size_t layer = 0) {
  return std::get<AttentionMixer>(spec.layers[layer].mixer);
}

TEST(ReadSpec, TransformerDefaults) {
  const ModelSpec spec = spec_of(R"({"model_type":"transformer"})");
  EXPECT_EQ(spec.model_type, "transformer");
  EXPECT_EQ(spec.dim, 2048);
  EXPECT_EQ(spec.vocab, 32000);
  EXPECT_EQ(spec.layers.size(), 24u);
  EXPECT_FLOAT_EQ(spec.norm_eps, 1e-6f);
  EXPECT_FALSE(spec.tied_embeddings);
  EXPECT_EQ(spec.bos, 1);
  EXPECT_EQ(spec.eos, std::vector<Token>{2});
  EXPECT_EQ(spec.layers[0].mlp->hidden, 5632);
  const AttentionMixer& m = attention(spec);
  EXPECT_EQ(m.heads, 32);
  EXPECT_EQ(m.kv_heads, 32);
  EXPECT_EQ(m.head_dim, 64);
  EXPECT_EQ(m.window, 0);
  EXPECT_EQ(m.rope_theta, 10000);
  EXPECT_FALSE(m.qkv_bias);
  EXPECT_FALSE(m.qk_norm);
}

TEST(ReadSpec, TransformerOptions) {
  const ModelSpec spec = spec_of(
      R"({"model_type":"transformer","num_heads":16,"num_kv_heads":4,"window_size":128,)"
      R"("rope_theta":500000,"qkv_bias":true,"qk_norm":true,"tie_word_embeddings":true})");
  const AttentionMixer& m = attention(spec);
  EXPECT_EQ(m.heads, 16);
  EXPECT_EQ(m.kv_heads, 4);
  EXPECT_EQ(m.head_dim, 128);
  EXPECT_EQ(m.window, 128);
  EXPECT_EQ(m.rope_theta, 500000);
  EXPECT_TRUE(m.qkv_bias);
  EXPECT_TRUE(m.qk_norm);
  EXPECT_TRUE(spec.tied_embeddings);
}

TEST(ReadSpec, DeltaNetDefaultsAndOptions) {
  const ModelSpec spec = spec_of(R"({"model_type":"delta_net"})");
  EXPECT_EQ(spec.layers.size(), 24u);
  const DeltaMixer& m = delta(spec);
  EXPECT_EQ(m.key_heads, 16);
  EXPECT_EQ(m.value_heads, 16);
  EXPECT_EQ(m.key_dim, 128);
  EXPECT_EQ(m.value_dim, 128);
  EXPECT_EQ(m.decay, DecayGate::None);
  EXPECT_EQ(m.strength, Strength::Beta);
  EXPECT_EQ(m.output_gate, OutputGate::None);
  EXPECT_EQ(m.qk_activation, Activation::Silu);
  EXPECT_EQ(m.qk_norm, QkNorm::L2);
  EXPECT_FALSE(m.negative_eigenvalues);
  ASSERT_TRUE(m.conv);
  EXPECT_EQ(m.conv->width, 4);

  const ModelSpec other = spec_of(
      R"({"model_type":"delta_net","use_gate":true,"use_beta":false,"qk_activation":"elu",)"
      R"("qk_norm":"sum","use_short_conv":false,"expand_k":0.5,"expand_v":2,"num_heads":8,)"
      R"("allow_neg_eigval":true,"use_output_norm":false})");
  const DeltaMixer& o = delta(other);
  EXPECT_EQ(o.key_dim, 128);
  EXPECT_EQ(o.value_dim, 512);
  EXPECT_EQ(o.strength, Strength::One);
  EXPECT_EQ(o.output_gate, OutputGate::Silu);
  EXPECT_EQ(o.qk_activation, Activation::EluPlusOne);
  EXPECT_EQ(o.qk_norm, QkNorm::Sum);
  EXPECT_TRUE(o.negative_eigenvalues);
  EXPECT_FALSE(o.conv);

  for (const auto& [name, activation] : {std::pair("silu", Activation::Silu),
                                         std::pair("relu", Activation::Relu),
                                         std::pair("identity", Activation::None)}) {
    const json config = {{"model_type", "delta_net"}, {"qk_activation", name}};
    EXPECT_EQ(delta(spec_of(config.dump())).qk_activation, activation);
  }
}

TEST(ReadSpec, GatedDeltaNetDefaultsAndOptions) {
  const ModelSpec spec = spec_of(R"({"model_type":"gated_deltanet"})");
  EXPECT_EQ(spec.layers.size(), 21u);
  const DeltaMixer& m = delta(spec);
  EXPECT_EQ(m.key_heads, 6);
  EXPECT_EQ(m.value_heads, 6);
  EXPECT_EQ(m.key_dim, 256);
  EXPECT_EQ(m.value_dim, 512);
  EXPECT_EQ(m.decay, DecayGate::PerHead);
  EXPECT_EQ(m.output_gate, OutputGate::Silu);
  ASSERT_TRUE(m.conv);

  const ModelSpec other = spec_of(
      R"({"model_type":"gated_deltanet","use_gate":false,"num_heads":4,"num_v_heads":8,)"
      R"("head_dim":64,"expand_v":1.5,"conv_size":3,"allow_neg_eigval":true})");
  const DeltaMixer& o = delta(other);
  EXPECT_EQ(o.key_heads, 4);
  EXPECT_EQ(o.value_heads, 8);
  EXPECT_EQ(o.key_dim, 64);
  EXPECT_EQ(o.value_dim, 96);
  EXPECT_EQ(o.output_gate, OutputGate::None);
  EXPECT_EQ(o.conv->width, 3);
  EXPECT_TRUE(o.negative_eigenvalues);
}

TEST(ReadSpec, KdaAndGdn2) {
  const ModelSpec spec = spec_of(R"({"model_type":"kda"})");
  const DeltaMixer& m = delta(spec);
  EXPECT_EQ(spec.layers.size(), 24u);
  EXPECT_EQ(m.key_heads, 16);
  EXPECT_EQ(m.key_dim, 128);
  EXPECT_EQ(m.value_dim, 128);
  EXPECT_EQ(m.decay, DecayGate::PerChannel);
  EXPECT_EQ(m.strength, Strength::Beta);
  EXPECT_EQ(m.output_gate, OutputGate::LowRankSigmoid);
  EXPECT_EQ(m.lower_bound, 0);

  EXPECT_EQ(delta(spec_of(R"({"model_type":"kda","lower_bound":-5})")).lower_bound, -5);
  EXPECT_EQ(delta(spec_of(R"({"model_type":"kda","safe_gate":true,"lower_bound":-0.5})"))
                .lower_bound, -0.5f);

  const ModelSpec gdn2 = spec_of(R"({"model_type":"gdn2","num_v_heads":32})");
  const DeltaMixer& g = delta(gdn2);
  EXPECT_EQ(g.key_heads, 16);
  EXPECT_EQ(g.value_heads, 32);
  EXPECT_EQ(g.decay, DecayGate::PerKeyChannel);
  EXPECT_EQ(g.strength, Strength::EraseWrite);
  EXPECT_EQ(g.output_gate, OutputGate::LowRankSigmoid);
}

TEST(ReadSpec, HybridLayersFromOneObjectAndFromAList) {
  for (const char* type : {"delta_net", "gated_deltanet", "kda", "gdn2"}) {
    json config = {{"model_type", type}, {"num_hidden_layers", 4}};
    config["attn"] = {{"layers", {1, 3}}, {"num_heads", 16}};
    const ModelSpec spec = spec_of(config.dump());
    EXPECT_TRUE(std::holds_alternative<DeltaMixer>(spec.layers[0].mixer));
    EXPECT_EQ(attention(spec, 1).heads, 16);
    EXPECT_EQ(attention(spec, 1).kv_heads, 16);
    EXPECT_EQ(attention(spec, 1).rope_theta, 10000);
    EXPECT_FALSE(attention(spec, 1).qk_norm);
    EXPECT_TRUE(std::holds_alternative<DeltaMixer>(spec.layers[2].mixer));

    config["attn"] = {{{"layers", {0}}, {"num_heads", 8}, {"num_kv_heads", nullptr}},
                      {{"layers", {3}}, {"num_heads", 8}, {"num_kv_heads", 2},
                       {"window_size", 64}, {"rope_theta", 1e6}, {"qkv_bias", true}}};
    const ModelSpec list = spec_of(config.dump());
    EXPECT_EQ(attention(list, 0).kv_heads, 8);
    EXPECT_EQ(attention(list, 3).kv_heads, 2);
    EXPECT_EQ(attention(list, 3).window, 64);
    EXPECT_EQ(attention(list, 3).rope_theta, 1e6f);
    EXPECT_TRUE(attention(list, 3).qkv_bias);
    EXPECT_EQ(attention(list, 3).head_dim, 256);
  }
}

TEST(ReadSpec, MlpWidthFollowsTheRuleWhereTheFileIsSilent) {
  const auto width = [](const json& changes) {
    json config = {{"model_type", "transformer"}};
    config.update(changes);
    return spec_of(config.dump()).layers[0].mlp->hidden;
  };
  EXPECT_EQ(width({{"hidden_size", 1024}}), 2816);
  EXPECT_EQ(width({{"hidden_size", 2560}}), 6912);
  EXPECT_EQ(width({{"hidden_size", 4096}, {"intermediate_size", nullptr}}), 11008);
  EXPECT_EQ(width({{"hidden_size", 2048}, {"hidden_ratio", 2}}), 2816);
  EXPECT_EQ(width({{"hidden_size", 1024}, {"hidden_ratio", 3}}), 2048);
  EXPECT_EQ(width({{"hidden_size", 1024}, {"hidden_ratio", nullptr}}), 2816);
  EXPECT_EQ(width({{"intermediate_size", 640}, {"hidden_ratio", 3}}), 640);
}

TEST(ReadSpec, NormEpsilonUnderItsOldName) {
  const std::string type = R"({"model_type":"kda",)";
  EXPECT_EQ(spec_of(type + R"("rms_norm_eps":1e-5})").norm_eps, 1e-5f);
  EXPECT_EQ(spec_of(type + R"("rms_norm_eps":1e-5,"norm_eps":1e-4})").norm_eps, 1e-4f);
}

TEST(ReadSpec, SpecialTokens) {
  const std::string type = R"({"model_type":"kda","vocab_size":100,)";
  EXPECT_EQ(spec_of(type + R"("bos_token_id":null,"eos_token_id":null})").bos, -1);
  EXPECT_TRUE(spec_of(type + R"("eos_token_id":null})").eos.empty());
  EXPECT_EQ(spec_of(type + R"("eos_token_id":[7,9,7]})").eos, (std::vector<Token>{7, 9}));
  EXPECT_EQ(error_of(type + R"("eos_token_id":100})"),
            "C: eos_token_id: expected a token id from 0 to 99, found 100");
  EXPECT_EQ(error_of(type + R"("eos_token_id":[1,-1]})"),
            "C: eos_token_id: expected a token id from 0 to 99, found -1");
  EXPECT_EQ(error_of(type + R"("bos_token_id":"<s>"})"),
            "C: bos_token_id: expected a whole number from 0 to 99, found the string \"<s>\"");
}

TEST(ReadSpec, HarmlessKeysAreIgnored) {
  EXPECT_EQ(error_of(R"({"model_type":"gated_deltanet","fuse_norm":false,"attn_mode":"chunk",)"
                     R"("share_conv_kernel":true,"norm_first":false,"use_gk":true,)"
                     R"("conv_bias":false,)"
                     R"("dt_limit":[0.0,Infinity],"x":-Infinity,"y":NaN,"s":"NaN \" Infinity",)"
                     R"("id2label":{"0":"LABEL_0"},"max_position_embeddings":1,"attn":null,)"
                     R"("attnres_block_size":null,"rope_scaling":null,"hidden_act":"silu"})"),
            "accepted");
}

TEST(ReadSpec, TypesThatAreNotServed) {
  const std::string served = "expected one of transformer, delta_net, gated_deltanet, "
                             "comba, gated_deltaproduct, "
                             "kda, gdn2, swila, gla, retnet, hgrn2, linear_attn, gsa, "
                             "forgetting_transformer, rwkv7, mom, mamba2, weir";
  for (const char* type : {"rwkv6", "samba", "qwen3_next"}) {
    EXPECT_EQ(error_of(json{{"model_type", type}}.dump()),
              "C: model_type: " + served + "; found the string \"" + type +
                  "\", a known type that is not served");
  }
  EXPECT_EQ(error_of(R"({"model_type":"gpt9"})"),
            "C: model_type: " + served + "; found the string \"gpt9\"");
  EXPECT_EQ(error_of(R"({"model_type":"delta_net, kda"})"),
            "C: model_type: " + served + "; found the string \"delta_net, kda\"");
  EXPECT_EQ(error_of("{}"), "C: model_type: " + served + ", found null");
  EXPECT_EQ(error_of(R"({"model_type":3})"), "C: model_type: " + served + ", found 3");
}

struct Refusal {
  const char* type;
  const char* keys;
  const char* message;
};

void expect_refusals(std::span<const Refusal> cases) {
  for (const Refusal& c : cases) {
    const std::string text =
        std::string(R"({"model_type":")") + c.type + "\"," + c.keys + "}";
    EXPECT_EQ(error_of(text), std::string("C: ") + c.message) << text;
  }
}

TEST(ReadSpec, RefusesKeysThatWouldChangeTheMathematics) {
  const Refusal cases[] = {
      {"kda", R"("attnres_block_size":3)",
       "attnres_block_size: expected 1 or an even number, found 3"},
      {"transformer", R"("rope_scaling":{"type":"linear"})",
       "rope_scaling: expected null (it is not served), found an object"},
      {"transformer", R"("quantization_config":{})",
       "quantization_config: expected null (it is not served), found an object"},
      {"transformer", R"("elementwise_affine":false)",
       "elementwise_affine: expected true (norms without weights are not served), found false"},
      {"transformer", R"("hidden_act":"gelu")",
       "hidden_act: expected one of swish, silu, found the string \"gelu\""},
      {"transformer", R"("attn":{"layers":[0],"num_heads":4})",
       "attn: expected null for a transformer, found an object"},
      {"gdn2", R"("safe_gate":true)", "safe_gate: expected false for gdn2, found true"},
      {"gdn2", R"("lower_bound":-5)", "lower_bound: expected null for gdn2, found -5"},
      {"kda", R"("safe_gate":true)",
       "lower_bound: expected a number in [-5, 0), as safe_gate is true, found none"},
      {"kda", R"("lower_bound":0)", "lower_bound: expected a number in [-5, 0), found 0"},
      {"kda", R"("lower_bound":-5.5)", "lower_bound: expected a number from -5 to 0, found -5.5"},
      {"delta_net", R"("qk_activation":"gelu")",
       "qk_activation: expected one of silu, relu, elu, identity, found the string \"gelu\""},
      {"delta_net", R"("qk_norm":true)", "qk_norm: expected one of l2, sum, found true"},
  };
  expect_refusals(cases);
}

TEST(ReadSpec, RefusesValuesOfTheWrongKindOrOutOfRange) {
  const Refusal cases[] = {
      {"kda", R"("hidden_size":0)",
       "hidden_size: expected a whole number from 1 to 1048576, found 0"},
      {"kda", R"("hidden_size":128.0)",
       "hidden_size: expected a whole number from 1 to 1048576, found 128.0"},
      {"kda", R"("hidden_size":1048577)",
       "hidden_size: expected a whole number from 1 to 1048576, found 1048577"},
      {"kda", R"("hidden_size":18446744073709551615)",
       "hidden_size: expected a whole number from 1 to 1048576, found 18446744073709551615"},
      {"kda", R"("hidden_size":"128")",
       "hidden_size: expected a whole number from 1 to 1048576, found the string \"128\""},
      {"kda", R"("hidden_size":null)",
       "hidden_size: expected a whole number from 1 to 1048576, found null"},
      {"kda", R"("num_hidden_layers":4097)",
       "num_hidden_layers: expected a whole number from 1 to 4096, found 4097"},
      {"kda", R"("vocab_size":-1)",
       "vocab_size: expected a whole number from 1 to 1048576, found -1"},
      {"kda", R"("norm_eps":-1)", "norm_eps: expected a number from 1e-30 to 1, found -1"},
      {"kda", R"("norm_eps":NaN)",
       "norm_eps: expected a number from 1e-30 to 1, found the string \"NaN\""},
      {"kda", R"("tie_word_embeddings":1)", "tie_word_embeddings: expected true or false, found 1"},
      {"kda", R"("intermediate_size":0)",
       "intermediate_size: expected a whole number from 1 to 1048576, found 0"},
      {"kda", R"("hidden_ratio":0)",
       "hidden_ratio: expected an MLP width from 1 to 1048576, found 0"},
      {"kda", R"("conv_size":0)", "conv_size: expected a whole number from 1 to 64, found 0"},
      {"kda", R"("num_heads":0)", "num_heads: expected a whole number from 1 to 1048576, found 0"},
      {"kda", R"("num_v_heads":24)",
       "num_v_heads: expected a multiple of num_heads (16), found 24"},
      {"kda", R"("num_v_heads":8)", "num_v_heads: expected a multiple of num_heads (16), found 8"},
      {"kda", R"("head_dim":1025)", "head_dim: expected a whole number from 1 to 1024, found 1025"},
      {"kda", R"("num_heads":8193)",
       "num_heads: expected a key dimension of all heads from 1 to 1048576, found 1048704"},
      {"kda", R"("expand_v":0)",
       "expand_v: expected a value dimension of a head from 1 to 1024, found 0"},
      {"kda", R"("expand_v":1e9)", "expand_v: expected a number from 0 to 64, found 1000000000.0"},
      {"kda", R"("expand_v":Infinity)",
       "expand_v: expected a number from 0 to 64, found the string \"Infinity\""},
      {"kda", R"("head_dim":33,"expand_v":1.5)",
       "expand_v: expected a whole head_dim * expand_v, found 49.5"},
      {"delta_net", R"("num_heads":3)",
       "expand_k: expected int(hidden_size * expand_k) to be a multiple of num_heads (3) from 1 to "
       "1048576, found 2048"},
      {"delta_net", R"("num_heads":1)",
       "head_dim: expected a key dimension of a head from 1 to 1024, found 2048"},
      {"transformer", R"("num_heads":3)",
       "num_heads: expected hidden_size (2048) / num_heads to be whole and even, found 3"},
      {"transformer", R"("num_heads":2048)",
       "num_heads: expected hidden_size (2048) / num_heads to be whole and even, found 2048"},
      {"transformer", R"("num_kv_heads":5)",
       "num_kv_heads: expected a divisor of num_heads (32), found 5"},
      {"transformer", R"("window_size":0)",
       "window_size: expected a whole number from 1 to 1048576, found 0"},
      {"transformer", R"("rope_theta":0)",
       "rope_theta: expected a number from 1 to 1e+12, found 0"},
  };
  expect_refusals(cases);
}

TEST(ReadSpec, RefusesHybridsThatMakeNoSense) {
  const Refusal cases[] = {
      {"kda", R"("attn":3)", "attn: expected an object with layers and num_heads, found 3"},
      {"kda", R"("attn":[3])", "attn[0]: expected an object with layers and num_heads, found 3"},
      {"kda", R"("attn":{"num_heads":4})",
       "attn.layers: expected a list of layer numbers, found null"},
      {"kda", R"("attn":{"layers":[0]})", "attn.num_heads: expected a whole number, found null"},
      {"kda", R"("attn":{"layers":[24],"num_heads":4})",
       "attn.layers: expected layer numbers from 0 to 23, found 24"},
      {"kda", R"("attn":{"layers":[-1],"num_heads":4})",
       "attn.layers: expected layer numbers from 0 to 23, found -1"},
      {"kda", R"("attn":{"layers":["0"],"num_heads":4})",
       "attn.layers: expected layer numbers from 0 to 23, found the string \"0\""},
      {"kda", R"("attn":{"layers":[1,1],"num_heads":4})",
       "attn.layers: expected each layer at most once, found 1"},
      {"kda", R"("attn":[{"layers":[1],"num_heads":4},{"layers":[0,1],"num_heads":4}])",
       "attn[1].layers: expected each layer at most once, found 1"},
      {"kda", R"("attn":{"layers":[1],"num_heads":4,"num_kv_heads":3})",
       "attn.num_kv_heads: expected a divisor of num_heads (4), found 3"},
      {"kda", R"("attn":{"layers":[1],"num_heads":4,"qk_norm":true})",
       "attn.qk_norm: expected false, as hybrid attention has none, found true"},
  };
  expect_refusals(cases);
}

TEST(ReadSpec, RefusesWhatIsNotAConfig) {
  EXPECT_EQ(error_of(""), "C: not JSON at byte 1");
  EXPECT_EQ(error_of("[]"), "C: expected an object, found a list");
  EXPECT_EQ(error_of(R"({"model_type":"kda",})"), "C: not JSON at byte 21");
  EXPECT_EQ(error_of(R"({"model_type":"kda","model_type":"kda"})"),
            "C: the key \"model_type\" is there twice");
  EXPECT_EQ(error_of(std::string(10'000'000, '[')), "C: nested deeper than 32 levels");
  EXPECT_NE(error_of("{\"model_type\":\"\xff\"}"), "accepted");
}

TEST(ReadSpec, FolderErrorsNameThePath) {
  test::TemporaryFolder folder;
  EXPECT_EQ(read_spec_folder(folder.path()).status().message(),
            folder.file("config.json") + ": cannot open: No such file or directory");
  std::filesystem::create_directory(folder.file("config.json"));
  EXPECT_EQ(read_spec_folder(folder.path()).status().message(),
            folder.file("config.json") + ": expected a regular file");
}

TEST(ReadSpec, CorpusOfTheFuzzerIsHarmless) {
  size_t files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(WEIR_SOURCE_DIR "/tests/fuzz/corpus/config")) {
    error_of(test::read_file(entry.path().string()));
    ++files;
  }
  EXPECT_GT(files, 5u);
}

}  // namespace
}  // namespace weir
