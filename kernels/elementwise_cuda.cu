#include "kernels/cuda_util.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda {
namespace {

// Floor: none, the vectors are in cache.
constexpr int kThreads = 256;

// log(sigmoid(x)) in double precision: HGRN2's bound asks for the difference of near numbers.
__device__ inline double log_sigmoid(double x) {
  return x < -20 ? x : -log1p(exp(-x));
}

__device__ inline float bounded_log_decay(float bound, float x) {
  const double a = log(double(bound)), b = log1p(-double(bound)) + log_sigmoid(x);
  const double larger = fmax(a, b);
  return float(isinf(larger) ? larger : larger + log1p(exp(-fabs(a - b))));
}

__device__ inline float value(const Elementwise& op, int64_t token, int i) {
  const float x = at(op.x, token)[i];
  switch (op.function) {
    case Elementwise::Function::Activate: return apply(op.activation, x);
    case Elementwise::Function::LogDecay:
      return fmaxf(apply(Activation::LogSigmoid, x) / op.divisor, op.floor);
    case Elementwise::Function::BoundedLogDecay: return bounded_log_decay(op.a[i], x);
    case Elementwise::Function::OneMinusExp: return -expm1f(x);
    case Elementwise::Function::SoftplusStep:
      return fminf(fmaxf(softplus(x + op.a[i]), op.floor), op.ceiling);
    case Elementwise::Function::SigmoidDecay: return op.floor * sigmoid(x);
    case Elementwise::Function::SoftplusDecay: return -op.a[i] * softplus(x + op.b[i]);
    case Elementwise::Function::Scale: return x * op.a[i];
    case Elementwise::Function::AddScaled: return x + op.a[i] * at(op.y, token)[i];
    case Elementwise::Function::Multiply: return x * at(op.y, token)[i];
    case Elementwise::Function::ScaleTowards:
      return x * (1.0f + (at(op.y, token)[i] - 1.0f) * op.a[i]);
    case Elementwise::Function::Blend: return x + (at(op.y, token)[i] - x) * at(op.z, token)[i];
  }
  return x;
}

__global__ __launch_bounds__(kThreads) void elementwise_kernel(
    const __grid_constant__ Elementwise op) {
  let_successor_start();
  wait_for_predecessor();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= op.dim) return;
  for (int token = blockIdx.y; token < op.tokens; token += gridDim.y) {
    at(op.out, token)[i] = value(op, token, i);
  }
}

}  // namespace

void run(const Elementwise& op, Context& context) {
  if (op.tokens == 0) return;
  const dim3 grid((op.dim + kThreads - 1) / kThreads, op.tokens < 65535 ? op.tokens : 65535);
  launch(context, {.grid = grid, .block = dim3(kThreads)}, elementwise_kernel, op);
}

}  // namespace weir::cuda
