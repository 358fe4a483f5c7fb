#pragma once
#include "kernels/types.h"

namespace weir {

// Rotary positions in place: pairs (i, i + dim / 2), angle = position * theta^(-2 i / dim).
struct Rotary {
  Rows rows;
  int32_t heads = 0, dim = 0;
  float theta = 0;
  Acts x;  // [tokens, heads * dim]
};

}  // namespace weir
