// fla's attention residuals: the key, the tensors, and what a step is lowered to. Logits are
// golden_test's.
#include <gtest/gtest.h>

#include "engine/lower.h"
#include "engine/read_spec.h"
#include "engine/weights.h"
#include "tests/unit/checkpoint_writer.h"

namespace weir {
namespace {

constexpr const char* kRest =
    R"(,"hidden_size":16,"num_hidden_layers":3,"num_heads":2,"vocab_size":8,)"
    R"("intermediate_size":8})";

absl::StatusOr<ModelSpec> read(const std::string& type, const std::string& block) {
  return read_spec(R"({"model_type":")" + type + R"(","attnres_block_size":)" + block + kRest, "C");
}

TEST(DepthResidual, TheKeyIsReadAndItsEpsIsTheModels) {
  EXPECT_FALSE(read("gla", "null")->depth_residual);
  for (const int32_t block : {1, 2, 6}) {
    const auto spec = read("gla", std::to_string(block) + R"(,"norm_eps":0.5)");
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->depth_residual->block, block);
    EXPECT_EQ(spec->depth_residual->eps, 0.5f);
  }
}

TEST(DepthResidual, OtherValuesAndOtherTypesAreRefused) {
  const auto error = [](const char* type, const char* block) {
    return std::string(read(type, block).status().message());
  };
  const std::string key = "C: attnres_block_size: expected ";
  EXPECT_EQ(error("gla", "0"), key + "a whole number from 1 to 8192, found 0");
  EXPECT_EQ(error("gla", "true"), key + "a whole number from 1 to 8192, found true");
  EXPECT_EQ(error("gla", "5"), key + "1 or an even number, found 5");
  EXPECT_EQ(error("mamba2", R"(2,"head_dim":16)"), key + "null for a mamba2, found 2");
}

// A checkpoint without one of the mixes' tensors must not be served with another residual.
TEST(DepthResidual, EveryMixNeedsItsTensors) {
  const ModelSpec spec = *read("transformer", "2");
  const auto backend = make_cpu_backend();
  test::TestTensors tensors = test::random_tensors(spec, TensorType::BF16, 1);
  for (const std::string mix : {"model.layers.0.attn_res", "model.layers.2.mlp_res", "model.res"}) {
    for (const std::string& name : {mix + "_proj.weight", mix + "_norm.weight"}) {
      ASSERT_TRUE(tensors.contains(name)) << name;
      test::TestTensors fewer = tensors;
      fewer.erase(name);
      test::TemporaryFolder folder;
      test::write_file(folder.file("model.safetensors"), test::safetensors_bytes(fewer));
      const auto files = Safetensors::open_file(folder.file("model.safetensors"));
      ASSERT_TRUE(files.ok()) << files.status();
      EXPECT_EQ(read_weights(spec, *files, *backend).status().message(),
                folder.file("model.safetensors") + ": tensor " + name +
                    ": expected [16], found none");
    }
  }
}

// Sources counted wrongly, a block that begins at another half, an output that is added where it
// should begin a source: the numbers of each mix, and which halves begin one, for three layers.
TEST(DepthResidual, BlocksOfHalves) {
  struct Case {
    const char* block;
    std::vector<int32_t> sources;  // of each half's mix, and of the head's
    std::vector<bool> begins;      // halves that begin a source
  };
  for (const Case& c : {Case{"1", {1, 2, 3, 4, 5, 6, 7}, {1, 1, 1, 1, 1, 1}},
                        Case{"2", {1, 2, 2, 3, 3, 4, 4}, {1, 0, 1, 0, 1, 0}},
                        Case{"4", {1, 2, 2, 2, 2, 3, 3}, {1, 0, 0, 0, 1, 0}},
                        Case{"8", {1, 2, 2, 2, 2, 2, 2}, {1, 0, 0, 0, 0, 0}}}) {
    const ModelSpec spec = *read("transformer", c.block);
    Workspace workspace;
    const Program program = lower(spec, weight_shapes(spec), nullptr, {}, {},
                                  {.rows = 1, .tokens = 2, .outputs = 1}, workspace);
    std::vector<int32_t> sources;
    std::vector<bool> begins;
    for (const Op& op : program) {
      if (const auto* mix = std::get_if<DepthAttention>(&op)) sources.push_back(mix->count);
      const auto* linear = std::get_if<Linear>(&op);
      if (linear && linear->part[0].rows == spec.dim && linear->parts == 1) {
        begins.push_back(!linear->accumulate);
      }
    }
    EXPECT_EQ(sources, c.sources) << "blocks of " << c.block;
    EXPECT_EQ(begins, c.begins) << "blocks of " << c.block;
  }
}

}  // namespace
}  // namespace weir
