#pragma once
#include "kernels/async_cuda.cuh"

// Barriers of shared memory on which whole warps arrive, and for which they may wait long.
namespace weir::cuda {

// All of a warp's reads and writes before are done.
__device__ inline void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(barrier));
}

// Returns when the phase is complete. The thread may sleep until then, so that it takes no time
// from those that work.
__device__ inline void sleep_for(const uint64_t* barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  constexpr uint32_t kNanoseconds = 10000000;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(uint32_t(phase) & 1), "r"(kNanoseconds)
      : "memory");
#endif
}

}  // namespace weir::cuda
