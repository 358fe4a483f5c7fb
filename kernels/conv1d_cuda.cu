#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

// A block takes 256 / lanes channels of one row; with lanes > 1 its threads share the row's tokens.
// The history is written when all of the block have read it, by the thread that owns the channel,
// oldest first: each entry is read before it is overwritten.
//
// Floor: the history read once and written once, 8 * (width - 1) * channels bytes a row.
constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void conv1d_kernel(const __grid_constant__ Conv1d op) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const int count = op.rows.begin[row + 1] - begin, kept = op.width - 1;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || count == 0) return;
  const bool fresh = op.rows.first[row] == 0;
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  const bool mine = c < op.channels;
  float* const history = at(op.history, slot) + c;
  const auto input = [&](int t) {
    if (t >= 0) return at(op.in, begin + t)[c];
    return fresh ? 0.0f : history[int64_t(t + kept) * op.channels];
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
  for (int i = 0; i < kept; ++i) history[int64_t(i) * op.channels] = input(count - kept + i);
}

}  // namespace

void run(const Conv1d& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.rows.count <= 65535);
  const int lanes = op.rows.tokens > 2 * op.rows.count ? 8 : 1, width = kThreads / lanes;
  launch(context,
         {.grid = dim3((op.channels + width - 1) / width, op.rows.count),
          .block = dim3(width, lanes)},
         conv1d_kernel, op);
}

}  // namespace weir::cuda
