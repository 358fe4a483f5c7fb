#include <algorithm>

#include "kernels/linear_cuda.cuh"

namespace weir::cuda {
namespace {

constexpr int kThreads = 256;

__device__ inline float gated(float gate, float up) { return gate * sigmoid(gate) * up; }

// Floor: gate and up read once, out or its split form written once. `writes`: out itself too.
__global__ __launch_bounds__(kThreads) void swiglu_kernel(const __grid_constant__ Swiglu op,
                                                          SplitVectors split, bool writes) {
  let_successor_start();
  wait_for_predecessor();
  const int i = (blockIdx.x * kThreads + threadIdx.x) * 4;
  if (i >= op.dim) return;
  for (int token = blockIdx.y; token < op.tokens; token += gridDim.y) {
    const float4 g = *reinterpret_cast<const float4*>(at(op.gate, token) + i);
    const float4 u = *reinterpret_cast<const float4*>(at(op.up, token) + i);
    const float4 v = {gated(g.x, u.x), gated(g.y, u.y), gated(g.z, u.z), gated(g.w, u.w)};
    if (writes) *reinterpret_cast<float4*>(at(op.out, token) + i) = v;
    store_split(split, int64_t(token) * op.dim + i, v);
  }
}

// gate and up next to each other and in bf16, eight numbers a thread. Floor: as above, of 2 bytes.
__global__ __launch_bounds__(kThreads) void swiglu_narrow_kernel(
    const __grid_constant__ Swiglu op, const __nv_bfloat16* gate_up, SplitVectors split) {
  let_successor_start();
  wait_for_predecessor();
  const int i = (blockIdx.x * kThreads + threadIdx.x) * 8;
  if (i >= op.dim) return;
  for (int token = blockIdx.y; token < op.tokens; token += gridDim.y) {
    const __nv_bfloat16* from = gate_up + int64_t(token) * 2 * op.dim + i;
    const uint4 gates = *reinterpret_cast<const uint4*>(from);
    const uint4 ups = *reinterpret_cast<const uint4*>(from + op.dim);
    uint4 out;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 g = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&gates)[p]);
      const float2 u = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&ups)[p]);
      reinterpret_cast<__nv_bfloat162*>(&out)[p] =
          __floats2bfloat162_rn(gated(g.x, u.x), gated(g.y, u.y));
    }
    *reinterpret_cast<uint4*>(split.high + int64_t(token) * op.dim + i) = out;
  }
}

// Any size and alignment.
__global__ __launch_bounds__(kThreads) void swiglu_any_kernel(const __grid_constant__ Swiglu op) {
  let_successor_start();
  wait_for_predecessor();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= op.dim) return;
  for (int token = blockIdx.y; token < op.tokens; token += gridDim.y) {
    at(op.out, token)[i] = gated(at(op.gate, token)[i], at(op.up, token)[i]);
  }
}

// Where a thread takes `each` numbers of a token.
dim3 grid_of(const Swiglu& op, int each) {
  return dim3((op.dim + each * kThreads - 1) / (each * kThreads), std::min(op.tokens, 65535));
}

}  // namespace

void run_narrow(const Swiglu& op, Context& context) {
  const SplitVectors split = leave_split(op.out, op.dim, op.tokens, context);
  launch(context, {.grid = grid_of(op, 8), .block = dim3(kThreads)}, swiglu_narrow_kernel, op,
         reinterpret_cast<const __nv_bfloat16*>(op.gate.data), split);
}

void run(const Swiglu& op, Context& context) {
  if (op.tokens == 0) return;
  if (op.dim % 4 != 0 || !by_fours(op.gate) || !by_fours(op.up) || !by_fours(op.out)) {
    launch(context, {.grid = grid_of(op, 1), .block = dim3(kThreads)}, swiglu_any_kernel, op);
    return;
  }
  const SplitVectors split = leave_split(op.out, op.dim, op.tokens, context);
  const bool writes = !op.read_once || !next_reads_split(op.out, op.dim, op.tokens, context);
  launch(context, {.grid = grid_of(op, 4), .block = dim3(kThreads)}, swiglu_kernel, op, split,
         writes);
}

}  // namespace weir::cuda
