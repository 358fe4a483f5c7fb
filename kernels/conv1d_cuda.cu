#include <algorithm>

#include "kernels/cuda_util.cuh"
#include "kernels/ring.h"

namespace weir::cuda {
namespace {

// A block takes 256 / lanes channels of one row; with lanes > 1 its threads share the row's tokens.
// The history is written when all of the block have read it, by the thread that owns the channel.
//
// Floor: the history read once and an input of it written for each token, up to width - 1 of them:
// 4 * width * channels bytes a row of one token.
constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void conv1d_kernel(const __grid_constant__ Conv1d op) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const int count = op.rows.begin[row + 1] - begin, kept = op.width - 1;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || count == 0) return;
  const int position = op.rows.first[row];
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  const bool mine = c < op.channels;
  float* const history = at(op.history, slot) + c;
  const auto kept_at = [&](int t) {
    return history + int64_t(ring_row(position + t, kept)) * op.channels;
  };
  const auto input = [&](int t) {
    if (t >= 0) return at(op.in, begin + t)[c];
    return position == 0 ? 0.0f : *kept_at(t);
  };
  for (int t = threadIdx.y; t < count && mine; t += blockDim.y) {
    float sum = op.bias == nullptr ? 0.0f : op.bias[c];
#pragma unroll 4
    for (int i = 0; i < op.width; ++i) {
      sum += op.taps[int64_t(c) * op.width + i] * input(t - kept + i);
    }
    at(op.out, begin + t)[c] = apply(op.activation, sum);
  }
  __syncthreads();  // the history has been read
  if (threadIdx.y > 0 || !mine) return;
  for (int t = count - kept; t < count; ++t) {
    if (t >= 0 || position == 0) *kept_at(t) = input(t);
  }
}

// Prompts through a convolution of width 4: a thread has four channels of a run of tokens, whose
// inputs it reads once, but for the three before them. The thread of a row's first run alone reads
// the history, and writes it.
//
// Floor: the inputs read and the outputs written once, 8 * channels bytes a token.
constexpr int kWidth = 4, kRun = 32, kTogether = 8;  // tokens of a run; of loads under way together
constexpr int kRuns = 8;                             // of a block

__device__ inline float4 plus(float4 sum, float4 tap, float4 x) {
  return {sum.x + tap.x * x.x, sum.y + tap.y * x.y, sum.z + tap.z * x.z, sum.w + tap.w * x.w};
}

template <bool kSilu>
__global__ __launch_bounds__(32 * kRuns) void conv1d_run_kernel(
    const __grid_constant__ Conv1d op) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const int count = op.rows.begin[row + 1] - begin, c = int(blockIdx.x * 32 + threadIdx.x) * 4;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || c >= op.channels) return;
  const auto input = [&](int t) {
    return *reinterpret_cast<const float4*>(at(op.in, begin + t) + c);
  };
  float4 taps[kWidth], bias{0, 0, 0, 0};
  const float4* const of_channel = reinterpret_cast<const float4*>(op.taps + int64_t(c) * kWidth);
  const float4 a = of_channel[0], b = of_channel[1], d = of_channel[2], e = of_channel[3];
  taps[0] = {a.x, b.x, d.x, e.x};
  taps[1] = {a.y, b.y, d.y, e.y};
  taps[2] = {a.z, b.z, d.z, e.z};
  taps[3] = {a.w, b.w, d.w, e.w};
  if (op.bias != nullptr) bias = *reinterpret_cast<const float4*>(op.bias + c);
  for (int first = int(blockIdx.z * kRuns + threadIdx.y) * kRun; first < count;
       first += int(gridDim.z) * kRuns * kRun) {
    float4 x[kWidth - 1 + kTogether];
    float4* const history = reinterpret_cast<float4*>(at(op.history, slot) + c);
    const int64_t stride = op.channels / 4;
    const int position = op.rows.first[row];
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) {
      const int t = first - (kWidth - 1) + i;
      if (first > 0) {
        x[i] = input(t);
      } else {
        x[i] = position == 0 ? float4{0, 0, 0, 0}
                             : history[ring_row(position + t, kWidth - 1) * stride];
      }
    }
    if (first == 0) {
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) {
        const int t = count - (kWidth - 1) + i;
        if (t < 0 && position > 0) continue;
        history[ring_row(position + t, kWidth - 1) * stride] =
            t < 0 ? float4{0, 0, 0, 0} : input(t);
      }
    }
    const int end = min(first + kRun, count);
#pragma unroll 1
    for (int t = first; t < end; t += kTogether) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (t + i < end) x[kWidth - 1 + i] = input(t + i);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (t + i >= end) break;
        float4 sum = bias;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum = plus(sum, taps[j], x[i + j]);
        const auto act = [&](float y) { return kSilu ? y * sigmoid(y) : apply(op.activation, y); };
        *reinterpret_cast<float4*>(at(op.out, begin + t + i) + c) = {act(sum.x), act(sum.y),
                                                                      act(sum.z), act(sum.w)};
      }
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) x[i] = x[kTogether + i];
    }
  }
}

bool in_runs(const Conv1d& op) {
  const auto aligned = [](const float* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 4 == 0;
  };
  return op.width == kWidth && op.channels % 4 == 0 && op.rows.tokens > 8 * op.rows.count &&
         aligned(op.in.data, op.in.stride) && aligned(op.out.data, op.out.stride) &&
         aligned(op.history.data, op.history.stride) && aligned(op.taps, 0) && aligned(op.bias, 0);
}

}  // namespace

void run(const Conv1d& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.rows.count <= 65535);
  if (in_runs(op)) {
    const int runs = op.rows.tokens / op.rows.count / (kRuns * kRun) + 1;  // of a row, on average
    launch(context,
           {.grid = dim3((op.channels / 4 + 31) / 32, op.rows.count, std::min(runs, 64)),
            .block = dim3(32, kRuns)},
           op.activation == Activation::Silu ? conv1d_run_kernel<true> : conv1d_run_kernel<false>,
           op);
    return;
  }
  const int lanes = op.rows.tokens > 2 * op.rows.count ? 8 : 1, width = kThreads / lanes;
  launch(context,
         {.grid = dim3((op.channels + width - 1) / width, op.rows.count),
          .block = dim3(width, lanes)},
         conv1d_kernel, op);
}

}  // namespace weir::cuda
