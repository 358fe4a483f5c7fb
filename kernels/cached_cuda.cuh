#pragma once
#include "kernels/cuda_util.cuh"

// How long lines stay in the L2 cache, for kernels whose states pass through it. Kept ones are the
// last to go: what is brought there ahead would else make room for states that have been stepped
// already. Whoever writes them does so as usual, which makes them lines like all others. Those that
// are only read stay what they are: loads that say otherwise cost more than they gain (NOTES.md).
// Passing ones are the first to go.
namespace weir::cuda {

enum class Stay { Kept, Usual, Passing };

template <Stay kStay>
__device__ inline uint64_t cache_policy() {
  uint64_t policy;
  if constexpr (kStay == Stay::Kept) {
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  } else if constexpr (kStay == Stay::Usual) {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// Asks for 128 bytes of device memory to be brought to the L2 cache and kept.
__device__ inline void prefetch_line_kept(const void* from) {
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(from));
}
// The same by the copy engine: 16-byte aligned, multiples of 16 bytes.
__device__ inline void bulk_prefetch_kept(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from),
               "r"(bytes), "l"(cache_policy<Stay::Kept>())
               : "memory");
#endif
}

// Past the L1 cache, as __ldcg().
template <Stay kStay>
__device__ inline float load_as(const float* from) {
  float x;
  asm volatile("ld.global.cg.L2::cache_hint.f32 %0, [%1], %2;"
               : "=f"(x)
               : "l"(from), "l"(cache_policy<kStay>()));
  return x;
}
template <Stay kStay>
__device__ inline float4 load_four_as(const float* from) {
  float4 x;
  asm volatile("ld.global.cg.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from), "l"(cache_policy<kStay>()));
  return x;
}

// As store_four().
template <Stay kStay>
__device__ inline void store_four_as(float* to, float4 x) {
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w), "l"(cache_policy<kStay>())
               : "memory");
}

}  // namespace weir::cuda
