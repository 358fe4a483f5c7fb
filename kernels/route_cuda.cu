#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

// The small ops of cross-layer routing (arXiv 2607.07953): one warp has one head of one token,
// lanes along its numbers. Floor: none, the vectors are in cache; what is left is latency.
constexpr int kThreads = 128, kWarps = kThreads / 32;

// Calls visit(token, head) for the warp's own. Every kernel begins with it.
template <typename Visit>
__device__ inline void visit_head(int64_t tokens, int heads, Visit visit) {
  let_successor_start();
  wait_for_predecessor();
  const int64_t i = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (i < tokens * heads) visit(i / heads, int(i % heads));
}

__global__ __launch_bounds__(kThreads) void head_dot_kernel(const __grid_constant__ HeadDot op) {
  visit_head(op.tokens, op.heads, [&](int64_t token, int head) {
    const float* const x = at(op.x, token) + int64_t(head) * op.dim;
    float sum = 0;
    for (int i = threadIdx.x % 32; i < op.dim; i += 32) sum += op.weight[i] * x[i];
    sum = sum_over_lanes(sum) + op.bias[0];
    if (threadIdx.x % 32 == 0) at(op.out, token)[head] = apply(op.activation, sum);
  });
}

// The sources are read twice when their mean is normalised: it is in no one's registers whatever
// the head's size. A thread writes only where it alone reads v, so `value` may be v.
__global__ __launch_bounds__(kThreads) void value_route_kernel(
    const __grid_constant__ ValueRoute op) {
  visit_head(op.tokens, op.heads, [&](int64_t token, int head) {
    const int64_t first = int64_t(head) * op.dim;
    const int lane = threadIdx.x % 32;
    const auto mean = [&](int i) {
      const float* const source = at(op.sources, token) + first + i;
      float sum = 0;
      for (int s = 0; s < op.count; ++s) sum += source[s * op.source_stride];
      return sum / float(op.count);
    };
    float scale = 1;
    if (op.normalize) {
      float squares = 0;
      for (int i = lane; i < op.dim; i += 32) squares += mean(i) * mean(i);
      scale = 1.0f / sqrtf(sum_over_lanes(squares) / float(op.dim) + op.eps);
    }
    if (op.gamma == nullptr) scale *= at(op.gate, token)[head];
    for (int i = lane; i < op.dim; i += 32) {
      const float gamma = op.gamma == nullptr ? 1.0f : op.gamma[first + i];
      const float add = gamma * scale * mean(i);
      if (op.answer.data != nullptr) at(op.answer, token)[first + i] = add;
      if (op.value.data != nullptr) {
        at(op.value, token)[first + i] = at(op.v, token)[first + i] + add;
      }
    }
  });
}

__device__ inline float squares_of(const float* x, int dim) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < dim; i += 32) sum += x[i] * x[i];
  return sum_over_lanes(sum);
}

__global__ __launch_bounds__(kThreads) void route_signal_kernel(
    const __grid_constant__ RouteSignal op) {
  visit_head(op.tokens, op.heads, [&](int64_t token, int head) {
    const int64_t first = int64_t(head) * op.dim;
    const float* const v = at(op.v, token) + first;
    const float* const u = at(op.u, token) + first;
    if (op.kind == RouteSignal::Kind::Both) {
      float* const out = at(op.out, token) + 2 * first;
      for (int i = threadIdx.x % 32; i < op.dim; i += 32) {
        out[i] = u[i];
        out[op.dim + i] = v[i];
      }
      return;
    }
    const float surprise = sqrtf(squares_of(u, op.dim)) / (sqrtf(squares_of(v, op.dim)) + 1e-6f);
    const float gate = sigmoid(op.gate[0] * surprise + op.gate[1]);
    float* const out = at(op.out, token) + first;
    for (int i = threadIdx.x % 32; i < op.dim; i += 32) out[i] = v[i] * gate;
  });
}

Shape warp_a_head(int64_t tokens, int heads) {
  return {.grid = dim3(unsigned((tokens * heads + kWarps - 1) / kWarps)),
          .block = dim3(kThreads)};
}

}  // namespace

void run(const HeadDot& op, Context& context) {
  if (op.tokens == 0) return;
  launch(context, warp_a_head(op.tokens, op.heads), head_dot_kernel, op);
}

void run(const ValueRoute& op, Context& context) {
  if (op.tokens == 0) return;
  WEIR_CHECK(op.count > 0);
  launch(context, warp_a_head(op.tokens, op.heads), value_route_kernel, op);
}

void run(const RouteSignal& op, Context& context) {
  if (op.tokens == 0) return;
  launch(context, warp_a_head(op.tokens, op.heads), route_signal_kernel, op);
}

}  // namespace weir::cuda
