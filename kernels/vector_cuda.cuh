#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// Small vectors in registers.
__device__ inline float dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
__device__ inline float4 times(float4 a, float4 b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ inline float4 scaled(float4 a, float scale) {
  return {a.x * scale, a.y * scale, a.z * scale, a.w * scale};
}
__device__ inline float4 plus(float4 a, float scale, float4 b) {
  return {a.x + scale * b.x, a.y + scale * b.y, a.z + scale * b.z, a.w + scale * b.w};
}

// As one store: the compiler may make four of an assignment.
__device__ inline void store_four(float* to, float4 x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}

// Three instructions instead of some twenty: relative errors of 1e-7 (1 + |x|), for gates and
// activations, not for decays, whose errors add up over a sequence.
__device__ inline float quick_exp(float x) { return __expf(x); }
__device__ inline float quick_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// log(1 + e^x), which is x itself where 1 no longer counts.
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The sum over the threads of a warp that are `lanes` apart, in each of them: over the groups of
// `lanes` neighbouring ones.
template <int lanes>
__device__ inline float sum_over_groups(float value) {
#pragma unroll
  for (int step = lanes; step < 32; step *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

// The sum, or the largest, over a block's threads, in each of them, in one order.
template <int warps>
__device__ inline float sum_over_block(float value, float* partial) {
  value = sum_over_lanes(value);
  __syncthreads();  // what the last use left has been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's sum is there
  float all = 0;
#pragma unroll
  for (int w = 0; w < warps; ++w) all += partial[w];
  return all;
}
template <int warps>
__device__ inline float max_over_block(float value, float* partial) {
  value = max_over_lanes(value);
  __syncthreads();  // what the last use left has been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's largest is there
  float all = partial[0];
#pragma unroll
  for (int w = 1; w < warps; ++w) all = fmaxf(all, partial[w]);
  return all;
}

// Each of `count` neighbouring threads has `count` numbers; thread i gets the sum of all i-th ones,
// in count - 1 exchanges instead of count * log2(count). What was in `values` is lost.
template <int count, int step = count / 2>
__device__ inline float scatter_sums(float (&values)[count]) {
  const bool upper = threadIdx.x & step;
#pragma unroll
  for (int i = 0; i < step; ++i) {
    const float kept = upper ? values[i + step] : values[i];
    const float given = upper ? values[i] : values[i + step];
    values[i] = kept + __shfl_xor_sync(0xffffffffu, given, step);
  }
  if constexpr (step > 1) return scatter_sums<count, step / 2>(values);
  return values[0];
}

// All threads of all blocks of a cluster come here before one goes on, and then see what the others
// wrote before.
template <int blocks>
__device__ inline void meet() {
#if __CUDA_ARCH__ >= 900
  if constexpr (blocks > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
#endif
}

// The same variable in the shared memory of another block of the cluster.
template <int blocks>
__device__ inline float* in_block(float* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  if constexpr (blocks > 1) {
    uint64_t theirs;
    asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
    return reinterpret_cast<float*>(theirs);
  }
#endif
  return mine;
}

}  // namespace weir::cuda
