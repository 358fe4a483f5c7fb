#pragma once
#include <array>

#include "kernels/types.h"

namespace weir {

// y = W x, with the rows of several matrices stacked: the concatenated in-projection of a layer
// without copying the checkpoint. Accumulation in float32.
//
// A result depends on its own x and matrix row alone, and is summed in one fixed order, so that a
// token's numbers do not depend on how many tokens share the call. On the CPU always; on CUDA up to
// 128 tokens (16 before Hopper), beyond which their number decides what computes it. Hopper's
// kernel for whole steps of up to four tokens (kernels/resident_cuda.cuh) has an order of its own.
struct Linear {
  static constexpr int kParts = 8;

  int32_t tokens = 0;
  int32_t in = 0;                    // columns of every part
  int32_t parts = 0;
  std::array<Matrix, kParts> part{};  // stacked top to bottom; [rows of each, in]
  std::array<const float*, kParts> bias{};  // [rows of the part], or null
  bool accumulate = false;           // y += W x: the residual connection
  const int32_t* range = nullptr;    // [2]: only tokens range[0] .. range[1] - 1; null: all
  Acts x;                            // [tokens, in]
  Acts y;                            // [tokens, sum of rows]
};

}  // namespace weir
