// How many sequences fit is arithmetic, and known before anything is loaded.
#include "server/capacity.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/serve/client.h"
#include "tests/unit/temporary_folder.h"

namespace weir {
namespace {

constexpr size_t kMib = size_t(1) << 20;

ModelSpec recurrent_spec() {
  ModelSpec spec{.vocab = 100};
  const DeltaMixer mixer{.key_heads = 4, .value_heads = 4, .key_dim = 128, .value_dim = 128};
  spec.layers.assign(4, LayerSpec{.mixer = mixer});
  return spec;
}
ModelSpec hybrid_spec() {
  ModelSpec spec = recurrent_spec();
  spec.layers.push_back({.mixer = AttentionMixer{.heads = 4, .kv_heads = 2, .head_dim = 64}});
  return spec;
}

CapacityGiven given(size_t free_mib) {
  return {.free_bytes = free_mib * kMib, .weights_bytes = 10 * kMib,
          .workspace_bytes = [](const Limits& limits) {
            return size_t(limits.step_tokens) * 1024;
          }};
}

std::string all(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

TEST(Capacity, PlentyOfMemoryGivesTheDefault) {
  const auto plan = plan_capacity(recurrent_spec(), {}, given(10'000));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->limits.slots, 64);
  EXPECT_EQ(plan->limits.pages, 0);
  EXPECT_EQ(plan->limits.step_tokens, 512);
  EXPECT_EQ(all(plan->lines).find("clamped"), std::string::npos);
}

// What fits is counted out, to the last slot.
TEST(Capacity, ClampedToWhatFits) {
  const size_t slot = state_size(recurrent_spec()).slot();
  const CapacityAsked asked{.slots = 10'000, .state_bytes = 20 * slot + slot / 2};
  const auto plan = plan_capacity(recurrent_spec(), asked, given(10'000));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->limits.slots, 20);
  EXPECT_NE(all(plan->lines).find("asked for 10000 slots, possible 20"), std::string::npos)
      << all(plan->lines);
}

// What waits beside states is counted as they are.
TEST(Capacity, DeferredWritesTakeRoomAndSaySo) {
  const size_t waiting = waiting_bytes(recurrent_spec());
  ASSERT_GT(waiting, 0u);
  const size_t slot = state_size(recurrent_spec()).slot() + waiting;
  CapacityGiven deferring = given(10'000);
  deferring.defers_writes = true;
  const CapacityAsked asked{.slots = 10'000, .state_bytes = 20 * slot + slot / 2};
  const auto plan = plan_capacity(recurrent_spec(), asked, deferring);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->limits.slots, 20);
  EXPECT_EQ(plan->size.slot(), slot);
  const std::string line = absl::StrCat(" (", waiting, " for deferred writes), conv ");
  EXPECT_NE(all(plan->lines).find(line), std::string::npos) << all(plan->lines);
}

TEST(Capacity, StrictRefuses) {
  const CapacityAsked asked{.slots = 10'000, .state_bytes = 20 * kMib, .strict = true};
  const auto plan = plan_capacity(recurrent_spec(), asked, given(10'000));
  ASSERT_FALSE(plan.ok());
  EXPECT_NE(plan.status().message().find("asked for 10000 slots"), absl::string_view::npos);
}

// Whatever is clamped is said, and refused when strict: the step, its chunks, the lengths.
TEST(Capacity, StrictRefusesEveryClamp) {
  struct Clamp {
    ModelSpec spec;
    CapacityAsked asked;
    const char* line;
  };
  const Clamp clamps[] = {
      {recurrent_spec(), {.slots = 30, .step_tokens = 8, .chunk_tokens = 8},
       "asked for 8 tokens a step, needed 30"},
      {recurrent_spec(), {.slots = 1, .step_tokens = 8, .chunk_tokens = 256},
       "asked for prompt chunks of 256 tokens, possible 8"},
      {hybrid_spec(), {.slots = 1, .kv_pages = 2, .prompt_tokens = 129, .new_tokens = 1},
       "asked for prompts of 129 and answers of 1 tokens, possible 128"},
      {hybrid_spec(), {.slots = 1, .kv_pages = 2, .prompt_tokens = 1, .new_tokens = 129},
       "asked for prompts of 1 and answers of 129 tokens, possible 128"}};
  for (Clamp clamp : clamps) {
    SCOPED_TRACE(clamp.line);
    const auto clamped = plan_capacity(clamp.spec, clamp.asked, given(10'000));
    ASSERT_TRUE(clamped.ok()) << clamped.status();
    EXPECT_NE(all(clamped->lines).find(std::string("clamped: ") + clamp.line), std::string::npos)
        << all(clamped->lines);
    clamp.asked.strict = true;
    const auto refused = plan_capacity(clamp.spec, clamp.asked, given(10'000));
    ASSERT_FALSE(refused.ok());
    EXPECT_NE(refused.status().message().find(clamp.line), absl::string_view::npos)
        << refused.status();
  }
  const CapacityAsked fits{.slots = 8, .kv_pages = 2, .step_tokens = 8, .chunk_tokens = 8,
                           .prompt_tokens = 128, .new_tokens = 128, .strict = true};
  EXPECT_TRUE(plan_capacity(hybrid_spec(), fits, given(10'000)).ok());
}

TEST(Capacity, NotOneSequenceFits) {
  const auto plan = plan_capacity(recurrent_spec(), {.state_bytes = 1000}, given(10'000));
  ASSERT_FALSE(plan.ok());
  EXPECT_NE(plan.status().message().find("one sequence needs"), absl::string_view::npos);
}

// 512 slots of 2^55 bytes are 2^64: no bytes at all, when they are multiplied.
TEST(Capacity, StatesBeyondTheRangeOfSizesDoNotFit) {
  ModelSpec spec{.vocab = 100};
  const AttentionMixer widest{
      .heads = 1024, .kv_heads = 1024, .head_dim = 1024, .window = 1 << 20};
  spec.layers.assign(4096, LayerSpec{.mixer = widest});
  ASSERT_EQ(state_size(spec).slot(), size_t(1) << 55);
  for (const int32_t slots : {0, 512, 65536}) {
    const auto plan = plan_capacity(spec, {.slots = slots}, given(10'000));
    ASSERT_FALSE(plan.ok()) << slots;
    EXPECT_NE(plan.status().message().find("one sequence needs 36028797018963968 bytes"),
              absl::string_view::npos)
        << plan.status();
  }
}

TEST(Capacity, WeightsThatDoNotFit) {
  const auto plan = plan_capacity(recurrent_spec(), {}, given(11));
  ASSERT_FALSE(plan.ok());
  EXPECT_NE(plan.status().message().find("the weights need 10.0 MiB"), absl::string_view::npos);
}

// Everything planned is within what is free, whatever is asked.
TEST(Capacity, NeverMoreThanThereIs) {
  for (const ModelSpec& spec : {recurrent_spec(), hybrid_spec()}) {
    for (const int32_t slots : {0, 1, 5, 64, 10'000}) {
      for (const size_t state_mib : {0, 20, 64, 1'000'000}) {
        for (const int32_t pages : {0, 1, 1 << 24}) {
          const CapacityAsked asked{
              .slots = slots, .kv_pages = pages, .state_bytes = state_mib * kMib};
          const auto plan = plan_capacity(spec, asked, given(200));
          ASSERT_TRUE(plan.ok()) << plan.status();
          const size_t states = size_t(plan->limits.slots) * plan->size.slot() +
                                size_t(plan->limits.pages) * plan->page_bytes;
          EXPECT_LE(states, plan->state_budget);
          EXPECT_LE(states + plan->workspace_bytes + 10 * kMib, 200 * kMib);
          EXPECT_GE(plan->limits.step_tokens, plan->limits.slots);
          EXPECT_GE(plan->limits.slots, 1);
          if (plan->page_bytes > 0) {
            EXPECT_GE(plan->limits.pages, 1);
          }
        }
      }
    }
  }
}

TEST(Capacity, MoreSlotsThanStepTokensRaiseTheStep) {
  const CapacityAsked asked{.slots = 30, .step_tokens = 8, .chunk_tokens = 256};
  const auto plan = plan_capacity(recurrent_spec(), asked, given(10'000));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->limits.step_tokens, 30);
  EXPECT_EQ(plan->limits.chunk_tokens, 30);
}

// A misspelt key is said at the start, by name; strict, the start is refused.
TEST(Start, AConfigKeyThatNothingReads) {
  const test::TemporaryFolder folder;
  std::filesystem::copy(testing::vectors("gated-deltanet"), folder.path());
  const std::string path = folder.file("config.json");
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  text.insert(text.find('{') + 1, "\"norm_epz\": 1e-5,");
  std::ofstream(path) << text;
  {
    testing::TestServer server(folder.path());
    EXPECT_TRUE(server.serving()) << server.output();
    EXPECT_NE(server.output().find("ignored: " + path + ": norm_epz: nothing reads this key"),
              std::string::npos) << server.output();
  }
  testing::TestServer strict(folder.path(), {"--strict"});
  EXPECT_FALSE(strict.serving());
  EXPECT_EQ(strict.wait_exit(), 1);
  EXPECT_NE(strict.output().find(path + ": norm_epz: nothing reads this key"), std::string::npos)
      << strict.output();
}

}  // namespace
}  // namespace weir
