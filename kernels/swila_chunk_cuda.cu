#include "kernels/swila_chunk_cuda.cuh"

#include <algorithm>

#include "kernels/swila_chunk_layout.cuh"

namespace weir::cuda::swila_chunk {
namespace {

// What blocks of the chunk kernel could not do for each other's sake: the last inputs of a row
// become its history once all have read the old one; heads whose values lie in several blocks are
// normalised, a warp one token. Rows of few tokens are left alone.
__global__ __launch_bounds__(256) void finish_rows_kernel(const __grid_constant__ SwilaMix op,
                                                          bool norm) {
  const int row = blockIdx.y;
  let_successor_start();
  wait_for_predecessor();
  const Slot slot = op.rows.slot[row];
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  if (slot == kPadding || count <= kStepTokensMost) return;
  const int64_t all = int64_t(op.heads) * kDim;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < (kWidth - 1) * 3 * all;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t token = begin + count - (kWidth - 1) + i / (3 * all), group = i / all % 3;
    const Acts& in = group == 0 ? op.q : group == 1 ? op.k : op.v;
    at(op.history, slot)[i] = at(in, token)[i % all];
  }
  if (!norm) return;
  const int warps = gridDim.x * 8, lane = threadIdx.x % 32;
  const float2 weight = reinterpret_cast<const float2*>(op.norm_weight)[lane];
  for (int i = blockIdx.x * 8 + threadIdx.x / 32; i < count * op.heads; i += warps) {
    float2* const out = reinterpret_cast<float2*>(at(op.out, begin + i / op.heads) +
                                                  i % op.heads * kDim) + lane;
    float2 y = *out;
    const float squares = sum_over_lanes(y.x * y.x + y.y * y.y);
    const float scale = 1.0f / sqrtf(squares / float(kDim) + op.norm_eps);
    *out = {y.x * scale * weight.x, y.y * scale * weight.y};
  }
}

// The fewer heads and rows there are, the thinner the slices: a block for each multiprocessor.
int slice_of(const SwilaMix& op, const Context& context) {
  const int long_rows = std::clamp(op.rows.tokens / (kStepTokensMost + 1), 1, op.rows.count);
  int slice = kDim;
  while (slice > 16 &&
         long_rows * op.heads * (kDim / slice) * 2 <= context.multiprocessors) {
    slice /= 2;
  }
  return slice;
}

bool served(const SwilaMix& op, const Context& context) {
  const auto aligned = [](const float* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 4 == 0;
  };
  bool all = aligned(op.state.data, op.state.stride) &&
             aligned(op.history.data, op.history.stride) && aligned(op.norm_weight, 0);
  for (const Acts& acts : {op.q, op.k, op.v, op.key_router, op.query_router, op.beta, op.key_mix,
                           op.query_mix, op.decay_in, op.out}) {
    all = all && aligned(acts.data, acts.stride);
  }
  return all && context.compute >= 90 && op.mixtures == kMixtures && op.dim == kDim &&
         op.conv_width == kWidth;
}

}  // namespace

bool run(const SwilaMix& op, Context& context) {
  if (!served(op, context)) return false;
  const int slice = slice_of(op, context);
  const auto start = op.decay_in.data != nullptr ? start_gated : start_plain;
  start(op, context, slice);
  const bool norm = slice != kDim;
  const int64_t work = norm ? int64_t(op.rows.tokens) * op.heads / 64 : 8;
  const int64_t most = std::max(8, 8 * context.multiprocessors / op.rows.count);
  launch(context,
         {.grid = dim3(std::clamp<int64_t>(work, 8, most), op.rows.count), .block = dim3(256)},
         finish_rows_kernel, op, norm);
  return true;
}

}  // namespace weir::cuda::swila_chunk
