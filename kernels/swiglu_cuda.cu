#include <algorithm>

#include "kernels/cuda_util.cuh"

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

}  // namespace

void run(const Swiglu& op, Context& context) {
  if (op.tokens == 0) return;
  const auto grid = [&](int each) {
    return dim3((op.dim + each * kThreads - 1) / (each * kThreads), std::min(op.tokens, 65535));
  };
  if (op.dim % 4 != 0 || !by_fours(op.gate) || !by_fours(op.up) || !by_fours(op.out)) {
    launch(context, {.grid = grid(1), .block = dim3(kThreads)}, swiglu_any_kernel, op);
    return;
  }
  const SplitVectors split = leave_split(op.out, op.dim, op.tokens, context);
  const bool writes = !op.read_once || !next_reads_split(op.out, op.dim, op.tokens, context);
  launch(context, {.grid = grid(4), .block = dim3(kThreads)}, swiglu_kernel, op, split, writes);
}

}  // namespace weir::cuda
