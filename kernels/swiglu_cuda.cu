#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void swiglu_kernel(const __grid_constant__ Swiglu op,
                                                          SplitVectors split) {
  let_successor_start();
  wait_for_predecessor();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= op.dim) return;
  for (int token = blockIdx.y; token < op.tokens; token += gridDim.y) {
    const float gate = at(op.gate, token)[i];
    const float value = gate * sigmoid(gate) * at(op.up, token)[i];
    at(op.out, token)[i] = value;
    store_split(split, int64_t(token) * op.dim + i, value);
  }
}

}  // namespace

void run(const Swiglu& op, Context& context) {
  if (op.tokens == 0) return;
  const dim3 grid((op.dim + kThreads - 1) / kThreads, op.tokens < 65535 ? op.tokens : 65535);
  launch(context, {.grid = grid, .block = dim3(kThreads)}, swiglu_kernel, op,
         leave_split(op.out, op.dim, op.tokens, context));
}

}  // namespace weir::cuda
