#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// Rows of a DeltaMix with more tokens than this go through the chunk kernel.
constexpr int kStepTokensMost = 8;

struct Chunks {
  bool run = false;   // false: nothing was done, as the op's sizes are not served so
  bool apart = true;  // of whatever kernels of the other rows write, which may run meanwhile
  SplitVectors left;  // where the answers lie split for the next op; the other rows' must join them
};
// Runs every row of more than kStepTokensMost tokens in chunk form (delta_chunk.h) and leaves the
// others alone.
Chunks run_chunks(const DeltaMix& op, Context& context);
// Whether it does so for an op of these sizes.
bool serves_chunks(const DeltaMix& op, const Context& context);

}  // namespace weir::cuda
