#include "kernels/cuda_util.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda {
namespace {

// One block a token and group: first every source's score, then the mix, each thread its own
// numbers, so that `out` may be one of the sources. Floor: none, the sources are in cache.
constexpr int kThreads = 256, kWarps = kThreads / 32;

__global__ __launch_bounds__(kThreads) void depth_attention_kernel(
    const __grid_constant__ DepthAttention op) {
  extern __shared__ float weight[];  // [count]
  __shared__ float partial[kWarps];
  let_successor_start();
  wait_for_predecessor();
  const int64_t token = blockIdx.x, group = blockIdx.y;
  const float* const first = at(op.sources, token) + group * op.dim;
  if (op.count == 1) {  // and there may be no query
    for (int i = threadIdx.x; i < op.dim; i += kThreads) {
      at(op.out, token)[group * op.dim + i] = first[i];
    }
    return;
  }
  const float* const query = op.query + group * op.dim;
  for (int s = 0; s < op.count; ++s) {
    const float* const x = first + s * op.source_stride;
    float squares = 0, product = 0;
    for (int i = threadIdx.x; i < op.dim; i += kThreads) {
      squares += x[i] * x[i];
      product += query[i] * x[i];
    }
    squares = sum_over_block<kWarps>(squares, partial);
    product = sum_over_block<kWarps>(product, partial);
    float score = product / sqrtf(squares / float(op.dim) + op.eps);
    if (op.last_bias.data != nullptr && s + 1 == op.count) score += at(op.last_bias, token)[group];
    if (threadIdx.x == 0) weight[s] = score;
  }
  __syncthreads();  // all scores are there
  float most = -INFINITY, total = 0;
  for (int s = 0; s < op.count; ++s) most = fmaxf(most, weight[s]);
  for (int s = 0; s < op.count; ++s) total += expf(weight[s] - most);
  for (int i = threadIdx.x; i < op.dim; i += kThreads) {
    float sum = 0;
    for (int s = 0; s < op.count; ++s) {
      sum += expf(weight[s] - most) / total * first[s * op.source_stride + i];
    }
    at(op.out, token)[group * op.dim + i] = sum;
  }
}

}  // namespace

void run(const DepthAttention& op, Context& context) {
  if (op.tokens == 0) return;
  const size_t shared = size_t(op.count) * sizeof(float);
  WEIR_CHECK(op.count > 0 && op.groups <= 65535 && shared <= 47 * 1024);
  launch(context,
         {.grid = dim3(op.tokens, op.groups), .block = dim3(kThreads), .shared = shared},
         depth_attention_kernel, op);
}

}  // namespace weir::cuda
