#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// Rows of a DeltaMix with more tokens than this go through the chunk kernel.
constexpr int kStepTokensMost = 8;

struct Chunks {
  bool run = false;  // false: nothing was done, as the op's sizes are not served so
  // Not null: the answers lie there, rounded, for the next op. The other rows' must join them.
  __nv_bfloat16* rounded = nullptr;
};
// Runs every row of more than kStepTokensMost tokens in chunk form (delta_chunk.h) and leaves the
// others alone.
Chunks run_chunks(const DeltaMix& op, Context& context);
// After the others have been run.
void round_short_rows(const DeltaMix& op, __nv_bfloat16* to, Context& context);

}  // namespace weir::cuda
