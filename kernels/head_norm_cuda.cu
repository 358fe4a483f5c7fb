#include "kernels/cuda_util.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda {
namespace {

// One block normalises one group of one token. Floor: none, the vectors are in cache; what is left
// is latency, so a group of up to kKept * threads values is read once.
constexpr int kKept = 8;

template <int kThreads>
__global__ __launch_bounds__(kThreads) void head_norm_kernel(const __grid_constant__ HeadNorm op) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float partial[kWarps];
  let_successor_start();
  wait_for_predecessor();
  const int64_t token = blockIdx.x, offset = int64_t(blockIdx.y) * op.dim;
  const float* const in = at(op.in, token) + offset;
  float* const out = at(op.out, token) + offset;
  const float* const gate = op.gate.data == nullptr ? nullptr : at(op.gate, token) + offset;
  const auto first = [&](int i) {  // what is normalised
    const float y = apply(op.activation, in[i]);
    return gate != nullptr && op.gate_first ? y * apply(op.gate_activation, gate[i]) : y;
  };
  float kept[kKept];
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int i = threadIdx.x + j * kThreads;
    kept[j] = i < op.dim ? first(i) : 0.0f;
  }
  // Each thread's values in turn: those in registers, then those read again.
  const auto each = [&](const auto& use) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = threadIdx.x + j * kThreads;
      if (i < op.dim) use(i, kept[j]);
    }
    for (int i = threadIdx.x + kKept * kThreads; i < op.dim; i += kThreads) use(i, first(i));
  };
  float mean = 0, scale = 1;
  if (op.kind == HeadNorm::Kind::Centred) {
    float sum = 0;
    each([&](int, float y) { sum += y; });
    mean = sum_over_block<kWarps>(sum, partial) / float(op.dim);
  }
  const bool weighted = op.kind == HeadNorm::Kind::Rms || op.kind == HeadNorm::Kind::Centred;
  if (op.kind != HeadNorm::Kind::None) {
    float squares = 0;
    each([&](int, float y) { squares += (y - mean) * (y - mean); });
    squares = sum_over_block<kWarps>(squares, partial);
    scale = 1.0f / sqrtf((weighted ? squares / float(op.dim) : squares) + op.eps);
  }
  const int64_t weights = op.weight_per_group ? offset : 0;
  each([&](int i, float y) {
    y = (y - mean) * scale;
    if (weighted) {
      y *= op.weight[weights + i];
      if (op.bias != nullptr) y += op.bias[weights + i];
    }
    if (op.add.data != nullptr) y += at(op.add, token)[offset + i];
    if (gate != nullptr && !op.gate_first) y *= apply(op.gate_activation, gate[i]);
    out[i] = y;
  });
}

}  // namespace

void run(const HeadNorm& op, Context& context) {
  if (op.tokens == 0) return;
  WEIR_CHECK(op.groups <= 65535);
  const dim3 grid(op.tokens, op.groups);
  if (op.dim <= 128) {
    launch(context, {.grid = grid, .block = dim3(32)}, head_norm_kernel<32>, op);
  } else if (op.dim <= 1024) {
    launch(context, {.grid = grid, .block = dim3(128)}, head_norm_kernel<128>, op);
  } else {
    launch(context, {.grid = grid, .block = dim3(512)}, head_norm_kernel<512>, op);
  }
}

}  // namespace weir::cuda
