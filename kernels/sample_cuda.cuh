#pragma once
#include "kernels/cuda_util.cuh"
#include "kernels/uniform.h"

// What the ways to draw a token have in common: a block's sums, keys that order tokens.
namespace weir::cuda::sample {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;    // of a histogram
constexpr int kCandidates = kThreads;  // of a bin, at most, that are told apart one by one

using Units = unsigned long long;  // of a measure: sums do not depend on the order of addition

struct Scratch {
  double sum[kWarps];
  Units key[kWarps];
  Units bin[kBins];
  Units candidate[kCandidates], units[kCandidates];  // keys of the bin that the goal lies in
  Units before;                                      // sum over all larger keys
  int found, count;
};

// A warp's values, combined in each lane of it: always in the same order.
template <typename T, typename Combine>
__device__ T combine_lanes(T value, const Combine& combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

template <typename T, typename Combine>
__device__ T combine_block(T value, T* of_warps, const Combine& combine) {
  value = combine_lanes(value, combine);
  __syncthreads();  // the scratch of the last use has been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's value is there
  return combine_lanes(of_warps[threadIdx.x % 32], combine);
}

__device__ inline double block_sum(double value, Scratch& scratch) {
  return combine_block(value, scratch.sum, [](double a, double b) { return a + b; });
}
__device__ inline Units block_max(Units value, Scratch& scratch) {
  return combine_block(value, scratch.key, [](Units a, Units b) { return a > b ? a : b; });
}

// The sum of the lanes up to this one.
template <typename T>
__device__ T sum_up_to(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T lower = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += lower;
  }
  return value;
}

// What all warps before this one hold, and all warps together, of a value of each warp.
struct WarpSums {
  Units before, all;
};
__device__ inline WarpSums sum_warps(Units of_warp, Scratch& scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // the scratch of the last use has been read
  if (lane == 0) scratch.key[warp] = of_warp;
  __syncthreads();  // every warp's value is there
  const Units up_to = sum_up_to(scratch.key[lane]);
  const Units before = __shfl_sync(0xffffffffu, up_to, max(warp - 1, 0));
  return {warp == 0 ? 0 : before, __shfl_sync(0xffffffffu, up_to, 31)};
}

// Larger numbers have larger keys, equal ones are ordered by token, the smaller first. 0 is the
// key of no token.
__device__ inline uint64_t key_of(float value, int token) {
  const uint32_t bits = __float_as_uint(value == 0 ? 0.0f : value);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(ordered) << 32 | (0xffffffffu - uint32_t(token));
}
__device__ inline int token_of(uint64_t key) { return int(0xffffffffu - uint32_t(key)); }
__device__ inline float value_of(uint64_t key) {
  const auto ordered = uint32_t(key >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

__device__ inline uint32_t ordered(float value) { return uint32_t(key_of(value, 0) >> 32); }
__device__ inline float unordered(uint32_t bits) { return value_of(uint64_t(bits) << 32); }

}  // namespace weir::cuda::sample
