#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void embed_kernel(const __grid_constant__ Embed op) {
  wait_for_predecessor();
  let_successor_start();
  const int token = blockIdx.x;
  const Token given = op.ids[token];
  const Token id = given >= 0 ? given : max(op.drawn[~given], 0);
  if (op.read != nullptr && threadIdx.x == 0) op.read[token] = id;
  const int64_t dim = op.table.cols, row = int64_t(id) * dim;
  float* out = at(op.out, token);
  for (int i = threadIdx.x; i < dim; i += kThreads) {
    switch (op.table.dtype) {
      case DType::F32: out[i] = static_cast<const float*>(op.table.data)[row + i]; break;
      case DType::BF16:
        out[i] = __bfloat162float(static_cast<const __nv_bfloat16*>(op.table.data)[row + i]);
        break;
      case DType::F16:
        out[i] = __half2float(static_cast<const __half*>(op.table.data)[row + i]);
        break;
    }
  }
}

}  // namespace

void run(const Embed& op, Context& context) {
  if (op.tokens == 0) return;
  launch(context, {.grid = dim3(op.tokens), .block = dim3(kThreads)}, embed_kernel, op);
}

}  // namespace weir::cuda
