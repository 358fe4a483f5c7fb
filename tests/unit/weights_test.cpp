#include "engine/weights.h"

#include <gtest/gtest.h>

#include "engine/read_spec.h"
#include "tests/unit/checkpoint_writer.h"
#include "tests/unit/host_backend.h"

namespace weir {
namespace {

using nlohmann::json;
using test::HostBackend;
using test::TemporaryFolder;
using test::TestTensors;

// A loaded checkpoint, or why it was refused.
struct Loaded {
  ModelSpec spec;
  std::optional<Safetensors> files;
  ModelWeights weights;
  std::string error;
  int adopted = 0;
};

Loaded load(const std::string& folder) {
  Loaded loaded;
  const auto spec = read_spec_folder(folder);
  EXPECT_TRUE(spec.ok()) << spec.status();
  auto files = Safetensors::open_folder(folder);
  EXPECT_TRUE(files.ok()) << files.status();
  if (!spec.ok() || !files.ok()) return loaded;
  loaded.spec = *spec;
  loaded.files = *std::move(files);
  HostBackend backend;
  auto weights = read_weights(loaded.spec, *loaded.files, backend);
  loaded.adopted = backend.adopted;
  if (weights.ok()) {
    loaded.weights = *std::move(weights);
  } else {
    loaded.error = std::string(weights.status().message());
  }
  return loaded;
}

Loaded load(const json& config, const TestTensors& tensors) {
  TemporaryFolder folder;  // the mapping outlives the names
  test::write_checkpoint(folder.path(), config, tensors);
  Loaded loaded = load(folder.path());
  const std::string at = folder.path() + "/";
  if (loaded.error.starts_with(at)) loaded.error.erase(0, at.size());
  return loaded;
}

ModelSpec spec_of(const json& config) {
  const auto spec = read_spec(config.dump(), "config");
  EXPECT_TRUE(spec.ok()) << spec.status();
  return *spec;
}

json small(const std::string& type) {
  json config = {{"model_type", type},       {"hidden_size", 32},  {"num_hidden_layers", 2},
                 {"intermediate_size", 48}, {"vocab_size", 40},  {"num_heads", 2}};
  if (type != "transformer" && type != "delta_net") config["head_dim"] = 8;
  return config;
}

// Every number of the loaded weights, in the order of the structs.
struct Numbers {
  std::vector<float> small;
  std::string matrices;

  void add(const Matrix& m) {
    if (m) matrices.append(static_cast<const char*>(m.data), m.bytes());
  }
  void add(const float* data, int64_t size) {
    if (data) small.insert(small.end(), data, data + size);
  }
  void add(const DeltaMixer& m, const DeltaWeights& w) {
    const int64_t keys = m.key_heads * m.key_dim, values = m.value_heads * m.value_dim;
    const int64_t width = m.conv ? m.conv->width : 0;
    for (const Matrix* matrix : {&w.q, &w.k, &w.v, &w.a, &w.f0, &w.f1, &w.b, &w.w, &w.g, &w.g0,
                                 &w.g1, &w.o}) {
      add(*matrix);
    }
    add(w.conv_q, keys * width);
    add(w.conv_k, keys * width);
    add(w.conv_v, values * width);
    add(w.conv_q_bias, keys);
    const int64_t heads = m.decay == DecayGate::PerKeyChannel ? m.key_heads : m.value_heads;
    add(w.decay_a, heads);
    add(w.dt_bias, m.decay == DecayGate::PerHead ? heads : heads * m.key_dim);
    add(w.g1_bias, values);
    add(w.norm, m.value_dim);
  }
  void add(const AttentionMixer& m, const AttentionWeights& w) {
    for (const Matrix* matrix : {&w.q, &w.k, &w.v, &w.o}) add(*matrix);
    add(w.q_bias, m.heads * m.head_dim);
    add(w.k_bias, m.kv_heads * m.head_dim);
    add(w.q_norm, m.head_dim);
  }
  bool operator==(const Numbers&) const = default;
};

Numbers numbers(const Loaded& loaded) {
  Numbers all;
  if (loaded.weights.layers.size() != loaded.spec.layers.size()) return all;  // refused
  all.add(loaded.weights.embedding);
  for (size_t i = 0; i < loaded.spec.layers.size(); ++i) {
    const LayerWeights& w = loaded.weights.layers[i];
    const Mixer& mixer = loaded.spec.layers[i].mixer;
    all.add(w.mixer_norm, loaded.spec.dim);
    all.add(w.mlp_norm, loaded.spec.dim);
    for (const Matrix* matrix : {&w.gate, &w.up, &w.down}) all.add(*matrix);
    if (const auto* delta = std::get_if<DeltaMixer>(&mixer)) {
      all.add(*delta, std::get<DeltaWeights>(w.mixer));
    } else {
      all.add(std::get<AttentionMixer>(mixer), std::get<AttentionWeights>(w.mixer));
    }
  }
  all.add(loaded.weights.norm, loaded.spec.dim);
  all.add(loaded.weights.head);
  return all;
}

void expect_same(const Loaded& modern, const Loaded& legacy) {
  EXPECT_EQ(modern.error, "");
  EXPECT_EQ(legacy.error, "");
  EXPECT_GT(numbers(modern).matrices.size(), 1000u);
  EXPECT_TRUE(numbers(modern) == numbers(legacy));
}

void rename(TestTensors& tensors, const std::string& from, const std::string& to) {
  auto node = tensors.extract(from);
  ASSERT_TRUE(node);
  node.key() = to;
  tensors.insert(std::move(node));
}

// Class defaults: the loader wants exactly the tensors that such a model is known to have.
TEST(ReadWeights, ClassDefaultsHaveTheKnownTotals) {
  struct Total {
    const char* type;
    int64_t parameters;
    size_t tensors;
  };
  for (const Total& total : {Total{"transformer", 1'364'297'728, 219},
                             Total{"delta_net", 1'365'677'056, 339},
                             Total{"gated_deltanet", 1'387'348'732, 381},
                             Total{"kda", 1'390'941'568, 507}}) {
    const json config = {{"model_type", total.type}};
    const TestTensors tensors = test::empty_tensors(spec_of(config), TensorType::BF16);
    int64_t parameters = 0;
    for (const auto& [name, tensor] : tensors) parameters += test::elements(tensor.shape);
    EXPECT_EQ(parameters, total.parameters) << total.type;
    EXPECT_EQ(tensors.size(), total.tensors) << total.type;

    TemporaryFolder folder;
    test::write_file(folder.file("config.json"), config.dump());
    test::write_zero_safetensors(folder.file("model.safetensors"), tensors);
    EXPECT_EQ(load(folder.path()).error, "");
  }
}

TEST(ReadWeights, EveryOptionOfEveryTypeLoadsInEveryDtype) {
  std::vector<json> configs;
  const auto add = [&](const std::string& type, const json& changes) {
    configs.push_back(small(type));
    configs.back().update(changes);
  };
  add("transformer",
      {{"num_heads", 4}, {"num_kv_heads", 2}, {"qkv_bias", true}, {"qk_norm", true}});
  add("transformer", {{"tie_word_embeddings", true}});
  add("delta_net", json::object());
  add("delta_net", {{"use_gate", true}, {"use_beta", false}, {"expand_k", 0.5}, {"expand_v", 2}});
  add("delta_net", {{"use_short_conv", false}});
  add("gated_deltanet", json::object());
  add("gated_deltanet", {{"use_gate", false}, {"num_v_heads", 6}, {"conv_size", 2}});
  add("kda", {{"num_v_heads", 4}, {"expand_v", 2}, {"lower_bound", -5}});
  add("gdn2", {{"num_v_heads", 4}, {"expand_v", 2}});
  for (const char* type : {"delta_net", "gated_deltanet", "kda", "gdn2"}) {
    add(type, {{"attn", {{"layers", {1}}, {"num_heads", 4}, {"num_kv_heads", 1},
                         {"qkv_bias", true}}}});
  }
  for (const json& config : configs) {
    for (const TensorType type : {TensorType::F32, TensorType::F16, TensorType::BF16}) {
      const TestTensors tensors = test::random_tensors(spec_of(config), type, 1);
      const Loaded loaded = load(config, tensors);
      EXPECT_EQ(loaded.error, "") << config;
      EXPECT_GT(numbers(loaded).small.size(), 100u);
      EXPECT_EQ(loaded.weights.embedding.bytes(), 40u * 32 * size_of(type));
    }
  }
}

TEST(ReadWeights, VectorsAreWidenedExactlyAndALogIsExponentiated) {
  const json config = small("gated_deltanet");
  for (const TensorType type : {TensorType::F32, TensorType::F16, TensorType::BF16}) {
    TestTensors tensors = test::random_tensors(spec_of(config), type, 2);
    tensors["model.layers.0.attn.dt_bias"].values = {-1.5f, 0.0009765625f};
    tensors["model.layers.0.attn.A_log"].values = {0, 2};
    if (type == TensorType::F16) {
      tensors["model.layers.0.attn.dt_bias"].values = {-65504, std::ldexp(3.0f, -24)};
    }
    const Loaded loaded = load(config, tensors);
    ASSERT_EQ(loaded.error, "");
    const auto& w = std::get<DeltaWeights>(loaded.weights.layers[0].mixer);
    EXPECT_EQ(w.dt_bias[0], tensors["model.layers.0.attn.dt_bias"].values[0]);
    EXPECT_EQ(w.dt_bias[1], tensors["model.layers.0.attn.dt_bias"].values[1]);
    EXPECT_EQ(w.decay_a[0], 1);
    EXPECT_FLOAT_EQ(w.decay_a[1], std::exp(2.0f));
  }
}

TEST(ReadWeights, ShardsEqualOneFile) {
  const json config = small("kda");
  const TestTensors tensors = test::random_tensors(spec_of(config), TensorType::BF16, 3);
  TemporaryFolder folder;
  test::write_file(folder.file("config.json"), config.dump());
  test::write_shards(folder.path(), tensors, 3);
  expect_same(load(config, tensors), load(folder.path()));
}

TEST(ReadWeights, FusedMlpIsGateThenUp) {
  const json config = small("delta_net");
  TestTensors tensors = test::random_tensors(spec_of(config), TensorType::BF16, 4);
  const Loaded modern = load(config, tensors);
  for (const std::string at : {"model.layers.0.mlp.", "model.layers.1.mlp."}) {
    test::TestTensor& gate = tensors[at + "gate_proj.weight"];
    const test::TestTensor& up = tensors[at + "up_proj.weight"];
    gate.values.insert(gate.values.end(), up.values.begin(), up.values.end());
    gate.shape[0] *= 2;
    tensors.erase(at + "up_proj.weight");
  }
  const Loaded fused = load(config, tensors);
  expect_same(modern, fused);
  EXPECT_EQ(modern.weights.bytes, fused.weights.bytes);
}

TEST(ReadWeights, DeadDOfGatedDeltaNetIsIgnoredAndRefusedElsewhere) {
  json config = small("gated_deltanet");
  TestTensors tensors = test::random_tensors(spec_of(config), TensorType::BF16, 5);
  const Loaded modern = load(config, tensors);
  tensors["model.layers.1.attn.D"] = {TensorType::F32, {2}, {1, 2}};
  expect_same(modern, load(config, tensors));

  config = small("kda");
  tensors = test::random_tensors(spec_of(config), TensorType::BF16, 5);
  tensors["model.layers.1.attn.D"] = {TensorType::F32, {2}, {1, 2}};
  EXPECT_EQ(load(config, tensors).error,
            "model.safetensors: tensor model.layers.1.attn.D: expected none of this name, "
            "found [2]");
}

TEST(ReadWeights, OldNameOfTheEmbedding) {
  for (const bool tied : {false, true}) {
    json config = small("delta_net");
    config["tie_word_embeddings"] = tied;
    TestTensors tensors = test::random_tensors(spec_of(config), TensorType::F32, 6);
    const Loaded modern = load(config, tensors);
    rename(tensors, "model.embeddings.weight", "model.embed_tokens.weight");
    expect_same(modern, load(config, tensors));
  }
}

TEST(ReadWeights, FirstKdaFiles) {
  const json config = small("kda");
  TestTensors tensors = test::random_tensors(spec_of(config), TensorType::F32, 7);
  const Loaded modern = load(config, tensors);
  for (const std::string at : {"model.layers.0.attn.", "model.layers.1.attn."}) {
    rename(tensors, at + "A_log", at + "A");
    rename(tensors, at + "dt_bias", at + "f_proj.1.bias");
  }
  expect_same(modern, load(config, tensors));
}

TEST(ReadWeights, TiedModelsMayStoreTheirHeadIfItIsTheEmbedding) {
  json config = small("delta_net");
  config["tie_word_embeddings"] = true;
  TestTensors tensors = test::random_tensors(spec_of(config), TensorType::BF16, 8);
  const Loaded without = load(config, tensors);
  EXPECT_EQ(without.weights.head.data, without.weights.embedding.data);
  tensors["lm_head.weight"] = tensors["model.embeddings.weight"];
  const Loaded with = load(config, tensors);
  expect_same(without, with);
  EXPECT_EQ(without.weights.bytes, with.weights.bytes);
  EXPECT_EQ(with.weights.head.data, with.weights.embedding.data);

  tensors["lm_head.weight"].values[7] += 1;
  EXPECT_EQ(load(config, tensors).error,
            "model.safetensors: tensor lm_head.weight: expected the embedding again, as "
            "tie_word_embeddings is true; found other numbers");
  tensors["lm_head.weight"].shape = {32, 40};
  EXPECT_EQ(load(config, tensors).error,
            "model.safetensors: tensor lm_head.weight: expected [40, 32], found [32, 40]");
  config["tie_word_embeddings"] = false;
  tensors.erase("lm_head.weight");
  EXPECT_EQ(load(config, tensors).error,
            "model.safetensors: tensor lm_head.weight: expected [40, 32], found none");
}

TEST(ReadWeights, ConvolutionBiasIsReadWhenThere) {
  const json config = small("gated_deltanet");
  TestTensors tensors = test::random_tensors(spec_of(config), TensorType::F32, 9);
  const auto bias = [](const Loaded& loaded) {
    return std::get<DeltaWeights>(loaded.weights.layers[0].mixer).conv_q_bias;
  };
  EXPECT_EQ(bias(load(config, tensors)), nullptr);
  tensors["model.layers.0.attn.q_conv1d.bias"] = {TensorType::F32, {16},
                                                  std::vector<float>(16, 0.25f)};
  const Loaded loaded = load(config, tensors);
  ASSERT_EQ(loaded.error, "");
  EXPECT_EQ(bias(loaded)[15], 0.25f);
}

TEST(ReadWeights, RefusalsNameTensorExpectedAndFoundAndNothingReachesTheDevice) {
  const json config = small("gated_deltanet");
  const TestTensors good = test::random_tensors(spec_of(config), TensorType::BF16, 10);
  const std::string at = "model.layers.1.attn.", prefix = "model.safetensors: tensor ";
  const auto expect_error = [&](const TestTensors& tensors, const std::string& message) {
    const Loaded loaded = load(config, tensors);
    EXPECT_EQ(loaded.error, prefix + message);
    EXPECT_EQ(loaded.adopted, 0);
  };
  TestTensors bad = good;
  bad.erase(at + "o_proj.weight");
  expect_error(bad, at + "o_proj.weight: expected [32, 32], found none");

  bad = good;
  bad[at + "q_proj.weight"].shape = {32, 16};
  expect_error(bad, at + "q_proj.weight: expected [16, 32], found [32, 16]");

  bad = good;
  bad[at + "q_conv1d.weight"].shape = {4, 1, 16};  // as many numbers, the other way round
  expect_error(bad, at + "q_conv1d.weight: expected [16, 1, 4], found [4, 1, 16]");

  bad = good;
  bad["model.norm.weight"].shape = {4, 8};
  expect_error(bad, "model.norm.weight: expected [32], found [4, 8]");

  bad = good;
  bad["extra"] = {TensorType::F32, {1, 2}, {0, 0}};
  bad["extra2"] = bad["extra"];
  expect_error(bad, "extra: expected none of this name, found [1, 2] (and 1 more unknown ones)");

  for (const TensorType type :
       {TensorType::F64, TensorType::I32, TensorType::I64, TensorType::U8}) {
    bad = good;
    bad[at + "k_proj.weight"].type = type;
    expect_error(bad, at + "k_proj.weight: expected BF16, F16 or F32, found " + name(type));
  }
}

TEST(ReadWeights, NumbersThatAreNotFiniteAreRefusedInSmallTensors) {
  const json config = small("gated_deltanet");
  for (const TensorType type : {TensorType::F32, TensorType::F16, TensorType::BF16}) {
    const TestTensors good = test::random_tensors(spec_of(config), type, 11);
    for (const char* last : {"attn.A_log", "attn.dt_bias", "attn.o_norm.weight",
                             "attn_norm.weight", "attn.k_conv1d.weight"}) {
      for (const auto& [number, text] : {std::pair(INFINITY, "inf"), std::pair(NAN, "nan")}) {
        TestTensors bad = good;
        const std::string tensor = std::string("model.layers.0.") + last;
        bad[tensor].values[1] = number;
        const std::string error = load(config, bad).error;
        EXPECT_TRUE(error.starts_with("model.safetensors: tensor " + tensor +
                                      ": expected a finite number")) << error;
        EXPECT_TRUE(error.ends_with(std::string("found ") + text + " at element 1")) << error;
      }
    }
  }
  TestTensors bad = test::random_tensors(spec_of(config), TensorType::F32, 12);
  bad["model.layers.0.attn.A_log"].values[0] = 100;
  EXPECT_EQ(load(config, bad).error,
            "model.safetensors: tensor model.layers.0.attn.A_log: expected a finite number with a "
            "finite exponential, found 100 at element 0");
}

TEST(ReadWeights, EveryVectorLoads) {
  size_t folders = 0;
  for (const auto& entry : std::filesystem::directory_iterator(WEIR_SOURCE_DIR "/tests/vectors")) {
    if (!entry.is_directory()) continue;  // a file of another format
    EXPECT_EQ(load(entry.path().string()).error, "") << entry.path();
    ++folders;
  }
  EXPECT_GE(folders, 7u);
}

}  // namespace
}  // namespace weir
