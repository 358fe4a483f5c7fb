#include "engine/state_pool.h"

#include "engine/deferred_writes.h"
#include "kernels/check.h"

namespace weir {

StatePool::StatePool(const ModelSpec& spec, const Limits& limits, Backend& backend)
    : backend_(backend), defers_writes_(weir::defers_writes(spec, limits.slots, backend)) {
  const int64_t slots = int64_t(limits.slots) + limits.snapshots;
  for (const LayerSpec& layer : spec.layers) {
    const StateSize size = state_size(layer, spec.dim);
    const int64_t waiting =
        defers_writes_ ? int64_t(waiting_bytes(layer) / sizeof(float)) : 0;
    const int64_t floats = int64_t(size.slot() / sizeof(float)) + waiting;
    layer_slots_.push_back(
        {.begin = slot_floats_ * slots, .floats = floats, .waiting = waiting});
    page_offset_.push_back(page_floats_);
    slot_floats_ += floats;
    page_floats_ += int64_t(size.kv_per_token / sizeof(float)) * limits.page_tokens;
  }
  if (slot_floats_ > 0) {
    slots_ = static_cast<float*>(backend.allocate(size_t(slots) * slot_bytes()));
  }
  if (page_floats_ > 0) {
    const size_t bytes = size_t(limits.pages) * size_t(page_floats_) * sizeof(float);
    pages_ = static_cast<float*>(backend.allocate(bytes));
  }
}

SlotState StatePool::layer_state(int32_t layer) const {
  const LayerSlots& part = layer_slots_[size_t(layer)];
  return {slots_ + part.begin, part.floats};
}

SlotState StatePool::layer_pending(int32_t layer) const {
  const LayerSlots& part = layer_slots_[size_t(layer)];
  if (part.waiting == 0) return {};
  return layer_state(layer).from(part.floats - part.waiting);
}

float* StatePool::layer_pages(int32_t layer) const { return pages_ + page_offset_[size_t(layer)]; }

void StatePool::copy_slot(Slot to, Slot from) const {
  for (const LayerSlots& part : layer_slots_) {
    if (part.floats == 0) continue;
    float* const slot_0 = slots_ + part.begin;
    backend_.copy(slot_0 + to * part.floats, slot_0 + from * part.floats,
                  size_t(part.floats) * sizeof(float));
  }
}

void StatePool::download_slot(Slot slot, float* host) const {
  for (const LayerSlots& part : layer_slots_) {
    backend_.download(host, slots_ + part.begin + slot * part.floats,
                      size_t(part.floats) * sizeof(float));
    host += part.floats;
  }
  backend_.finish();
}

void StatePool::upload_slot(Slot slot, const float* host) const {
  for (const LayerSlots& part : layer_slots_) {
    backend_.upload(slots_ + part.begin + slot * part.floats, host,
                    size_t(part.floats) * sizeof(float));
    host += part.floats;
  }
  backend_.finish();
}

}  // namespace weir
