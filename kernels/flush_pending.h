#pragma once
#include "kernels/pending.h"
#include "kernels/types.h"

namespace weir {

// Adds the updates that wait beside each row's states to them (pending.h), as the row stands before
// the token at rows.first: afterwards all tokens before it are in the states. begin and tokens are
// not read.
struct FlushPending {
  Rows rows;
  int32_t heads = 0;
  PendingLayout layout;
  SlotState state;    // [heads, values, key_dim]
  SlotState pending;  // [heads, layout.floats()]
};

}  // namespace weir
