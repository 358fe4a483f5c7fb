#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda::swila_chunk {

// Rows of a SwilaMix with more tokens than this go through the chunk kernel.
constexpr int kStepTokensMost = 8;

// Runs every row of more than kStepTokensMost tokens in blocked form (swila_chunk.h) and leaves the
// others alone. False, having done nothing, where the op's sizes are not served so.
bool run(const SwilaMix& op, Context& context);

// Start the kernel with blocks of `slice` value dims of a head: 16, 32 or 64.
struct Maps;
void start_plain(const SwilaMix& op, const Maps& maps, Context& context, int slice);
void start_gated(const SwilaMix& op, const Maps& maps, Context& context, int slice);

}  // namespace weir::cuda::swila_chunk
