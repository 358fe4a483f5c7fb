#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

// A thread has one channel of one row. With several tokens a row's tokens are shared by eight
// threads; the history is written when all of them have read it.
//
// Floor: the history read once and written once, 8 * dim bytes a row.
constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void token_shift_kernel(
    const __grid_constant__ TokenShift op) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const int count = op.rows.begin[row + 1] - begin, c = blockIdx.x * blockDim.x + threadIdx.x;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || count == 0) return;
  const bool mine = c < op.dim, fresh = op.rows.first[row] == 0;
  float* const history = at(op.history, slot) + c;
  for (int t = threadIdx.y; t < count && mine; t += blockDim.y) {
    const float x = at(op.in, begin + t)[c];
    const float before = t > 0 ? at(op.in, begin + t - 1)[c] : fresh ? 0.0f : *history;
    for (int m = 0; m < op.mixes; ++m) {
      const int64_t i = int64_t(m) * op.dim + c;
      at(op.out, begin + t)[i] = x + (before - x) * op.mix[i];
    }
  }
  __syncthreads();  // the history has been read
  if (mine && threadIdx.y == 0) *history = at(op.in, begin + count - 1)[c];
}

}  // namespace

void run(const TokenShift& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.rows.count <= 65535);
  const int lanes = op.rows.tokens > 2 * op.rows.count ? 8 : 1, width = kThreads / lanes;
  launch(context,
         {.grid = dim3((op.dim + width - 1) / width, op.rows.count), .block = dim3(width, lanes)},
         token_shift_kernel, op);
}

}  // namespace weir::cuda
