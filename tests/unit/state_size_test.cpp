// The bytes that a sequence keeps between two tokens, by kind, counted by hand for every type: a
// server that counts too few writes into another sequence's slot, one that counts too many turns
// sequences away.
#include <gtest/gtest.h>

#include <string>

#include "engine/read_spec.h"

namespace weir {
namespace {

struct Case {
  const char* type;
  const char* keys;  // of two layers
  size_t recurrent, conv, ring = 0, kv_per_token = 0;
};

// Each line: 4 bytes times 2 layers times (matrices [+ what goes with them], and 3 inputs of each
// convolved channel). Heads, keys and values all differ.
constexpr Case kCases[] = {
    {"delta_net", R"("hidden_size":96,"num_heads":4,"expand_k":0.5)", 8 * 4 * 12 * 24,
     8 * 3 * (48 + 48 + 96)},
    {"delta_net", R"("hidden_size":96,"num_heads":4,"use_short_conv":false)", 8 * 4 * 24 * 24, 0},
    {"gated_deltanet", R"("hidden_size":96,"num_heads":4,"num_v_heads":8,"head_dim":16)",
     8 * 8 * 16 * 32, 8 * 3 * (64 + 64 + 256)},
    {"kda", R"("hidden_size":96,"num_heads":4,"num_v_heads":8,"head_dim":16)", 8 * 8 * 16 * 16,
     8 * 3 * (64 + 64 + 128)},
    {"gdn2", R"("hidden_size":96,"num_heads":4,"head_dim":16,"conv_size":3)", 8 * 4 * 16 * 16,
     8 * 2 * (64 + 64 + 64)},
    {"gla", R"("hidden_size":96,"num_heads":4)", 8 * 4 * 12 * 24, 0},
    {"gla", R"("hidden_size":96,"num_heads":4,"num_kv_heads":2,"use_short_conv":true)",
     8 * 2 * 12 * 24, 8 * 3 * (48 + 24 + 48)},
    {"retnet", R"("hidden_size":96,"num_heads":4)", 8 * 4 * 24 * 48, 0},
    // Decays belong to query heads: heads that share keys still keep a matrix each.
    {"retnet", R"("hidden_size":96,"num_heads":4,"num_kv_heads":2)", 8 * 4 * 24 * 48, 0},
    {"hgrn2", R"("hidden_size":96,"expand_ratio":16)", 8 * 6 * 16 * 16, 0},
    {"hgrn2", R"("hidden_size":96,"expand_ratio":16,"use_short_conv":true)", 8 * 6 * 16 * 16,
     8 * 3 * (96 + 96 + 96)},
    {"linear_attn", R"("hidden_size":96,"num_heads":4,"expand_v":2)", 8 * 4 * 24 * 48, 0},
    {"linear_attn", R"("hidden_size":96,"num_heads":4,"num_kv_heads":2,"norm_feature_map":true)",
     8 * 2 * (24 * 24 + 24), 0},
    {"linear_attn", R"("hidden_size":96,"num_heads":4,"feature_map":"hedgehog")",
     8 * 4 * 2 * 24 * 24, 0},
    {"linear_attn", R"("hidden_size":96,"num_heads":4,"feature_map":"dpfp")",
     8 * 4 * 8 * 24 * 24, 0},
    {"gsa", R"("hidden_size":96,"num_heads":4,"num_slots":10,"expand_v":2)",
     8 * 4 * 10 * (24 + 48), 0},
    {"gsa", R"("hidden_size":96,"num_heads":4,"num_kv_heads":2,"num_slots":10,
               "use_short_conv":true)",
     8 * 2 * 10 * (24 + 24), 8 * 3 * (96 + 48 + 48)},
    {"mamba2", R"("hidden_size":96,"head_dim":16,"state_size":20,"n_groups":2)", 8 * 12 * 16 * 20,
     8 * 3 * (192 + 2 * 2 * 20)},
    {"gated_deltaproduct", R"("hidden_size":96,"num_heads":4,"head_dim":16,"num_householder":3)",
     8 * 4 * 16 * 32, 8 * 3 * (64 + 3 * 64 + 3 * 128)},
    {"comba", R"("hidden_size":96,"num_heads":4,"head_dim":16)", 8 * 4 * 16 * 32,
     8 * 3 * (64 + 64 + 128)},
    // Two inputs of hidden_size, the mixer's and the MLP's.
    {"rwkv7", R"("hidden_size":96,"head_dim":16,"value_dim":192)", 8 * 6 * 16 * 32, 8 * 2 * 96},
    // Four memories and the shared one, and how many tokens each of the four has had.
    {"mom", R"("hidden_size":96,"num_heads":4,"head_dim":16)", 8 * (5 * 4 * 16 * 16 + 4),
     8 * 5 * 3 * (64 + 64 + 64)},
    {"mom", R"("hidden_size":96,"num_heads":4,"head_dim":16,"shared_mem":false)",
     8 * (4 * 4 * 16 * 16 + 4), 8 * 4 * 3 * (64 + 64 + 64)},
    {"swila", R"("num_heads":4,"num_mixtures":3,"head_dim":16,"router_low_rank_dim":8,
                 "beta_low_rank_dim":8,"temporal":false,"gated":false)",
     8 * 4 * 3 * 16 * 16, 8 * 3 * 3 * 64},
    // A posterior and a prior for each mixture and value.
    {"swila", R"("num_heads":4,"num_mixtures":3,"head_dim":16,"router_low_rank_dim":8,
                 "beta_low_rank_dim":8,"gate_low_rank_dim":8,"temporal":true,"gated":true)",
     8 * 4 * 3 * (16 * 16 + 16 + 16), 8 * 3 * 3 * 64},
    {"transformer", R"("hidden_size":96,"num_heads":4,"num_kv_heads":2)", 0, 0, 0,
     8 * 2 * 2 * 24},
    {"transformer", R"("hidden_size":96,"num_heads":4,"window_size":7)", 0, 0,
     8 * 7 * 2 * 4 * 24},
    {"forgetting_transformer", R"("hidden_size":96,"num_heads":4,"num_kv_heads":2)", 0, 0, 0,
     8 * (2 * 2 * 24 + 2 * 4)},
    {"retnet", R"("hidden_size":96,"num_heads":4,"attn":{"layers":[1],"num_heads":4})",
     4 * 4 * 24 * 48, 0, 0, 4 * 2 * 4 * 24},
};

TEST(StateSize, IsTheSumOfWhatEachTypeKeeps) {
  for (const Case& c : kCases) {
    const std::string text = std::string(R"({"model_type":")") + c.type +
                             R"(","num_hidden_layers":2,)" + c.keys + "}";
    const auto spec = read_spec(text, "C");
    ASSERT_TRUE(spec.ok()) << text << "\n  " << spec.status();
    const StateSize size = state_size(*spec);
    EXPECT_EQ(size.recurrent, c.recurrent) << text;
    EXPECT_EQ(size.conv, c.conv) << text;
    EXPECT_EQ(size.ring, c.ring) << text;
    EXPECT_EQ(size.kv_per_token, c.kv_per_token) << text;
  }
}

// Three keys and values and a decay, of each head whose writes may be deferred.
TEST(StateSize, WhatWaitsIsOfTheMixersThatDefer) {
  const auto waiting = [](const std::string& keys) {
    const auto spec = read_spec(R"({"num_hidden_layers":2,)" + keys + "}", "C");
    EXPECT_TRUE(spec.ok()) << spec.status();
    return spec.ok() ? waiting_bytes(*spec) : 0;
  };
  EXPECT_EQ(waiting(R"("model_type":"gated_deltanet","hidden_size":96,"num_heads":4,"head_dim":16,
                       "expand_v":2)"),
            2u * 4 * 4 * (16 + 3 * (16 + 32)));
  const std::string swila =
      R"("model_type":"swila","num_heads":4,"num_mixtures":3,"head_dim":16,"router_low_rank_dim":8,
         "beta_low_rank_dim":8,"gate_low_rank_dim":8,"temporal":false,"gated":)";
  EXPECT_EQ(waiting(swila + "false"), 2u * 4 * 4 * (16 + 3 * (16 + 3 * 16)));
  EXPECT_EQ(waiting(swila + "true"), 2u * 4 * 4 * (3 * 16 + 3 * (3 * 16 + 3 * 16)));
  EXPECT_EQ(waiting(R"("model_type":"transformer","hidden_size":96,"num_heads":4)"), 0u);
}

}  // namespace
}  // namespace weir
