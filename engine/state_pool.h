#pragma once
#include <vector>

#include "engine/limits.h"
#include "engine/spec.h"
#include "kernels/backend.h"

namespace weir {

// Where a slot's and a page's bytes are. Layer-major: a layer's parts of all slots lie end to end,
// because a step reads and writes them together, and memory is faster when they are near (an H200
// moves 3 to 4 % more than with all layers of a slot side by side). A whole slot is copied layer by
// layer. Behind the sequences' slots lie those of snapshots. Pages hold all layers' keys and values
// of page_tokens positions. Memory belongs to the backend.
class StatePool {
 public:
  StatePool(const ModelSpec& spec, const Limits& limits, Backend& backend);

  // A layer's part of every slot: its state matrices, then its conv history or ring.
  SlotState layer_state(int32_t layer) const;
  // Behind them, where the backend defers_writes(), what waits to be added to the matrices; null in
  // layers where nothing does.
  SlotState layer_pending(int32_t layer) const;
  bool defers_writes() const { return defers_writes_; }
  // A layer's block in page 0, and the floats from one page to the next.
  float* layer_pages(int32_t layer) const;
  int64_t page_floats() const { return page_floats_; }
  size_t slot_bytes() const { return size_t(slot_floats_) * sizeof(float); }

  // Asked of the backend, in order with the steps before and after.
  void copy_slot(Slot to, Slot from) const;
  // slot_bytes(): the layers' parts in order.
  void download_slot(Slot slot, float* host) const;
  void upload_slot(Slot slot, const float* host) const;

 private:
  // A layer's part of slot 0, its floats in each slot, and how many of them are for what waits.
  struct LayerSlots {
    int64_t begin, floats, waiting;
  };

  Backend& backend_;
  const bool defers_writes_;
  std::vector<LayerSlots> layer_slots_;  // [layers]
  std::vector<int64_t> page_offset_;     // [layers], floats
  int64_t slot_floats_ = 0, page_floats_ = 0;
  float* slots_ = nullptr;
  float* pages_ = nullptr;
};

}  // namespace weir
