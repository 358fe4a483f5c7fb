#include "kernels/cuda_util.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda {
namespace {

// One block a head's vector, which it keeps in shared memory with its result. A row of a learned
// map is one warp's, so that its weights are read in whole lines.
//
// Floor: the maps read once, 4 * dim^2 bytes each.
constexpr int kThreads = 128, kWarps = kThreads / 32;

__device__ float map_row(const float* weight, const float* bias, const float* x, int dim, int row) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < dim; i += 32) sum += weight[int64_t(row) * dim + i] * x[i];
  return sum_over_lanes(sum) + (bias == nullptr ? 0.0f : bias[row]);
}

// Warp after warp takes a row: y[row] of both maps, in every lane.
template <typename Use>
__device__ void each_row(const FeatureMap& op, const float* x, const Use& use) {
  for (int row = threadIdx.x / 32; row < op.dim; row += kWarps) {
    const float y = map_row(op.weight, op.bias, x, op.dim, row);
    if (threadIdx.x % 32 == 0) use(row, y);
  }
}

__device__ void softmax(float* x, int count, float* partial) {
  float largest = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) largest = fmaxf(largest, x[i]);
  largest = max_over_block<kWarps>(largest, partial);
  for (int i = threadIdx.x; i < count; i += kThreads) sum += x[i] = expf(x[i] - largest);
  sum = sum_over_block<kWarps>(sum, partial);
  for (int i = threadIdx.x; i < count; i += kThreads) x[i] /= sum;
}

// y * roll(y, j), j = 1 .. 4, y = [relu x, -relu x].
__device__ float dpfp(const float* x, int dim, int i) {
  const int twice = 2 * dim, roll = i / twice + 1, at = i % twice;
  const auto y = [&](int j) { return j < dim ? fmaxf(x[j], 0.0f) : -fmaxf(x[j - dim], 0.0f); };
  return y(at) * y((at - roll + twice) % twice);
}

__global__ __launch_bounds__(kThreads) void feature_map_kernel(
    const __grid_constant__ FeatureMap op) {
  extern __shared__ float x[];  // [dim], then the result
  __shared__ float partial[kWarps];
  let_successor_start();
  wait_for_predecessor();
  const int64_t token = blockIdx.x, head = blockIdx.y;
  const int dim = op.dim, size = dim * FeatureMap::expansion(op.kind);
  float* const y = x + dim;
  for (int i = threadIdx.x; i < dim; i += kThreads) x[i] = at(op.in, token)[head * dim + i];
  __syncthreads();  // x is there
  switch (op.kind) {
    case FeatureMap::Kind::Copy:
    case FeatureMap::Kind::Softmax:
      for (int i = threadIdx.x; i < dim; i += kThreads) y[i] = x[i];
      break;
    case FeatureMap::Kind::RowLinear:
      each_row(op, x, [&](int row, float value) { y[row] = value; });
      break;
    case FeatureMap::Kind::RowProduct:
      for (int row = threadIdx.x / 32; row < dim; row += kWarps) {
        const float product = map_row(op.weight, op.bias, x, dim, row) *
                              map_row(op.weight2, op.bias2, x, dim, row);
        if (threadIdx.x % 32 == 0) y[row] = product;
      }
      break;
    case FeatureMap::Kind::SoftmaxPair:
      each_row(op, x, [&](int row, float value) {
        y[row] = 2 * value;
        y[dim + row] = -2 * value;
      });
      break;
    case FeatureMap::Kind::Dpfp:
      for (int i = threadIdx.x; i < size; i += kThreads) y[i] = dpfp(x, dim, i);
      break;
  }
  __syncthreads();  // y is there
  if (op.kind == FeatureMap::Kind::Softmax || op.kind == FeatureMap::Kind::SoftmaxPair) {
    softmax(y, size, partial);
  }
  // From here on a thread touches its own numbers only.
  float sum = 0;
  for (int i = threadIdx.x; i < size; i += kThreads) sum += y[i] = apply(op.activation, y[i]);
  const float divisor = op.normalise ? sum_over_block<kWarps>(sum, partial) + 1e-4f : 1.0f;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    at(op.out, token)[head * size + i] = y[i] / divisor;
  }
}

size_t shared_bytes(const FeatureMap& op) {
  return size_t(op.dim) * size_t(1 + FeatureMap::expansion(op.kind)) * sizeof(float);
}

}  // namespace

const char* refusal(const FeatureMap& op) {
  if (op.heads > 65535) return "feature_map of more than 65,535 heads";
  return shared_bytes(op) <= 47 * 1024 ? nullptr : "feature_map of more than 47 KiB a head";
}

void run(const FeatureMap& op, Context& context) {
  if (op.tokens == 0) return;
  WEIR_CHECK(refusal(op) == nullptr);
  const size_t shared = shared_bytes(op);
  launch(context,
         {.grid = dim3(op.tokens, op.heads), .block = dim3(kThreads), .shared = shared},
         feature_map_kernel, op);
}

}  // namespace weir::cuda
