#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

// One block a token: the vectors are in cache, and what is left is latency.
constexpr int kThreads = 512;

__global__ __launch_bounds__(kThreads) void rms_norm_kernel(const __grid_constant__ RmsNorm op,
                                                            SplitVectors split) {
  let_successor_start();
  wait_for_predecessor();
  const float* in = at(op.in, blockIdx.x);
  float* out = at(op.out, blockIdx.x);
  constexpr int kKept = 8;  // values of one thread that are read once
  float kept[kKept];
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int i = threadIdx.x + j * kThreads;
    kept[j] = i < op.dim ? in[i] : 0.0f;
    sum += kept[j] * kept[j];
  }
  for (int i = threadIdx.x + kKept * kThreads; i < op.dim; i += kThreads) sum += in[i] * in[i];

  __shared__ float partial[kThreads / 32];
  sum = sum_over_lanes(sum);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();  // all partial sums are there
  sum = threadIdx.x % 32 < kThreads / 32 ? partial[threadIdx.x % 32] : 0.0f;
  const float scale = 1.0f / sqrtf(sum_over_lanes(sum) / float(op.dim) + op.eps);
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= op.dim) break;
    out[i] = kept[j] = kept[j] * scale * op.weight[i];
    store_split(split, int64_t(blockIdx.x) * op.dim + i, kept[j]);
  }
  for (int i = threadIdx.x + kKept * kThreads; i < op.dim; i += kThreads) {
    const float value = in[i] * scale * op.weight[i];
    out[i] = value;
    store_split(split, int64_t(blockIdx.x) * op.dim + i, value);
  }
}

}  // namespace

void run(const RmsNorm& op, Context& context) {
  if (op.tokens == 0) return;
  launch(context, {.grid = dim3(op.tokens), .block = dim3(kThreads)}, rms_norm_kernel, op,
         leave_split(op.out, op.dim, op.tokens, context));
}

}  // namespace weir::cuda
