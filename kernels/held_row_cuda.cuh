#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda::held {

// What the host says of a row, all of it asked for at once.
struct Row {
  Slot slot = kPadding;
  int token = 0, tokens = 0;
  int first = 0, written = 0;

  template <bool kDefers>
  __device__ void load(const Rows& rows, int row) {
    slot = rows.slot[row];
    token = rows.begin[row];
    tokens = rows.begin[row + 1] - token;
    first = rows.first[row];
    if constexpr (kDefers) written = rows.written[row];
  }
  __device__ bool steps() const { return slot != kPadding && tokens == 1; }
};

}  // namespace weir::cuda::held
