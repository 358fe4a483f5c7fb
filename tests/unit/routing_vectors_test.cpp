// 34 models of the Megatron family with every routing scheme, whose weights are hashes of names:
// their logits against what a float64 reference computes from the formulas of arXiv 2607.07953.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "tests/unit/golden_bench.h"
#include "tests/unit/hashed_weir_model.h"

namespace weir {
namespace {

using nlohmann::json;
using test::alone;
using test::Bench;
using test::HashedWeirModel;

// What the family's specification states of the last of 12 steps: the first logits, the largest
// one's place and the sum of squares.
struct Variant {
  const char* name;
  std::array<double, 4> logits;
  Token most_likely;
  double squares;
};
constexpr std::array kVariants = {
    Variant{"softmax",
            {-1.492285325, 0.790291858, -1.699748826, -1.221893273}, 62, 67.627862193},
    Variant{"delta-hybrid",
            {0.022578027, 0.722262880, -0.347488522, -0.287830748}, 33, 74.680619859},
    Variant{"delta-pure",
            {-1.737864606, 1.423118033, -0.775977509, 0.287407390}, 1, 47.989687008},
    Variant{"gdn-hybrid",
            {1.477941012, -1.687441102, -0.595492516, -1.094717550}, 35, 80.913081791},
    Variant{"gdn-pure",
            {-0.517908443, -0.145713067, 0.085789020, -1.047261891}, 35, 57.210307018},
    Variant{"kda-hybrid",
            {-0.670841468, 0.511854724, 1.040728741, 2.498167455}, 8, 81.889767175},
    Variant{"kda-pure",
            {0.181243754, 0.473129845, 0.172848552, -0.149187700}, 51, 63.485374045},
    Variant{"gdn2-hybrid",
            {0.344684435, 0.113104027, -0.164524881, 0.639568028}, 35, 69.257298400},
    Variant{"gdn2-pure",
            {-0.906975875, 1.120879768, -0.622051390, 0.604818572}, 18, 57.923491008},
    Variant{"gdn2-lowrank-hybrid",
            {2.304527846, -1.141225041, 1.265221230, 1.072911684}, 0, 69.113237500},
    Variant{"linear-hybrid",
            {-0.134092878, 0.430047694, 0.556460536, -0.165093060}, 21, 66.467683400},
    Variant{"gdn-clvr",
            {0.751624404, -0.850486432, 1.012397850, -0.341307839}, 35, 60.095428525},
    Variant{"gdn-cler-h",
            {1.445588573, -1.309088272, 0.531146337, -0.405779552}, 35, 62.468116504},
    Variant{"delta-clvr",
            {-0.450341861, 0.575260938, -0.818089051, 0.024749205}, 36, 61.149615265},
    Variant{"delta-cler-h",
            {-0.341740481, 0.973828859, -0.613734369, -0.274794998}, 36, 68.922056709},
    Variant{"gdn-clvr-r4",
            {0.734478545, -0.220250867, -1.509565413, -1.028010458}, 42, 89.750755910},
    Variant{"gdn-clvr-norm",
            {-0.022190853, -0.083052765, 0.432789511, 0.656747730}, 36, 57.739216401},
    Variant{"gdn-cler-g",
            {1.212154013, -1.136865263, 0.594376956, -0.835932324}, 35, 58.547206511},
    Variant{"gdn-cler-rv",
            {-0.207350823, 0.025808506, -0.092846359, 0.237568980}, 29, 79.754359771},
    Variant{"gdn-selftrans-r4",
            {-0.553856057, -1.747768041, 0.472453232, 0.794750863}, 24, 55.435759608},
    Variant{"gdn-attnres",
            {-1.218946267, 1.093259608, -1.388115957, -0.784997996}, 23, 69.529234717},
    Variant{"delta-attnres",
            {-0.404774428, 0.151163726, 0.407480288, -0.732711328}, 6, 68.060764248},
    Variant{"gdn-attnres-clvr",
            {-1.133687513, 1.003205257, -1.048520611, -1.880027925}, 20, 72.579780967},
    Variant{"gdn-attnres-cler-densesoftmax",
            {-0.140303527, 0.628164582, 0.580381523, -0.185636945}, 62, 68.368701401},
    Variant{"gdn-cler-scalar",
            {1.822754719, -1.561269696, -0.548415689, -1.045381425}, 35, 77.572539042},
    Variant{"delta-cler-scalar",
            {-0.007820651, 0.675091856, -0.316422357, -0.459116845}, 33, 71.451267085},
    Variant{"gdn-cler-head-norm",
            {1.708979390, -0.884340003, 0.140180202, -0.202758370}, 35, 54.525706591},
    Variant{"gdn-cler-channel",
            {2.054547471, -1.411305656, -0.409497394, -0.862487490}, 35, 71.336887854},
    Variant{"gdn-cler-output",
            {0.943226265, -0.332098878, -0.060322659, -0.927041104}, 35, 60.059330459},
    Variant{"gdn-cler-densemean",
            {1.795209595, -1.681481231, -0.082410214, -0.847703301}, 35, 69.092567849},
    Variant{"gdn-cler-densesoftmax",
            {1.777227026, -1.622550144, -0.080978713, -0.757806706}, 35, 66.662459158},
    Variant{"gdn-cler-dyngate",
            {1.708891533, -1.501654602, -0.221875439, -0.777652284}, 35, 66.644935295},
    Variant{"gdn-cler-attnres",
            {0.987486791, 0.431172403, 0.014641783, -0.533195085}, 35, 55.524019868},
    Variant{"gdn-cler-attnres-dyn",
            {1.350649541, 0.319193578, -0.260050897, -0.531508344}, 35, 57.393204845},
};

json model(const std::string& kind, int stride = 3, int layers = 6) {
  json types = json::array();
  for (int i = 0; i < layers; ++i) types.push_back((i + 1) % stride == 0 ? "softmax" : kind);
  const bool few = kind == "delta" || kind == "linear";
  return {{"model_type", "weir"},
          {"hidden_size", 32},
          {"vocab_size", 64},
          {"num_hidden_layers", layers},
          {"intermediate_size", 48},
          {"layer_types", types},
          {"num_heads", 4},
          {"num_kv_heads", 2},
          {"head_dim", 8},
          {"attention_output_gate", kind == "gdn" || kind == "gdn2"},
          {"linear_num_key_heads", 2},
          {"linear_num_value_heads", few ? 2 : 4},
          {"linear_key_head_dim", 8},
          {"linear_value_head_dim", few ? 16 : 8},
          {"gdn2_low_rank", false}};
}

// A variant's config.json from its name: "gdn-cler-head-norm".
json config_of(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (name == "softmax") return model("softmax", 1, 4);
  json config = model(name.substr(0, name.find('-')), has("-pure") ? 100 : 3);
  config["gdn2_low_rank"] = has("-lowrank");
  const bool depth = has("-attnres") && !has("-cler-attnres");
  if (depth) config["attention_residuals"] = {{"eps", 1e-6}};
  const std::array<std::pair<const char*, const char*>, 5> signals = {
      {{"-clvr", "value"}, {"-cler-h", "error"}, {"-cler-g", "gated_value"}, {"-cler-rv", "both"},
       {"-selftrans", "self"}}};
  for (const auto& [part, signal] : signals) {
    const size_t at = name.find(part);
    const size_t end = at + std::string(part).size();
    if (at == std::string::npos || (end < name.size() && name[end] != '-')) continue;
    config["route"] = {
        {"signal", signal}, {"rank", has("-r4") ? 4 : 0}, {"normalize", has("-norm")}};
    return config;
  }
  if (!has("-cler-")) return config;
  json& cler = config["cler"];
  cler["mode"] = has("-cler-attnres")   ? "attnres"
                 : has("-densemean")    ? "dense_mean"
                 : has("-densesoftmax") ? "dense_softmax"
                                        : "latest";
  cler["gamma"] = has("-head") || has("-dense") ? "head" : has("-channel") ? "channel" : "scalar";
  cler["dynamic"] = has("-dyn");
  cler["normalize"] = has("-norm");
  cler["site"] = has("-output") ? "output" : "value";
  return config;
}

std::vector<Token> tokens() {
  std::vector<Token> made;
  for (int i = 0; i < 12; ++i) made.push_back((7 * i + 3) % 64);
  return made;
}

// How far all logits, and the last step's, may be from the reference with the same float32 weights,
// and the last step's from the published numbers of exact weights. With attention residuals some of
// these models tell small numbers apart by norms: rounding the weights alone moves logits by 5e-5,
// and a float32 run of the reference itself is off by 1.6e-4.
struct Bounds {
  double all = 5e-5, last = 2e-5, published = 3e-5;
};
Bounds bounds_of(const std::string& name, bool plain) {
  const bool depth = name.starts_with("gdn-attnres") || name.starts_with("delta-attnres");
  if (name == "gdn-attnres-clvr") return {.all = 3e-4, .last = 5e-5, .published = 8e-5};
  if (depth && !plain) return {.all = 3e-4, .last = 5e-5, .published = 8e-5};
  if (depth) return {.all = 1e-4, .last = 1e-5, .published = 8e-5};
  return plain ? Bounds{.all = 1e-5, .last = 1e-5, .published = 1e-5} : Bounds{};
}

double difference(const float* a, const std::vector<double>& b) {
  double worst = 0;
  for (size_t i = 0; i < b.size(); ++i) worst = std::max(worst, std::fabs(double(a[i]) - b[i]));
  return worst;
}

class RoutingVectors : public testing::TestWithParam<Variant> {
 protected:
  RoutingVectors() { HashedWeirModel(config_of(GetParam().name)).write(folder_.path()); }

  test::TemporaryFolder folder_;
};

// Fails on a formula, a tensor or a key that is not the family's.
TEST_P(RoutingVectors, AgreesWithTheReference) {
  const Variant& variant = GetParam();
  const std::string path = WEIR_SOURCE_DIR "/tests/reference/routing.safetensors";
  const auto file = *Safetensors::open_file(path);
  const auto golden = test::values<float>(file, variant.name);
  for (const CpuOptions& options : {CpuOptions{}, CpuOptions{.threads = 1, .simd = 0},
                                    CpuOptions{.threads = 1, .simd = 1},
                                    CpuOptions{.plain = true}}) {
    if (options.simd == 1 && !__builtin_cpu_supports("avx2")) continue;
    Bench bench(folder_.path(), options);
    SCOPED_TRACE(bench.backend->info().name);
    const Bounds bounds = bounds_of(variant.name, options.plain);
    const auto logits = alone(bench, tokens(), 12);
    EXPECT_LT(test::difference(logits, golden), bounds.all);
    const float* const last = logits.data() + 11 * 64;
    EXPECT_LT(difference(last, {golden.end() - 64, golden.end()}), bounds.last);
    EXPECT_LT(difference(last, {variant.logits.begin(), variant.logits.end()}), bounds.published);
    EXPECT_EQ(std::max_element(last, last + 64) - last, variant.most_likely);
    double squares = 0;
    for (int i = 0; i < 64; ++i) squares += double(last[i]) * double(last[i]);
    EXPECT_NEAR(squares, variant.squares, 2 * std::sqrt(64 * variant.squares) * bounds.published);
  }
}

// Fails when something that crosses layers leaks from one token to the next.
TEST_P(RoutingVectors, ChunksDoNotShow) {
  Bench bench(folder_.path());
  const std::vector<float> whole = alone(bench, tokens(), 12);
  for (const int32_t chunk : {1, 2, 5, 7}) {
    EXPECT_EQ(test::difference(alone(bench, tokens(), chunk), whole), 0) << "chunks of " << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, RoutingVectors, testing::ValuesIn(kVariants),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// The logits of a variant, after a change to its tensors.
std::vector<float> run(const std::string& name, const std::function<void(test::TestTensors&)>& edit,
                       const CpuOptions& options = {}) {
  test::TemporaryFolder folder;
  HashedWeirModel model(config_of(name));
  edit(model.tensors());
  model.write(folder.path());
  Bench bench(folder.path(), options);
  return alone(bench, tokens(), 12);
}

void set_all(test::TestTensors& tensors, const std::string& part, float value) {
  int found = 0;
  for (auto& [name, tensor] : tensors) {
    if (name.find(part) == std::string::npos) continue;
    ++found;
    std::fill(tensor.values.begin(), tensor.values.end(), value);
  }
  ASSERT_GT(found, 0) << part;
}

// Routing that carries nothing leaves the host model as it is: to the bit where the values do not
// take another path, otherwise to rounding.
TEST(RoutingIdentities, NothingRoutedIsTheHost) {
  const std::vector<float> gdn = run("gdn-hybrid", [](auto&) {});
  const std::vector<float> delta = run("delta-hybrid", [](auto&) {});
  const auto zeroed = [](const char* variant, const char* part) {
    return run(variant, [&](test::TestTensors& tensors) { set_all(tensors, part, 0); });
  };
  EXPECT_EQ(test::difference(zeroed("gdn-cler-h", "route_proj"), gdn), 0);
  EXPECT_EQ(test::difference(zeroed("delta-cler-h", "route_proj"), delta), 0);
  EXPECT_EQ(test::difference(zeroed("gdn-selftrans-r4", "route_proj.1"), gdn), 0);
  EXPECT_EQ(test::difference(zeroed("gdn-cler-output", "cler_gamma"), gdn), 0);
  constexpr double kRounding = 5e-5;
  for (const char* variant : {"gdn-clvr", "gdn-cler-g", "gdn-cler-rv", "gdn-clvr-norm"}) {
    EXPECT_LT(test::difference(zeroed(variant, "route_proj"), gdn), kRounding) << variant;
  }
  EXPECT_LT(test::difference(zeroed("delta-clvr", "route_proj"), delta), kRounding);
  for (const char* variant : {"gdn-cler-scalar", "gdn-cler-channel", "gdn-cler-head-norm",
                              "gdn-cler-densemean", "gdn-cler-densesoftmax"}) {
    EXPECT_LT(test::difference(zeroed(variant, "cler_gamma"), gdn), kRounding) << variant;
  }
  const auto own_values_only = [](test::TestTensors& tensors) {
    set_all(tensors, "cler_self_bias", 1e4f);
  };
  EXPECT_LT(test::difference(run("gdn-cler-attnres", own_values_only), gdn), kRounding);
}

// A projection and the two factors of it are one model; with rank = width the second is the whole.
TEST(RoutingIdentities, FactorsAreTheirProduct) {
  const std::vector<float> factors = run("gdn-clvr-r4", [](auto&) {});
  test::TestTensors low = HashedWeirModel(config_of("gdn-clvr-r4")).tensors();
  const std::vector<float> product = run("gdn-clvr", [&](test::TestTensors& tensors) {
    for (auto& [name, tensor] : tensors) {
      const size_t at = name.find("route_proj.weight");
      if (at == std::string::npos) continue;
      const auto& down = low[name.substr(0, at) + "route_proj.0.weight"].values;
      const auto& up = low[name.substr(0, at) + "route_proj.1.weight"].values;
      for (size_t i = 0; i < 32 * 32; ++i) {
        double sum = 0;
        for (size_t r = 0; r < 4; ++r) {
          sum += double(up[i / 32 * 4 + r]) * double(down[r * 32 + i % 32]);
        }
        tensor.values[i] = float(sum);
      }
    }
  });
  EXPECT_LT(test::difference(factors, product), 5e-5);
}

// What loading a variant says when its tensors were changed.
std::string refusal(const std::string& name,
                    const std::function<void(test::TestTensors&)>& edit) {
  test::TemporaryFolder folder;
  HashedWeirModel model(config_of(name));
  edit(model.tensors());
  model.write(folder.path());
  const auto backend = make_cpu_backend();
  const auto loaded = load_model(folder.path(), *backend);
  return loaded.ok() ? "loaded" : std::string(loaded.status().message());
}

TEST(RoutingTensors, MissingOnesAreRefusedByName) {
  for (const auto& [variant, tensor] : std::vector<std::pair<const char*, const char*>>{
           {"gdn-clvr", "model.layers.0.route_proj.weight"},
           {"gdn-clvr-r4", "model.layers.4.route_proj.1.weight"},
           {"gdn-cler-g", "model.layers.1.route_gate"},
           {"gdn-cler-channel", "model.layers.1.attn.cler_gamma"},
           {"gdn-cler-densesoftmax", "model.layers.3.attn.cler_query"},
           {"gdn-cler-dyngate", "model.layers.1.attn.cler_gate.bias"},
           {"gdn-cler-attnres", "model.layers.1.attn.cler_self_bias"},
           {"gdn-cler-attnres-dyn", "model.layers.1.attn.cler_self_gate.weight"},
           {"gdn-attnres", "model.layers.1.attn_res_proj.weight"},
           {"gdn-attnres", "model.res_proj.weight"},
           {"gdn2-lowrank-hybrid", "model.layers.0.attn.f_proj.1.weight"},
           {"gdn-hybrid", "model.layers.2.attn.g_proj.weight"}}) {
    const std::string expected = std::string("tensor ") + tensor + ": expected";
    const std::string message =
        refusal(variant, [tensor = tensor](test::TestTensors& tensors) { tensors.erase(tensor); });
    EXPECT_NE(message.find(expected), std::string::npos) << message;
    EXPECT_NE(message.find("found none"), std::string::npos) << message;
  }
}

TEST(RoutingTensors, OthersAreRefusedByName) {
  const auto add = [](const char* name) {
    return [name](test::TestTensors& tensors) {
      tensors[name] = {.shape = {1}, .values = {0.5f}};
    };
  };
  for (const auto& [variant, tensor] : std::vector<std::pair<const char*, const char*>>{
           {"gdn-clvr", "model.layers.0.attn.cler_gamma"},
           {"gdn-hybrid", "model.layers.0.route_gate"},
           {"gdn-attnres", "model.layers.0.attn_res_proj.weight"},
           {"gdn-cler-scalar", "model.layers.2.attn.cler_gamma"}}) {
    const std::string message = refusal(variant, add(tensor));
    const std::string expected = std::string("tensor ") + tensor + ": expected none of this name";
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  }
}

// Nothing reaches the first recurrent layer: its gamma may be there or not.
TEST(RoutingTensors, TheFirstLayerNeedsNoGamma) {
  const auto without = [](test::TestTensors& tensors) {
    ASSERT_EQ(tensors.erase("model.layers.0.attn.cler_gamma"), 1u);
  };
  EXPECT_EQ(test::difference(run("gdn-cler-scalar", without), run("gdn-cler-scalar", [](auto&) {})),
            0);
}

}  // namespace
}  // namespace weir
