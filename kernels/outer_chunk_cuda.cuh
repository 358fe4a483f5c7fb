#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// Rows of an OuterStep with more tokens than this go through the chunk kernel.
constexpr int kOuterStepsMost = 32;

// Runs every row of more than kOuterStepsMost tokens in chunk form (outer_chunk.h) and leaves the
// others alone. False, having done nothing, where the op's sizes are not served so.
bool run_chunks(const OuterStep& op, Context& context);

}  // namespace weir::cuda
