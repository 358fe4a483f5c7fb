#pragma once
#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/resident_walk_cuda.cuh"

// The linear phases of the resident kernel: the warp that brings the weights, and those that
// multiply.
namespace weir::cuda::resident {

// --- the copying warp ---------------------------------------------------------------------------

__device__ inline const char* find_row(const LinearPhase& l, int row) {
#pragma unroll
  for (int s = 0; s < kSlabs; ++s) {
    if (row < l.slab[s].rows) return l.slab[s].data + int64_t(row) * l.in * 2;
    row -= l.slab[s].rows;
  }
  return nullptr;
}

// Weights are read once: they leave the cache to what is read again.
__device__ inline void load_row(uint32_t shared, const char* from, uint32_t bytes,
                                uint32_t barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#endif
}
__device__ inline uint64_t read_once() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

__device__ inline void copy_tiles(const LinearPhase& l, Walk& walk, uint64_t policy) {
  const int lane = threadIdx.x % 32, tiles = tiles_of(l), in = l.in;
  const uint32_t ring = shared_address(walk.shared.ring);
  const uint32_t full = shared_address(walk.shared.full), free = shared_address(walk.shared.free);
  for (int tile = walk.first_tile(); tile < tiles; tile += gridDim.x) {
    const int row = lane < kTileRows ? row_of_tile(l, tile, lane) : l.rows;
    const char* from = row < l.rows ? find_row(l, row) : nullptr;
    const int rows = __popc(__ballot_sync(0xffffffffu, from != nullptr));
    for (int column = 0; column < in; column += kStageColumns) {
      const uint32_t bytes = min(kStageColumns, in - column) * 2;
      // The stage is free at once in the first round: the phase before the first is done.
      barrier_wait(free + 8 * walk.stage, walk.parity ^ 1);
      const int before = walk.stage - kInFlight;
      if (walk.issued++ >= kInFlight) {
        barrier_wait(full + 8 * (before + (before < 0 ? kStages : 0)),
                     walk.parity ^ int(before < 0));
      }
      if (lane == 0) barrier_expect(full + 8 * walk.stage, bytes * rows);
      __syncwarp();
      if (from != nullptr) {
        load_row(ring + walk.stage * kStageBytes + lane * kPitch, from + column * 2, bytes,
                 full + 8 * walk.stage, policy);
      }
      walk.next_stage();
    }
  }
  walk.tiles += tiles;
}

__device__ inline void copy_weights(Walk& walk) {
  const uint64_t policy = read_once();
  int linear = 0;
  for (int p = 0; p < walk.table.phases; ++p) {
    if (!walk.table.is_mix[p]) copy_tiles(walk.table.linear[linear++], walk, policy);
  }
}

// --- a linear phase -----------------------------------------------------------------------------

__device__ inline float4 fresh4(const float* from) {
  return __ldcg(reinterpret_cast<const float4*>(from));
}

// Eight neighbouring numbers.
struct Eight {
  float v[8];
  // From four of them, the first in the lower half of the warp and the last in the upper one.
  __device__ void share(float4 own) {
    const bool last = threadIdx.x % 32 >= 16;
    const float own_four[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, own_four[i], 16);
      v[i] = last ? other : own_four[i];
      v[4 + i] = last ? own_four[i] : other;
    }
  }
};

// 1 / rms of each token's groups of columns.
__device__ inline void find_scales(const LinearPhase& l, Shared& shared) {
  const int norms = l.in / l.group, runs = l.group / kRun;
  const int token = threadIdx.x / kNormsMost, norm = threadIdx.x % kNormsMost;
  if (token >= kTokensMost || norm >= norms) return;
  const float* squares = shared.squares + token * kSquares + norm * runs;
  float sum = 0;
#pragma unroll 4
  for (int i = 0; i < runs; ++i) sum += squares[i];
  shared.scales[threadIdx.x] = 1.0f / sqrtf(sum / float(l.group) + l.eps);
}

// A warp's columns of x: of its run r, kWarps * r + warp, a lane has eight of one token. Lanes of
// the lower half keep the high bf16 halves, the others the low ones.
template <int kRuns>
struct Columns {
  uint32_t half[kRuns][4];

  __device__ static int column(int r) {
    return (r * kWarps + int(threadIdx.x) / 32) * kRun + threadIdx.x % 4 * 8;
  }
  __device__ static int own_token() { return threadIdx.x % 16 / 4; }
  __device__ static bool keeps_low() { return threadIdx.x % 32 >= 16; }

  __device__ void keep(int r, const Eight& x, bool keep_low) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t high, low;
      split(x.v[2 * i], x.v[2 * i + 1], high, low);
      half[r][i] = !keeps_low() ? high : keep_low ? low : 0;
    }
  }

  // The lane's four of a token's eight numbers of a run. Without a branch, so that all loads are on
  // their way before the first is waited for; what lies beyond the columns is not used.
  __device__ static float4 own_four(const float* x, int r, int in) {
    return fresh4(x + (column(r) < in ? column(r) + (keeps_low() ? 4 : 0) : 0));
  }

  // As they lie.
  __device__ void load(const LinearPhase& l, Walk& walk) {
    if (l.waits) meet(walk);
    // Lanes without a token compute the first one's sums again, which nothing stores.
    const int token = own_token() < l.tokens ? own_token() : 0;
    const float* x = l.x + int64_t(token) * l.x_stride;
    float4 four[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) four[r] = own_four(x, r, l.in);
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      Eight eight;
      eight.share(four[r]);
      keep(r, eight, walk.keep_low);
    }
  }

  // Normed; the weights are read before the others are done, and the gate with x.
  __device__ void load_normed(const LinearPhase& l, Walk& walk) {
    const int token = own_token();
    float4 factor[kRuns];  // of the lane's four
    int norm[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int own = column(r) + (keeps_low() ? 4 : 0);
      norm[r] = own < l.in ? own / l.group : 0;
      const float* weight = l.weight + (own < l.in ? own - norm[r] * l.group : 0);
      factor[r] = *reinterpret_cast<const float4*>(weight);
    }
    if (l.waits) meet(walk);
    const bool valid = token < l.tokens;
    const int mine = valid ? token : 0;  // as in load()
    const int64_t from = l.index == nullptr ? mine : l.index[mine];
    const float* x = l.x + from * l.x_stride;
    const float* gate = l.gate == nullptr ? nullptr : l.gate + from * l.gate_stride;
    float4 four[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) four[r] = own_four(x, r, l.in);
    if (gate != nullptr) {
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        factor[r] = delta::times(factor[r], own_four(gate, r, l.in));
      }
    }
    float* squares = walk.shared.squares + token * kSquares;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      float sum = sum_over_lanes<4>(delta::dot(four[r], four[r]));
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      if (threadIdx.x % 4 == 0) squares[column(r) / kRun] = sum;
    }
    barrier_among<kAll>(kComputing);  // all squares are there
    find_scales(l, walk.shared);
    barrier_among<kAll>(kComputing);  // all scales are there
    const bool writes = l.normed != nullptr && blockIdx.x + 1 == gridDim.x && valid;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const float scale = walk.shared.scales[token * kNormsMost + norm[r]];
      const float4 f = factor[r], x4 = four[r];
      four[r] = {x4.x * scale * f.x, x4.y * scale * f.y, x4.z * scale * f.z, x4.w * scale * f.w};
      if (writes && column(r) < l.in) {
        *reinterpret_cast<float4*>(l.normed + int64_t(token) * l.normed_stride + column(r) +
                                   (keeps_low() ? 4 : 0)) = four[r];
      }
      Eight eight;
      eight.share(four[r]);
      keep(r, eight, walk.keep_low);
    }
  }
};

// a's rows are halves of the tokens, b's columns are rows of the matrix.
__device__ inline void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t b0,
                                uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(0), "r"(a1), "r"(b0), "r"(b1));
#endif
}

// One tile, from the ring: this warp's columns of eight rows.
template <int kRuns>
__device__ inline float2 multiply_tile(const LinearPhase& l, Walk& walk,
                                       const Columns<kRuns>& x) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t full = shared_address(walk.shared.full), free = shared_address(walk.shared.free);
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (int first = 0; first < kRuns; first += kStageRuns) {
    if (first * kWarps * kRun >= l.in) break;
    const char* stage = walk.shared.ring + walk.stage * kStageBytes + lane / 4 * kPitch +
                        warp * kRun * 2 + lane % 4 * 16;
    barrier_wait(full + 8 * walk.stage, walk.parity);
    const int left = (l.in / kRun - first * kWarps - warp + kWarps - 1) / kWarps;  // runs
    const auto add = [&](int j, const uint4& w) {
      multiply(even, x.half[first + j][0], x.half[first + j][1], w.x, w.y);
      multiply(odd, x.half[first + j][2], x.half[first + j][3], w.z, w.w);
    };
    const auto weights = [&](int j) {
      return *reinterpret_cast<const uint4*>(stage + j * kWarps * kRun * 2);
    };
    if (left >= min(kStageRuns, kRuns - first)) {  // without a branch between them
      uint4 w[kStageRuns];
#pragma unroll
      for (int j = 0; j < kStageRuns && first + j < kRuns; ++j) w[j] = weights(j);
#pragma unroll
      for (int j = 0; j < kStageRuns && first + j < kRuns; ++j) add(j, w[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kStageRuns && first + j < kRuns; ++j) {
        if (j < left) add(j, weights(j));
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(free + 8 * walk.stage);
    walk.next_stage();
  }
  return {even[0] + odd[0], even[1] + odd[1]};
}

__device__ inline float bias_of(const LinearPhase& l, int row) {
#pragma unroll
  for (int s = 0; s < kSlabs; ++s) {
    if (row < l.slab[s].rows) return l.slab[s].bias == nullptr ? 0.0f : l.slab[s].bias[row];
    row -= l.slab[s].rows;
  }
  return 0;
}

// Adds the warps' sums of `count` tiles and stores what becomes of them. Sums of a tile:
// [high, low][token][row].
__device__ inline void store_tiles(const LinearPhase& l, const float* sums, int first, int count) {
  const int o = threadIdx.x;
  constexpr int kOutputs = kTileRows * kTokensMost;  // of a tile
  const int tile = first + o / kOutputs * int(gridDim.x);
  const int token = o / kTileRows % kTokensMost, i = o % kTileRows;
  const int row = row_of_tile(l, tile, i);
  const bool valid = o / kOutputs < count && token < l.tokens && row < l.rows;
  float* y = l.y + int64_t(token) * l.y_stride + row;
  float value = valid && l.accumulate ? __ldcg(y) : 0.0f;
  if (valid) value += bias_of(l, row);
  barrier_among<kAll>(kComputing);  // every warp's sums are there
  if (o >= kBatch * kOutputs) return;
  const float* from = sums + o / kOutputs * kTileSums + o % kOutputs;
  float high = 0, low = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    high += from[w * kSums];
    low += from[w * kSums + kOutputs];
  }
  value += high + low;
  if (row >= l.activated && row < l.activated_end) {
    const float open = sigmoid(value);
    value = l.activation == Activation::Silu ? value * open : open;
  }
  if (l.paired) {
    const float up = __shfl_xor_sync(0xffffffffu, value, 4);
    value = value * sigmoid(value) * up;
    if (valid && i < 4) *y = value;
  } else if (valid) {
    *y = value;
  }
}

template <int kRuns>
__device__ inline void multiply_all(const LinearPhase& l, Walk& walk, const Columns<kRuns>& x) {
  const int tiles = tiles_of(l), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int batch = 0, turn = 0, first = 0;
  for (int tile = walk.first_tile(); tile < tiles; tile += gridDim.x) {
    if (batch == 0) first = tile;
    const float2 sum = multiply_tile(l, walk, x);
    float* to = walk.shared.sums[turn] + warp * kSums + batch * kTileSums;
    *reinterpret_cast<float2*>(to + lane * 2) = sum;
    ++batch;
    if (batch < kBatch && tile + int(gridDim.x) < tiles) continue;
    store_tiles(l, walk.shared.sums[turn], first, batch);
    batch = 0;
    turn ^= 1;
  }
  walk.tiles += tiles;
}

template <int kRuns>
__device__ inline void run_linear(const LinearPhase& l, Walk& walk) {
  Columns<kRuns> x;
  if (kRuns <= kStageRuns && l.group > 0) {
    if constexpr (kRuns <= kStageRuns) x.load_normed(l, walk);
  } else {
    x.load(l, walk);
  }
  multiply_all(l, walk, x);
}

}  // namespace weir::cuda::resident
