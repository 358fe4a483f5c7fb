#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// Rows of a DeltaMix with more tokens than this go through the chunk kernel.
constexpr int kStepTokensMost = 32;

// Runs every row of more than kStepTokensMost tokens in chunk form (delta_chunk.h) and leaves the
// others alone. False, having done nothing, where the op's sizes are not served so.
bool run_chunks(const DeltaMix& op, Context& context);

}  // namespace weir::cuda
