#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// The way of DeltaMix at the speed of memory, for rows of one token; other rows are left alone.
// Whether it serves the op's sizes on this device:
bool streams(const DeltaMix& op, const Context& context);
void run_stream(const DeltaMix& op, Context& context);

// Heads of 128x128, a block for each.
bool holds(const DeltaMix& op, const Context& context);
void run_held(const DeltaMix& op, Context& context);

// Heads of 256 keys, a block for 64 values.
bool slices(const DeltaMix& op, const Context& context);
void run_slices(const DeltaMix& op, Context& context);

}  // namespace weir::cuda
