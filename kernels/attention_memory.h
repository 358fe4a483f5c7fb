#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/attention.h"

namespace weir {

// A row's keys and values for one kv head, and the sums of log forget gates of its query heads.
struct AttentionMemory {
  const Attention& op;
  int32_t row = 0;
  Slot slot = kPadding;
  int64_t kv_head = 0;

  int64_t block_tokens() const { return op.window > 0 ? op.window : op.page_tokens; }
  // Where the block of a position begins, and the position's place in it.
  float* block(int32_t position) const {
    if (op.window > 0) return op.ring.at(slot);
    const int32_t page =
        op.page_table[int64_t(row) * op.pages_per_row + position / op.page_tokens];
    return op.pages + page * op.page_stride;
  }
  int64_t place(int32_t position) const { return position % block_tokens(); }

  // The key of a position; its value lies values_after() floats on.
  float* key(int32_t position) const {
    return block(position) + (kv_head * block_tokens() + place(position)) * op.head_dim;
  }
  int64_t values_after() const { return int64_t(op.kv_heads) * block_tokens() * op.head_dim; }

  // The sum of log gates up to a position for the first query head of this kv head; the next
  // head's lies block_tokens() floats on, and what rounding left of each sum_rest() floats on.
  float* gate_sum(int32_t position) const {
    const int64_t head = kv_head * (op.heads / op.kv_heads);
    return block(position) + 2 * values_after() + head * block_tokens() + place(position);
  }
  int64_t sum_rest() const { return int64_t(op.heads) * block_tokens(); }

  // The oldest position that a token sees.
  int32_t first_seen(int32_t position) const {
    return op.window > 0 ? std::max(0, position - op.window + 1) : 0;
  }
};

namespace cpu {

// Keeps a position's sums of log gates: those of the position before, and its own token's.
void add_gates(const AttentionMemory& memory, int32_t token, int32_t position);

}  // namespace cpu
}  // namespace weir
