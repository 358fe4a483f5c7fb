#include "engine/state_pool.h"

#include "kernels/check.h"

namespace weir {

StatePool::StatePool(const ModelSpec& spec, const Limits& limits, Backend& backend)
    : backend_(backend) {
  for (const LayerSpec& layer : spec.layers) {
    const StateSize size = state_size(layer, spec.dim);
    slot_offset_.push_back(slot_floats_);
    page_offset_.push_back(page_floats_);
    slot_floats_ += int64_t(size.slot() / sizeof(float));
    page_floats_ += int64_t(size.kv_per_token / sizeof(float)) * limits.page_tokens;
  }
  if (slot_floats_ > 0) {
    slots_ = static_cast<float*>(backend.allocate(size_t(limits.slots) * slot_bytes()));
  }
  if (page_floats_ > 0) {
    const size_t bytes = size_t(limits.pages) * size_t(page_floats_) * sizeof(float);
    pages_ = static_cast<float*>(backend.allocate(bytes));
  }
}

SlotState StatePool::layer_state(int32_t layer) const {
  return {slots_ + slot_offset_[size_t(layer)], slot_floats_};
}

float* StatePool::layer_pages(int32_t layer) const { return pages_ + page_offset_[size_t(layer)]; }

void StatePool::download_slot(Slot slot, void* host) const {
  backend_.download(host, slots_ + int64_t(slot) * slot_floats_, slot_bytes());
  backend_.finish();
}

void StatePool::upload_slot(Slot slot, const void* host) const {
  backend_.upload(slots_ + int64_t(slot) * slot_floats_, host, slot_bytes());
  backend_.finish();
}

}  // namespace weir
