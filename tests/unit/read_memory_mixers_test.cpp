// forgetting_transformer and mom: what their keys mean, what is refused, what a sequence keeps.
#include <gtest/gtest.h>

#include "engine/read_spec.h"

namespace weir {
namespace {

absl::StatusOr<ModelSpec> read(const std::string& type, const std::string& keys = "") {
  return read_spec(R"({"model_type":")" + type + "\"" + (keys.empty() ? "" : ",") + keys + "}",
                   "C");
}

std::string error_of(const std::string& type, const std::string& keys) {
  const auto spec = read(type, keys);
  return spec.ok() ? "accepted" : std::string(spec.status().message());
}

const AttentionMixer& forgetting(const ModelSpec& spec) {
  return std::get<AttentionMixer>(spec.layers[0].mixer);
}

TEST(ReadForgetting, DefaultsAndOptions) {
  const auto usual = read("forgetting_transformer");
  ASSERT_TRUE(usual.ok()) << usual.status();
  const AttentionMixer& m = forgetting(*usual);
  EXPECT_EQ(usual->layers.size(), 24u);
  EXPECT_EQ(m.heads, 32);
  EXPECT_EQ(m.kv_heads, 32);
  EXPECT_EQ(m.head_dim, 64);
  EXPECT_EQ(m.rope_theta, 0);  // no positions but the gates
  EXPECT_TRUE(m.forget_gate);
  EXPECT_FALSE(m.qkv_bias || m.qk_norm || m.norm_per_head || m.output_gate);

  const auto other = read("forgetting_transformer",
                          R"("num_heads":32,"num_kv_heads":8,"qkv_bias":true,"qk_norm":true,)"
                          R"("use_output_gate":true,"window_size":null)");
  ASSERT_TRUE(other.ok()) << other.status();
  const AttentionMixer& n = forgetting(*other);
  EXPECT_EQ(n.kv_heads, 8);
  EXPECT_TRUE(n.qkv_bias && n.qk_norm && n.norm_per_head && n.output_gate);
}

// Without positions a head may have an odd size.
TEST(ReadForgetting, OddHeads) {
  EXPECT_EQ(error_of("forgetting_transformer", R"("hidden_size":30,"num_heads":2)"), "accepted");
  EXPECT_EQ(error_of("transformer", R"("hidden_size":30,"num_heads":2)"),
            "C: num_heads: expected hidden_size (30) / num_heads to be whole and even, found 2");
}

TEST(ReadForgetting, Refusals) {
  EXPECT_EQ(error_of("forgetting_transformer", R"("window_size":128)"),
            "C: window_size: expected null for a forgetting_transformer, found 128");
  EXPECT_EQ(error_of("forgetting_transformer", R"("attn":{"layers":[0],"num_heads":4})"),
            "C: attn: expected null for a forgetting_transformer, found an object");
  EXPECT_EQ(error_of("forgetting_transformer", R"("num_heads":3)"),
            "C: num_heads: expected hidden_size (2048) / num_heads to be whole, found 3");
}

// Keys and values of the kv heads, and two numbers for the gate of each query head; a plain
// transformer pays for no gates.
TEST(ReadForgetting, BytesOfAToken) {
  const std::string heads = R"("num_heads":32,"num_kv_heads":8)";
  const StateSize fox = state_size(*read("forgetting_transformer", heads));
  EXPECT_EQ(fox.kv_per_token, 24u * 4 * (2 * 8 * 64 + 2 * 32));
  EXPECT_EQ(fox.slot(), 0u);
  EXPECT_EQ(state_size(*read("transformer", heads)).kv_per_token, 24u * 4 * 2 * 8 * 64);
}

TEST(ReadMom, DefaultsAndOptions) {
  const auto usual = read("mom");
  ASSERT_TRUE(usual.ok()) << usual.status();
  const auto& m = std::get<MomMixer>(usual->layers[0].mixer);
  EXPECT_EQ(usual->layers.size(), 24u);
  EXPECT_EQ(m.heads, 4);
  EXPECT_EQ(m.key_dim, 256);
  EXPECT_EQ(m.value_dim, 256);
  EXPECT_EQ(m.memories, 4);
  EXPECT_EQ(m.chosen, 2);
  EXPECT_EQ(m.conv.width, 4);
  EXPECT_TRUE(m.shared && m.output_gate);
  EXPECT_FALSE(m.single_projection);

  const auto other = read("mom", R"("num_memories":9,"topk":3,"shared_mem":false,"capacity":0.5,)"
                                 R"("single_kv_proj":true,"use_output_gate":false,"conv_size":3,)"
                                 R"("mom_backend":"gated_deltanet","expand_v":0.5,"attn":null)");
  ASSERT_TRUE(other.ok()) << other.status();
  const auto& n = std::get<MomMixer>(other->layers[0].mixer);
  EXPECT_EQ(n.memories, 9);
  EXPECT_EQ(n.chosen, 3);
  EXPECT_EQ(n.conv.width, 3);
  EXPECT_EQ(n.value_dim, 128);
  EXPECT_TRUE(n.single_projection);
  EXPECT_FALSE(n.shared || n.output_gate);
}

TEST(ReadMom, Refusals) {
  EXPECT_EQ(error_of("mom", R"("use_short_conv":false)"),
            "C: use_short_conv: expected true for a mom, found false");
  EXPECT_EQ(error_of("mom", R"("topk":5)"),
            "C: topk: expected a whole number from 1 to 4, found 5");
  EXPECT_EQ(error_of("mom", R"("num_memories":0)"),
            "C: num_memories: expected a whole number from 1 to 32, found 0");
  EXPECT_EQ(error_of("mom", R"("mom_backend":"gla")"),
            "C: mom_backend: expected one of gated_deltanet, found the string \"gla\"");
  EXPECT_EQ(error_of("mom", R"("attn":{"layers":[0],"num_heads":4})"),
            "C: attn: expected null for a mom, found an object");
}

// The 340M model: 24 layers of five memories with 4 x 256 x 256 numbers and histories of three
// entries, and what counts the tokens of the four that are routed to.
TEST(ReadMom, BytesOfASequence) {
  const StateSize size = state_size(*read("mom", R"("hidden_size":1024)"));
  EXPECT_EQ(size.recurrent, 24u * 4 * (5 * 4 * 256 * 256 + 4));
  EXPECT_EQ(size.conv, 24u * 4 * 5 * 3 * 3 * 1024);
  EXPECT_EQ(size.kv_per_token, 0u);
}

}  // namespace
}  // namespace weir
