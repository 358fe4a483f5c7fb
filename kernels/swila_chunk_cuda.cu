#include "kernels/swila_chunk_cuda.cuh"

#include <algorithm>

#include "kernels/long_rows_cuda.cuh"
#include "kernels/ring.h"
#include "kernels/swila_chunk_layout.cuh"

namespace weir::cuda::swila_chunk {
namespace {

// What blocks of the chunk kernel could not do for each other's sake: the last inputs of a row
// become its history once all have read the old one; heads whose values lie in several blocks are
// normalised, a warp one token. Rows of few tokens are left alone.
__device__ inline void finish_row(const SwilaMix& op, int row, bool norm) {
  const Slot slot = op.rows.slot[row];
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  if (slot == kPadding || count <= kStepTokensMost) return;
  const int64_t all = int64_t(op.heads) * kDim;
  const int from = count - (kWidth - 1), position = op.rows.first[row] + from;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < (kWidth - 1) * 3 * all;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int age = int(i / (3 * all)), group = int(i / all % 3);
    const Acts& in = group == 0 ? op.q : group == 1 ? op.k : op.v;
    at(op.history, slot)[ring_row(position + age, kWidth - 1) * 3 * all + i % (3 * all)] =
        at(in, begin + from + age)[i % all];
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
__global__ __launch_bounds__(256) void finish_rows_kernel(const __grid_constant__ SwilaMix op,
                                                          bool norm) {
  let_successor_start();
  wait_for_predecessor();
  for (int k = blockIdx.y;; k += gridDim.y) {
    const int row = long_row(op.rows, k, kStepTokensMost);
    if (row < 0) return;
    finish_row(op, row, norm);
  }
}

// The long rows, of which there are few only where there must be short ones too.
int prompts(const SwilaMix& op) {
  return likely_long_rows(op.rows, kStepTokensMost, kStepTokensMost + 1);
}

// The fewer heads and rows there are, the thinner the slices: a block for each multiprocessor.
int slice_of(const SwilaMix& op, const Context& context) {
  const int rows = prompts(op);
  int slice = kDim;
  while (slice > 16 &&
         rows * op.heads * (kDim / slice) * 2 <= context.multiprocessors) {
    slice /= 2;
  }
  return slice;
}

// A tensor of float32 in boxes: sizes, innermost first, and strides of all but the first in bytes.
template <int kRank>
CUtensorMap map_of(float* data, const cuuint64_t (&size)[kRank],
                   const cuuint64_t (&stride)[kRank - 1], const cuuint32_t (&box)[kRank],
                   const Context& context) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  const cuuint32_t step[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = reinterpret_cast<Encode>(context.hopper.encode_map)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kRank, data, size, stride, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  WEIR_CHECK(result == CUDA_SUCCESS);
  return map;
}

Maps maps_of(const SwilaMix& op, const Context& context, int slice) {
  const cuuint64_t tokens = cuuint64_t(op.rows.tokens), all = cuuint64_t(op.heads) * kDim;
  const auto channels = [&](const Acts& acts, int columns, int of_box) {
    return map_of<2>(acts.data, {all, tokens}, {cuuint64_t(acts.stride) * sizeof(float)},
                     {cuuint32_t(columns), cuuint32_t(of_box)}, context);
  };
  const auto mixed = [&](const Acts& acts, int columns, int mixtures) {
    return map_of<3>(acts.data, {kDim, cuuint64_t(op.heads) * kMixtures, tokens},
                     {kDim * sizeof(float), cuuint64_t(acts.stride) * sizeof(float)},
                     {cuuint32_t(columns), cuuint32_t(mixtures), kTokens}, context);
  };
  Maps maps{.raw = {channels(op.q, kDim, kRawTokens), channels(op.k, kDim, kRawTokens),
                    channels(op.v, slice, kRawTokens)},
            .key_router = mixed(op.key_router, slice, kMixtures),
            .beta = mixed(op.beta, slice, kMixtures),
            .query_router = mixed(op.query_router, slice, kMixtures)};
  if (op.key_mix.data != nullptr) {
    maps.key_mix = channels(op.key_mix, slice, kTokens);
    maps.query_mix = channels(op.query_mix, slice, kTokens);
  }
  if (op.gated) maps.gates = mixed(op.decay_in, kDim, 1);
  return maps;
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
  return all && context.hopper.encode_map != nullptr && op.mixtures == kMixtures &&
         op.dim == kDim && op.conv_width == kWidth;
}

}  // namespace

bool run(const SwilaMix& op, Context& context) {
  if (!served(op, context)) return false;
  const int slice = slice_of(op, context);
  const auto start = op.gated ? start_gated : start_plain;
  start(op, maps_of(op, context, slice), context, slice);
  const bool norm = slice != kDim;
  const int64_t work = norm ? int64_t(op.rows.tokens) * op.heads / 64 : 8;
  const int rows = prompts(op);
  const int64_t most = std::max(8, 8 * context.multiprocessors / rows);
  launch(context,
         {.grid = dim3(std::clamp<int64_t>(work, 8, most), rows), .block = dim3(256)},
         finish_rows_kernel, op, norm);
  return true;
}

}  // namespace weir::cuda::swila_chunk
