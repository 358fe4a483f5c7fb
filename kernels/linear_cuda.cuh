#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// From this many tokens on, cuBLASLt takes the large parts of a Linear.
inline constexpr int kLargeTokens = 96;

int total_rows(const Linear& op);
void run_small(const Linear& op, Context& context);  // any Linear
void run_large(const Linear& op, Context& context);  // bf16, 16-byte aligned, by cuBLASLt

}  // namespace weir::cuda
