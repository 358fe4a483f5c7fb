// Where the slots' bytes are: every layer's part of every slot has memory of its own, a layer's
// parts lie end to end, and a slot that is copied takes all its layers' parts with it and no other.
#include "engine/state_pool.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine/read_spec.h"
#include "kernels/backend.h"

namespace weir {
namespace {

// Layers of three sizes, one of them without any state in its slot.
constexpr char kHybrid[] =
    R"({"model_type":"gated_deltanet","num_hidden_layers":4,"hidden_size":48,"num_heads":2,
        "head_dim":16,"attn":{"layers":[1,3],"num_heads":2,"window_size":5}})";
constexpr char kRetNet[] =
    R"({"model_type":"retnet","num_hidden_layers":3,"hidden_size":32,"num_heads":2,
        "attn":{"layers":[1],"num_heads":2}})";

class StatePoolTest : public testing::TestWithParam<const char*> {
 protected:
  static constexpr int32_t kSlots = 3;

  StatePoolTest() : spec_(*read_spec(GetParam(), "C")) {
    for (const LayerSpec& layer : spec_.layers) {
      floats_.push_back(int64_t(state_size(layer, spec_.dim).slot() / sizeof(float)));
    }
    for (Slot slot = 0; slot < kSlots; ++slot) {
      visit(slot, [&](float& x, int64_t i) { x = number(slot, i); });
    }
  }

  // A number that no other slot and element has.
  static float number(Slot slot, int64_t i) { return float(slot) + float(kSlots * i); }

  template <typename See>
  void visit(Slot slot, See see) {
    int64_t i = 0;
    for (size_t layer = 0; layer < floats_.size(); ++layer) {
      float* const part = pool_.layer_state(int32_t(layer)).at(slot);
      for (int64_t j = 0; j < floats_[layer]; ++j) see(part[j], i++);
    }
  }

  const ModelSpec spec_;
  const Limits limits_{.slots = kSlots, .pages = 1, .page_tokens = 4};
  const std::unique_ptr<Backend> backend_ = make_cpu_backend({.threads = 1});
  StatePool pool_{spec_, limits_, *backend_};
  std::vector<int64_t> floats_;
};

TEST_P(StatePoolTest, PartsAreApart) {
  for (Slot slot = 0; slot < kSlots; ++slot) {
    visit(slot, [&](float x, int64_t i) { ASSERT_EQ(x, number(slot, i)); });
  }
}

TEST_P(StatePoolTest, ALayersPartsLieEndToEnd) {
  for (size_t layer = 0; layer < floats_.size(); ++layer) {
    EXPECT_EQ(pool_.layer_state(int32_t(layer)).stride, floats_[layer]);
  }
}

TEST_P(StatePoolTest, ASlotIsCopiedWholeAndAlone) {
  std::vector<float> copy(pool_.slot_bytes() / sizeof(float));
  pool_.download_slot(1, copy.data());
  for (size_t i = 0; i < copy.size(); ++i) ASSERT_EQ(copy[i], number(1, int64_t(i)));

  pool_.upload_slot(2, copy.data());
  for (const Slot slot : {0, 1, 2}) {
    const Slot from = slot == 2 ? 1 : slot;
    visit(slot, [&](float x, int64_t i) { ASSERT_EQ(x, number(from, i)); });
  }
}

INSTANTIATE_TEST_SUITE_P(Hybrids, StatePoolTest, testing::Values(kHybrid, kRetNet));

}  // namespace
}  // namespace weir
