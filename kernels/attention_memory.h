#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/attention.h"

namespace weir {

// A row's keys and values for one kv head.
struct AttentionMemory {
  const Attention& op;
  int32_t row = 0;
  Slot slot = kPadding;
  int64_t kv_head = 0;

  // The key of a position; its value lies values_after() floats on.
  float* key(int32_t position) const {
    if (op.window > 0) {
      return op.ring.at(slot) + (kv_head * op.window + position % op.window) * op.head_dim;
    }
    const int32_t page =
        op.page_table[int64_t(row) * op.pages_per_row + position / op.page_tokens];
    return op.pages + page * op.page_stride +
           (kv_head * op.page_tokens + position % op.page_tokens) * op.head_dim;
  }
  int64_t values_after() const {
    return int64_t(op.kv_heads) * (op.window > 0 ? op.window : op.page_tokens) * op.head_dim;
  }
  // The oldest position that a token sees.
  int32_t first_seen(int32_t position) const {
    return op.window > 0 ? std::max(0, position - op.window + 1) : 0;
  }
};

}  // namespace weir
