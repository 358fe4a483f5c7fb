#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void gather_kernel(const __grid_constant__ Gather op) {
  wait_for_predecessor();
  let_successor_start();
  const float* in = at(op.in, op.index[blockIdx.x]);
  float* out = at(op.out, blockIdx.x);
  for (int i = threadIdx.x; i < op.dim; i += kThreads) out[i] = in[i];
}

}  // namespace

void run(const Gather& op, Context& context) {
  if (op.count == 0) return;
  launch(context, {.grid = dim3(op.count), .block = dim3(kThreads)}, gather_kernel, op);
}

}  // namespace weir::cuda
