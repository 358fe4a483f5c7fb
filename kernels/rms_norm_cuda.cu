#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

// One block a token. For few of them the vectors are in cache and what is left is latency; for many
// the floor is in read once and out, or its split form, written once, and blocks are small, so that
// many tokens are on their way.
constexpr int kThreads = 256, kFewThreads = 128, kManyTokens = 2048;
constexpr int kKept = 4;  // fours of one thread that are read once

struct Output {
  SplitVectors split;
  bool writes;  // out itself too
};

// kWide neighbouring numbers at a time: 4 where size and alignment allow it, otherwise 1.
template <int kWide>
struct Numbers {
  float x[kWide];
  __device__ void load(const float* from) {
    if constexpr (kWide == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      x[0] = *from;
    }
  }
  __device__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWide; ++i) sum += x[i] * x[i];
    return sum;
  }
  __device__ void store(const Output& to, float* out, int64_t place) const {
    if constexpr (kWide == 4) {
      const float4 v = {x[0], x[1], x[2], x[3]};
      if (to.writes) *reinterpret_cast<float4*>(out) = v;
      store_split(to.split, place, v);
    } else {
      *out = x[0];
    }
  }
};

template <int kWide, int kBlock>
__global__ __launch_bounds__(kBlock) void rms_norm_kernel(const __grid_constant__ RmsNorm op,
                                                          Output to) {
  let_successor_start();
  wait_for_predecessor();
  constexpr int kStep = kBlock * kWide;
  const float* in = at(op.in, blockIdx.x);
  float* out = at(op.out, blockIdx.x);
  const int first = threadIdx.x * kWide;
  Numbers<kWide> kept[kKept] = {}, more;
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    if (first + j * kStep < op.dim) kept[j].load(in + first + j * kStep);
  }
#pragma unroll
  for (int j = 0; j < kKept; ++j) sum += kept[j].squares();
  for (int i = first + kKept * kStep; i < op.dim; i += kStep) {
    more.load(in + i);
    sum += more.squares();
  }

  __shared__ float partial[kBlock / 32];
  sum = sum_over_lanes(sum);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();  // all partial sums are there
  sum = threadIdx.x % 32 < kBlock / 32 ? partial[threadIdx.x % 32] : 0.0f;
  const float scale = 1.0f / sqrtf(sum_over_lanes(sum) / float(op.dim) + op.eps);
  const auto finish = [&](Numbers<kWide>& x, int i) {
    Numbers<kWide> weight;
    weight.load(op.weight + i);
#pragma unroll
    for (int k = 0; k < kWide; ++k) x.x[k] = x.x[k] * scale * weight.x[k];
    x.store(to, out + i, int64_t(blockIdx.x) * op.dim + i);
  };
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    if (first + j * kStep < op.dim) finish(kept[j], first + j * kStep);
  }
  for (int i = first + kKept * kStep; i < op.dim; i += kStep) {
    more.load(in + i);
    finish(more, i);
  }
}

}  // namespace

void run(const RmsNorm& op, Context& context) {
  if (op.tokens == 0) return;
  const bool fours = op.dim % 4 == 0 && by_fours(op.in) && by_fours(op.out) &&
                     reinterpret_cast<uintptr_t>(op.weight) % 16 == 0;
  Shape shape{.grid = dim3(op.tokens), .block = dim3(kThreads)};
  if (!fours) {
    launch(context, shape, rms_norm_kernel<1, kThreads>, op, Output{{}, true});
    return;
  }
  const SplitVectors split = leave_split(op.out, op.dim, op.tokens, context);
  const bool writes = !op.read_once || !next_reads_split(op.out, op.dim, op.tokens, context);
  const Output to{split, writes};
  if (op.tokens < kManyTokens || op.dim > 4 * kKept * kFewThreads) {
    return launch(context, shape, rms_norm_kernel<4, kThreads>, op, to);
  }
  shape.block = dim3(kFewThreads);
  launch(context, shape, rms_norm_kernel<4, kFewThreads>, op, to);
}

}  // namespace weir::cuda
