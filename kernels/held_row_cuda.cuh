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

// At the block's barrier 1, of so many threads: those that have made what others wait for say so.
template <int threads>
__device__ inline void say_made() {
  asm volatile("bar.arrive 1, %0;" ::"n"(threads) : "memory");
}

// Which of a grid's blocks, along x those of a row, bring what to the L2 cache. The host has
// divided: a division takes longer than a load.
struct Plan {
  int early = 0;        // blocks that have their states brought before the predecessor is done
  int ahead = 0;        // so many blocks later the one is that a block brings ahead for:
  int rows = 0, x = 0;  // so many whole rows of blocks, and so many blocks

  static Plan of(int blocks_of_row, int early, int ahead) {
    return {early, ahead, ahead / blocks_of_row, ahead % blocks_of_row};
  }
};

// The block that comes so much later, if there is one.
struct Later {
  Row row;
  int x = 0;

  template <bool kDefers>
  __device__ void load(const Rows& rows, const Plan& plan) {
    int y = blockIdx.y + plan.rows;
    x = blockIdx.x + plan.x;
    if (x >= int(gridDim.x)) x -= int(gridDim.x), ++y;
    if (y < int(gridDim.y)) row.load<kDefers>(rows, y);
  }
};

}  // namespace weir::cuda::held
