// Mixture-of-Memories on whole models: a memory that a token is not routed to stays as it is.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/model.h"
#include "engine/runner.h"
#include "engine/state_pool.h"

namespace weir {
namespace {

// One layer's part of a slot, cut into memories: the state and the history of each.
struct MemoryParts {
  const MomMixer& m;
  int64_t begin = 0;  // of the layer, floats

  int64_t state() const { return int64_t(m.heads) * m.key_dim * m.value_dim; }
  int64_t history() const { return int64_t(m.conv_channels()) * (m.conv.width - 1); }

  std::vector<float> of(const std::vector<float>& slot, int32_t memory) const {
    const auto at = slot.begin() + begin;
    const auto histories = at + m.states() * state() + m.memories;
    std::vector<float> part(at + memory * state(), at + (memory + 1) * state());
    part.insert(part.end(), histories + memory * history(), histories + (memory + 1) * history());
    return part;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class Mom : public testing::TestWithParam<const char*> {};

// Slots begin as NaN: a memory reads as zeros when its first token comes, and until then not a bit
// of it may change, neither by a decay nor by a shift of its convolution.
TEST_P(Mom, UnchosenMemoriesAreUntouched) {
  const auto backend = make_cpu_backend({.threads = 2});
  const Model model =
      *load_model(std::string(WEIR_SOURCE_DIR) + "/tests/vectors/" + GetParam(), *backend);
  const Limits limits{.slots = 2, .pages = 1, .page_tokens = 8, .step_tokens = 8,
                      .chunk_tokens = 8, .prompt_tokens = 64, .new_tokens = 64,
                      .vocab = model.spec.vocab};
  StatePool pool(model.spec, limits, *backend);
  Runner runner(model, pool, limits, *backend);
  std::vector<float> before(pool.slot_bytes() / sizeof(float),
                            std::numeric_limits<float>::quiet_NaN());
  pool.upload_slot(1, before.data());
  int64_t untouched = 0;
  for (int32_t t = 0; t < 40; ++t) {
    StepBatch batch;
    batch.rows.push_back({.id = 1, .slot = 1, .first = t, .count = 1, .begin = 0, .pages = {}});
    batch.tokens = {Token((t * 29 + 3) % model.spec.vocab)};
    batch.outputs.push_back({.id = 1, .token = 0, .position = t + 1});
    runner.step(batch);
    for (const float logit : runner.logits(0)) ASSERT_TRUE(std::isfinite(logit));

    std::vector<float> after(before.size());
    pool.download_slot(1, after.data());
    int64_t begin = 0;
    for (const LayerSpec& layer : model.spec.layers) {
      const auto& m = std::get<MomMixer>(layer.mixer);
      const MemoryParts parts{m, begin};
      int32_t changed = 0;
      for (int32_t e = 0; e < m.memories; ++e) {
        const bool still = same(parts.of(before, e), parts.of(after, e));
        still ? ++untouched : ++changed;
      }
      EXPECT_EQ(changed, m.chosen) << "token " << t;
      if (m.shared) {
        EXPECT_FALSE(same(parts.of(before, m.memories), parts.of(after, m.memories)));
      }
      begin += int64_t(state_size(layer.mixer).slot() / sizeof(float));
    }
    before = after;
  }
  EXPECT_GT(untouched, 0);
}

INSTANTIATE_TEST_SUITE_P(Vectors, Mom,
                         testing::Values("mom", "random-mom", "random-mom-unshared",
                                         "random-mom-single", "random-mom-single-unshared"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace weir
