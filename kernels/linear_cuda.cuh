#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// From this many tokens on, cuBLASLt takes the large parts of a Linear.
inline constexpr int kLargeTokens = 17;

// Up to so many tokens the kernels for Hopper read the weights once.
inline constexpr int kHopperTokens = 128;

// x as bf16 in the scratch, where split_vectors() says; nothing to do if the op before left it.
void split(const Acts& x, int in, int tokens, Context& context);
// How many tokens' split vectors the scratch holds; a multiple of 8.
int most_split(int in);

int total_rows(const Linear& op);
void run_small(const Linear& op, Context& context);  // any Linear
void run_hopper(const Linear& op, Context& context);  // bf16, 16-byte aligned, few tokens
void run_large(const Linear& op, Context& context);   // bf16, 16-byte aligned, by cuBLASLt

}  // namespace weir::cuda
