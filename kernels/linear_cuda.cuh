#pragma once
#include <cuda_bf16.h>

#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// From this many tokens on, cuBLASLt takes the large parts of a Linear.
inline constexpr int kLargeTokens = 17;

// Vectors as bf16 high + low = x to 16 bits, each [tokens, in] without gaps, in the scratch.
struct SplitVectors {
  __nv_bfloat16 *high = nullptr, *low = nullptr;
};
SplitVectors split_vectors(int in, int tokens, const Context& context);
void split(const Acts& x, int in, int tokens, Context& context);

int total_rows(const Linear& op);
void run_small(const Linear& op, Context& context);  // any Linear
void run_large(const Linear& op, Context& context);  // bf16, 16-byte aligned, by cuBLASLt

}  // namespace weir::cuda
