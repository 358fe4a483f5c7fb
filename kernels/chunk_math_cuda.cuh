#pragma once
#include "kernels/tensor_core.cuh"

// Small arithmetic that the chunk kernels of the delta family and of SwiLA share: approximate
// functions, and four numbers as halves.
namespace weir::cuda {

constexpr float kLog2E = 1.4426950408889634f;

__device__ inline float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

// Four numbers as halves, and four halves times four.
__device__ inline uint2 packed(float4 x) { return {pack(x.x, x.y), pack(x.z, x.w)}; }
__device__ inline uint32_t times_halves(uint32_t a, uint32_t b) {
  const half2 y = __hmul2(reinterpret_cast<half2&>(a), reinterpret_cast<half2&>(b));
  return reinterpret_cast<const uint32_t&>(y);
}
__device__ inline uint2 times_halves(uint2 a, uint2 b) {
  return {times_halves(a.x, b.x), times_halves(a.y, b.y)};
}

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / sqrt(x) of a normal number.
__device__ inline float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / (1 + exp(-x)), one step where an exponential and a division are two. By the PTX ISA within
// 2.5e-4, however small it is; measured on an H200 within 4e-6, of itself 1.4e-4 from x = -7 on and
// 1 % from -11 on, so that decays, what erases and what is kept of a distribution may be made of it
// (SlowDecaysAndWeakErasure, SlowMixesAndWeakWrites).
__device__ inline float fast_sigmoid(float x) { return 0.5f + 0.5f * tanh_fast(0.5f * x); }
// x times that, of x / 2.
__device__ inline float silu_of_half(float half_x) { return half_x + half_x * tanh_fast(half_x); }
__device__ inline float fast_silu(float x) { return silu_of_half(0.5f * x); }

}  // namespace weir::cuda
