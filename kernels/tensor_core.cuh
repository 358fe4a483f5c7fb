#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/async_cuda.cuh"

// Products of small half-precision matrices by one warp, and barriers among some warps of a block.
// Fragments, as PTX numbers them, of mma.m16n8k16: with g = lane / 4 and p = 2 (lane % 4),
//   A [16, 16]: {(g, p), (g + 8, p), (g, p + 8), (g + 8, p + 8)}, two neighbours each
//   B [16, 8]:  {(p, g), (p + 8, g)}, two rows each
//   C [16, 8]:  {(g, p), (g, p + 1), (g + 8, p), (g + 8, p + 1)}
// so that two neighbouring C are, narrowed, one A.
namespace weir::cuda {

// Two numbers as halves, the first in the low one; what a half cannot hold becomes its largest.
__device__ inline uint32_t pack(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ inline float2 unpack(uint32_t packed) {
  return __half22float2(*reinterpret_cast<const half2*>(&packed));
}

// Four 8 x 8 matrices of halves from shared memory; lane l gives the address of row l % 8 of
// matrix l / 8.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// What lane l gives load_matrices() for a fragment whose first number is at `at`.
__device__ inline uint32_t rows_of_a(const half* at, int pitch) {
  const int lane = threadIdx.x % 32;
  return shared_address(at + (lane % 16) * pitch + lane / 16 * 8);
}
// Of two neighbouring B whose columns are rows in memory.
__device__ inline uint32_t rows_of_b(const half* at, int pitch) {
  const int lane = threadIdx.x % 32;
  return shared_address(at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}

// C += A B
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The 11 leading bits of a number, rounded; what is left below them the tensor cores do not read.
__device__ inline uint32_t to_tf32(float x) { return __float_as_uint(x) + 0x1000; }
// C += A B by mma.m16n8k8: with l = lane % 4, A is {(g, l), (g + 8, l), (g, l + 4), (g + 8, l + 4)}
// and B {(l, g), (l + 4, g)}.
__device__ inline void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two neighbouring C as one A.
__device__ inline void narrow(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack(left[0], left[1]);
  a[1] = pack(left[2], left[3]);
  a[2] = pack(right[0], right[1]);
  a[3] = pack(right[2], right[3]);
}

// 2^x
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Barrier `id` of the block, 1 to 15, which `threads` threads reach, all of them by one of these.
__device__ inline void meet(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The registers of each thread of a warpgroup from here on; only where the compiler was told how
// many a thread has before.
template <int kRegisters>
__device__ inline void give_up_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ inline void take_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace weir::cuda
