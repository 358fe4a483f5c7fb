// 34 models of the Megatron family with every routing scheme, whose weights are hashes of names:
// their logits against what a float64 reference computes from the formulas of arXiv 2607.07953.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "tests/unit/golden_bench.h"
#include "tests/unit/hashed_weir_model.h"
#include "tests/unit/routing_variants.h"

namespace weir {
namespace {

using test::alone;
using test::Bench;
using test::config_of;
using test::HashedWeirModel;
using test::kVariants;
using test::routing_prompt;
using test::Variant;

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
    const auto logits = alone(bench, routing_prompt(), 12);
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
  const std::vector<float> whole = alone(bench, routing_prompt(), 12);
  for (const int32_t chunk : {1, 2, 5, 7}) {
    const std::vector<float> cut = alone(bench, routing_prompt(), chunk);
    EXPECT_EQ(test::difference(cut, whole), 0) << "chunks of " << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, RoutingVectors, testing::ValuesIn(kVariants),
                         [](const auto& info) { return test::test_name(info.param.name); });

// The logits of a variant, after a change to its tensors.
std::vector<float> run(const std::string& name, const std::function<void(test::TestTensors&)>& edit,
                       const CpuOptions& options = {}) {
  test::TemporaryFolder folder;
  HashedWeirModel model(config_of(name));
  edit(model.tensors());
  model.write(folder.path());
  Bench bench(folder.path(), options);
  return alone(bench, routing_prompt(), 12);
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
