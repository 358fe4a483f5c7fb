#pragma once
#include "kernels/resident_linear_cuda.cuh"

// Linear layers of few columns, several of them in one phase: a warp has a tile for itself, x
// included, so that the warps wait for nothing of each other. Eight rows lie in memory end to end:
// a stage is one such piece for each warp.
namespace weir::cuda::resident {

constexpr int kNarrowBytes = kTileRows * kNarrowMost * 2;  // of a warp's tile
static_assert(kWarps * kNarrowBytes <= kStageBytes);

// A tile's layer; `tile` becomes its place there.
__device__ inline const NarrowPhase::Layer& layer_of(const NarrowPhase& l, int& tile) {
  const NarrowPhase::Layer* layer = l.layer;
#pragma unroll 1
  for (; tile >= layer->rows / kTileRows; ++layer) tile -= layer->rows / kTileRows;
  return *layer;
}

// A lane's columns of its own token: of the eight of each run of 32 that it multiplies by, the
// first four in the lower half of the warp, the last in the other.
struct NarrowColumns {
  static constexpr int kRuns = kNarrowMost / kRun;
  float4 four[kRuns];

  __device__ void await(const float* x, int in) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) four[r] = look4(x + (r * kRun < in ? r * kRun : 0));
#pragma unroll 1
    for (int turn = 0;; count_turn(turn)) {
      bool there = true;
#pragma unroll
      for (int r = 0; r < kRuns; ++r) there = there && written(four[r]);
      if (__all_sync(0xffffffffu, there)) return;
#pragma unroll
      for (int r = 0; r < kRuns; ++r) four[r] = look4(x + (r * kRun < in ? r * kRun : 0));
    }
  }
  // The halves that the lane multiplies by; what the other half of the warp wants is exchanged.
  __device__ uint4 halves(int r, bool is_low, bool keep_low) const {
    uint2 high, low;
    split(four[r], high, low);
    if (!keep_low) low = {0, 0};
    const uint2 own = is_low ? low : high, give = is_low ? high : low;
    const uint2 got{__shfl_xor_sync(0xffffffffu, give.x, 16),
                    __shfl_xor_sync(0xffffffffu, give.y, 16)};
    return is_low ? uint4{got.x, got.y, own.x, own.y} : uint4{own.x, own.y, got.x, got.y};
  }
};

__device__ inline void leave_narrow(const NarrowPhase::Layer& layer, int token, int row,
                                    float value) {
  if (layer.bias != nullptr) value += layer.bias[row];
  if (layer.activates) {
    const float open = quick_sigmoid(value);
    value = layer.activation == Activation::Silu ? value * open : open;
  }
  if (layer.left != nullptr) leave(layer.left + token * layer.left_stride + row, value);
  if (layer.y != nullptr) layer.y[int64_t(token) * layer.y_stride + row] = value;
}

// One tile by one warp.
__device__ inline void multiply_narrow(const NarrowPhase& l, int tile, const Walk& walk, Me me) {
  Shared& shared = shared_memory();
  const NarrowPhase::Layer& layer = layer_of(l, tile);
  const int in = l.in, lane = me.lane(), token = lane % 16 / 4;
  NarrowColumns x;
  // Lanes without a token compute the first one's sums again.
  x.await(layer.x + (token < l.tokens ? token : 0) * layer.x_stride + lane % 4 * 8 + lane / 16 * 4,
          in);
  const char* const from = shared.ring + walk.stage * kStageBytes + me.warp() * kNarrowBytes +
                           lane / 4 * in * 2 + lane % 4 * 16;
  barrier_wait(shared_address(shared.full + walk.stage), walk.parity);
  Sums sums;
#pragma unroll
  for (int r = 0; r < kNarrowMost / kRun; ++r) {
    if (r * kRun >= in) break;
    const auto w = *reinterpret_cast<const uint4*>(from + r * kRun * 2);
    const uint4 half = x.halves(r, lane >= 16, l.keep_low);
    multiply(sums.even, half.x, half.y, w.x, w.y);
    multiply(sums.odd, half.z, half.w, w.z, w.w);
  }
  float2 sum{sums.even[0] + sums.odd[0], sums.even[1] + sums.odd[1]};  // of high or low halves
  sum.x += __shfl_xor_sync(0xffffffffu, sum.x, 16);
  sum.y += __shfl_xor_sync(0xffffffffu, sum.y, 16);
  if (lane >= 16 || token >= l.tokens) return;
  const int row = tile * kTileRows + lane % 4 * 2;
  leave_narrow(layer, token, row, sum.x);
  leave_narrow(layer, token, row + 1, sum.y);
}

__device__ inline void run_narrow(const NarrowPhase& l, Walk& walk) {
  const Me me = find_me();
  const int blocks = gridDim.x;
#pragma unroll 1
  for (int first = walk.first; first < l.tiles; first += kWarps * blocks) {
    const int tile = first + me.warp() * blocks;
    if (tile < l.tiles) multiply_narrow(l, tile, walk, me);
    __syncwarp();
    if (me.lane() == 0) barrier_arrive(shared_address(shared_memory().free + walk.stage));
    walk.next_stage();
  }
  walk.leave_phase(walk.first, l.tiles);
}

}  // namespace weir::cuda::resident
