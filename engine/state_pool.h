#pragma once
#include <vector>

#include "engine/limits.h"
#include "engine/spec.h"
#include "kernels/backend.h"

namespace weir {

// Where a slot's and a page's bytes are. Slot-major: all layers' state of one sequence is
// contiguous, so that fork, snapshot, save and load are one copy of slot_bytes(). Pages likewise
// hold all layers' keys and values of page_tokens positions. Memory belongs to the backend.
class StatePool {
 public:
  StatePool(const ModelSpec& spec, const Limits& limits, Backend& backend);

  // A layer's part of every slot: its state matrices, then its conv history or ring.
  SlotState layer_state(int32_t layer) const;
  // A layer's block in page 0, and the floats from one page to the next.
  float* layer_pages(int32_t layer) const;
  int64_t page_floats() const { return page_floats_; }
  size_t slot_bytes() const { return size_t(slot_floats_) * sizeof(float); }

  void download_slot(Slot slot, void* host) const;       // slot_bytes()
  void upload_slot(Slot slot, const void* host) const;

 private:
  Backend& backend_;
  std::vector<int64_t> slot_offset_, page_offset_;  // [layers], floats
  int64_t slot_floats_ = 0, page_floats_ = 0;
  float* slots_ = nullptr;
  float* pages_ = nullptr;
};

}  // namespace weir
