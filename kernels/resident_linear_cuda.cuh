#pragma once
#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/resident_walk_cuda.cuh"

// The linear phases of the resident kernel: the warps that multiply, and those that store.
namespace weir::cuda::resident {

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

// At a norm of whole rows: 1 / rms of a token.
__device__ inline float scale_of(const LinearPhase& l, int token) {
  const auto& squares = shared_memory().squares[token];
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w += 4) {
    const auto four = *reinterpret_cast<const float4*>(squares + w);
    sum += (four.x + four.y) + (four.z + four.w);
  }
  return rsqrtf(sum * l.share + l.eps);
}

// x of a stage's columns, of all tokens. A warp has every kWarps-th run of 32, and what it needs no
// other warp waits for. A lane reads four neighbouring columns of each token; as bf16 halves, they
// go to the lanes that multiply by them through the warp's part of shared memory. There a lane has
// eight columns of each run, of one token: lanes of the lower half the high bf16 halves, the others
// the low ones.
struct Columns {
  Me me;
  uint4 half[kStageRuns];
  float4 four[kTokensMost];  // the lane's own

  // The first of the lane's four among a stage's columns.
  __device__ int place() const {
    return (me.lane() / 8 * kWarps + me.warp()) * kRun + me.lane() % 8 * 4;
  }
  // Beyond the last column something else that is there and is not used.
  __device__ int own(int columns) const { return place() < columns ? place() : 0; }

  __device__ const float* from(const LinearPhase& l, int column, int token) const {
    const int64_t row = l.index == nullptr ? token : l.index[token];
    return l.x + row * l.x_stride + column + own(l.in - column);
  }

  __device__ void ask(const LinearPhase& l, int column) {
#pragma unroll
    for (int t = 0; t < kTokensMost; ++t) {
      four[t] = {0, 0, 0, 0};  // what was there needs no register until now
      if (t < l.tokens) four[t] = look4(from(l, column, t));
    }
  }
  // Returns when all that was asked for is there.
  __device__ void await(const LinearPhase& l, int column) {
#pragma unroll 1
    for (int turn = 0; l.x_left; count_turn(turn)) {
      bool there = true;
#pragma unroll
      for (int t = 0; t < kTokensMost; ++t) {
        if (t >= l.tokens) break;
        if (written(four[t])) continue;
        four[t] = look4(from(l, column, t));
        there = false;
      }
      if (__all_sync(0xffffffffu, there)) return;
    }
  }
  // A token's columns to the lanes that multiply by them, and the first one's also to those without
  // a token, whose sums nothing stores.
  __device__ void share(const LinearPhase& l, int token, const float4& x) {
    uint2 high, low;
    split(x, high, low);
    if (!l.keep_low) low = {0, 0};
    auto& halves = shared_memory().halves[me.warp()];
    __syncwarp();  // they are read
    reinterpret_cast<uint2*>(halves[0])[me.lane()] = high;
    reinterpret_cast<uint2*>(halves[1])[me.lane()] = low;
    __syncwarp();
    if (token > 0 && me.lane() % 16 / 4 != token) return;
    const auto* const plane = reinterpret_cast<const uint4*>(halves[me.lane() / 16]);
#pragma unroll
    for (int r = 0; r < kStageRuns; ++r) half[r] = plane[r * 4 + me.lane() % 4];
  }

  // As they lie, once they have been asked for.
  __device__ void load(const LinearPhase& l, int column) {
    await(l, column);
#pragma unroll
    for (int t = 0; t < kTokensMost; ++t) {
      if (t >= l.tokens) break;
      share(l, t, four[t]);
    }
  }

  __device__ float square(const LinearPhase& l, int token) const {
    return place() < l.in ? delta::dot(four[token], four[token]) : 0.0f;
  }
  // Leaves the sum of the squares of a token's columns: the warp's, or of each run those that share
  // a group.
  __device__ void leave_square(const LinearPhase& l, int token, float sum) const {
    const int at = l.by_rows ? me.warp() : place() / kRun;
#pragma unroll 1
    for (int step = l.norm_lanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (me.lane() % l.norm_lanes == 0) shared_memory().squares[token][at] = sum;
  }
  // 1 / rms of the group of columns that the lane's belong to.
  __device__ float scale_of_group(const LinearPhase& l, int token) const {
    const int run = place() / kRun, mask = l.norm_runs - 1;
    const float* const from = shared_memory().squares[token] + (run & ~mask & ~3);
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i <= mask; i += 4) {
      const auto four = *reinterpret_cast<const float4*>(from + i);
      // Of four runs, those of the same group.
      sum += ((run ^ 0) & 3 & ~mask) == 0 ? four.x : 0.0f;
      sum += ((run ^ 1) & 3 & ~mask) == 0 ? four.y : 0.0f;
      sum += ((run ^ 2) & 3 & ~mask) == 0 ? four.z : 0.0f;
      sum += ((run ^ 3) & 3 & ~mask) == 0 ? four.w : 0.0f;
    }
    return rsqrtf(sum * l.share + l.eps);
  }
  __device__ float4 weight_of(const LinearPhase& l) const {
    const int in_group = own(l.in) - (own(l.in) / kRun * l.groups_a_run >> 16) * l.group;
    return *reinterpret_cast<const float4*>(l.weight + in_group);
  }

  // With a norm of whole rows, whose 1 / rms the products are multiplied by when they are stored.
  __device__ void load_rows(const LinearPhase& l) {
    const float4 weight = weight_of(l);
    await(l, 0);
    float sum[kTokensMost];
#pragma unroll
    for (int t = 0; t < kTokensMost; ++t) {
      if (t >= l.tokens) break;
      sum[t] = square(l, t);
      share(l, t, delta::times(weight, four[t]));
    }
#pragma unroll
    for (int t = 0; t < kTokensMost; ++t) {
      if (t >= l.tokens) break;
      leave_square(l, t, sum[t]);
    }
  }
  // By one block, which has left its squares: what the norm makes of x.
  __device__ void keep_normed(const LinearPhase& l) {
    barrier_among<kAll>(kComputing);  // all squares are there
    const float4 weight = weight_of(l);
#pragma unroll 1
    for (int t = 0; t < l.tokens && place() < l.in; ++t) {
      const float4 x = delta::times(weight, look4(from(l, 0, t)));
      const float scale = scale_of(l, t);
      *reinterpret_cast<float4*>(l.normed + t * l.normed_stride + place()) = {
          x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    }
  }
  // With a norm of each group of columns, and perhaps a gate, which is there before x is.
  __device__ void load_groups(const LinearPhase& l, const Late* late) {
    const float4 weight = weight_of(l);
    const float* const gates = l.gate + own(l.in);
    float4 gate[kTokensMost];
#pragma unroll
    for (int t = 0; t < kTokensMost; ++t) {
      gate[t] = {0, 0, 0, 0};
      if (l.gate != nullptr && t < l.tokens) gate[t] = look4(gates + t * l.gate_stride);
    }
    await(l, 0);
#pragma unroll
    for (int t = 0; t < kTokensMost; ++t) {
      if (t >= l.tokens) break;
      leave_square(l, t, square(l, t));
    }
    const Late history = late == nullptr ? Late{} : late[me.thread];
    barrier_among<kAll>(kComputing);  // all squares are there
    // The block has seen every answer of the mixer before: no block reads the history again.
    if (late != nullptr) write_history(history);
#pragma unroll
    for (int t = 0; t < kTokensMost; ++t) {
      if (t >= l.tokens) break;
      const float scale = scale_of_group(l, t);
      float4 x = delta::times(weight, four[t]);
      if (l.gate != nullptr) {
        for (int turn = 0; !written(gate[t]); count_turn(turn)) {
          gate[t] = look4(gates + t * l.gate_stride);
        }
        x = delta::times(gate[t], x);
      }
      share(l, t, {x.x * scale, x.y * scale, x.z * scale, x.w * scale});
    }
  }
};

// Where a lane finds its weights. Columns of the products are, in turn, rows of a tile's lower and
// of its upper half.
struct Weights {
  const char* first;  // in the ring's first stage
  uint32_t full, free;

  __device__ Weights(const LinearPhase& l, Me me) {
    Shared& shared = shared_memory();
    const int column = me.lane() / 4, row = column / 2 + column % 2 * (kTileRows / 2);
    first = shared.ring + place_of_row(row, pitch_of(l.in)) + me.warp() * kRun * 2 +
            me.lane() % 4 * 16;
    full = shared_address(shared.full);
    free = shared_address(shared.free);
  }
};

// One stage of a tile: `runs` runs of this warp's columns of eight rows.
struct Sums {
  float even[4] = {}, odd[4] = {};

  __device__ void add(const Weights& weights, Walk& walk, const Columns& x, int runs) {
    const char* from = weights.first + walk.stage * kStageBytes;
    barrier_wait(weights.full + 8 * walk.stage, walk.parity);
    uint4 w[kStageRuns];
#pragma unroll
    for (int j = 0; j < kStageRuns; ++j) {
      w[j] = {0, 0, 0, 0};
      if (j < runs) w[j] = *reinterpret_cast<const uint4*>(from + j * kWarps * kRun * 2);
    }
#pragma unroll
    for (int j = 0; j < kStageRuns; ++j) {
      multiply(even, x.half[j].x, x.half[j].y, w[j].x, w[j].y);
      multiply(odd, x.half[j].z, x.half[j].w, w[j].z, w[j].w);
    }
    __syncwarp();
    if (x.me.lane() == 0) barrier_arrive(weights.free + 8 * walk.stage);
    walk.next_stage();
  }
  // A lane of the lower half of the warp leaves two rows' sums of a token.
  __device__ void leave_in(float* sums, Me me) const {
    float lower = even[0] + odd[0], upper = even[1] + odd[1];  // of high or of low halves
    lower += __shfl_xor_sync(0xffffffffu, lower, 16);
    upper += __shfl_xor_sync(0xffffffffu, upper, 16);
    if (me.lane() >= 16) return;
    float* const to = sums + me.lane() / 4 * kTileRows + me.lane() % 4;
    to[0] = lower;
    to[kTileRows / 2] = upper;
  }
};

// x of several stages is read again for each batch.
__device__ inline void multiply_all(const LinearPhase& l, Walk& walk, Columns& x, bool whole) {
  const int tiles = tiles_of(l), in = l.in, blocks = gridDim.x, warp = x.me.warp();
  const Weights weights(l, x.me);
  int batch = 0, tile = walk.first;
#pragma unroll 1
  for (; tile < tiles; tile += kBatch * blocks, ++batch) {
    const bool two = tile + blocks < tiles;
    Sums first, second;
#pragma unroll 1
    for (int column = 0; column < in; column += kStageColumns) {
      const int runs = ((in - column) / kRun - warp + kWarps - 1) / kWarps;
      if (!whole) {
        x.load(l, column);
        const int next = column + kStageColumns;
        if (next < in || tile + kBatch * blocks < tiles) x.ask(l, next < in ? next : 0);
      }
      first.add(weights, walk, x, runs);
      if (two) second.add(weights, walk, x, runs);
    }
    if (batch >= 2) sums_wait(kSumsRead + batch % 2);
    float* const sums = shared_memory().sums[batch % 2] + warp * kBatchOutputs;
    first.leave_in(sums, x.me);
    second.leave_in(sums + kOutputs, x.me);
    sums_arrive(kSumsThere + batch % 2);
  }
  walk.leave_phase(tile, tiles);
}

__device__ inline void run_linear(const LinearPhase& l, Walk& walk) {
  const bool whole = l.in <= kStageColumns;  // x of a token is one stage's
  Columns x{.me = find_me()};
  x.ask(l, 0);
  const bool late = walk.late;
  walk.late = false;
  if (l.by_rows) {
    x.load_rows(l);
    if (l.normed != nullptr && blockIdx.x + 1 == gridDim.x) x.keep_normed(l);
  } else if (l.group > 0) {
    x.load_groups(l, late ? shared_memory().late : nullptr);
  } else if (whole) {
    x.load(l, 0);
  }
  multiply_all(l, walk, x, whole);
}

// --- the storing warps --------------------------------------------------------------------------

__device__ inline float bias_of(const LinearPhase& l, int row) {
#pragma unroll 1
  for (int s = 0; s < kSlabs; ++s) {
    if (row < l.slab[s].rows) return l.slab[s].bias == nullptr ? 0.0f : l.slab[s].bias[row];
    row -= l.slab[s].rows;
  }
  return 0;
}

// Adds the warps' sums of output `o` of a batch of tiles, of [token][row] each, and stores what
// becomes of them.
__device__ inline void store_batch(const LinearPhase& l, int first, int batch, int o,
                                   float& scale) {
  const int tile = first + o / kOutputs * int(gridDim.x), token = o / kTileRows % kTokensMost;
  const int row = row_of_tile(l, tile, o % kTileRows);
  const bool valid = tile < tiles_of(l) && token < l.tokens && row < l.rows;
  const float* const base = l.base + int64_t(token) * l.base_stride + row;
  float before = 0, bias = 0;  // asked for before the products are there
  if (valid && l.base != nullptr) before = look(base);
  if (valid && l.biased) bias = bias_of(l, row);
  sums_wait(kSumsThere + batch % 2);
  if (batch == 0 && l.by_rows) scale = scale_of(l, token);
  const float* const from = shared_memory().sums[batch % 2] + o;
  float even = 0, odd = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w += 2) {
    even += from[w * kBatchOutputs];
    odd += from[(w + 1) * kBatchOutputs];
  }
  if (valid && l.base_left && !written(before)) before = await(base);
  float value = before + bias + scale * (even + odd);
  if (row >= l.activated && row < l.activated_end) {
    const float open = quick_sigmoid(value);
    value = l.activation == Activation::Silu ? value * open : open;
  }
  __syncwarp();
  if (l.paired) {
    const float up = __shfl_xor_sync(0xffffffffu, value, 4);
    value = value * quick_sigmoid(value) * up;
  }
  if (valid && !(l.paired && o % kTileRows >= 4)) {
    if (l.left != nullptr) leave(l.left + token * l.left_stride + row, value);
    if (l.y != nullptr) l.y[int64_t(token) * l.y_stride + row] = value;
  }
  __syncwarp();
}

__device__ inline void store_all(const LinearPhase& l, Walk& walk, int o) {
  const int tiles = tiles_of(l), step = kBatch * int(gridDim.x);
  float scale = 1;
  int batch = 0, tile = walk.first;
#pragma unroll 1
  for (; tile < tiles; tile += step, ++batch) {
    store_batch(l, tile, batch, o, scale);
    if (tile + 2 * step < tiles) sums_arrive(kSumsRead + batch % 2);
  }
  walk.leave_phase(tile, tiles);
}

}  // namespace weir::cuda::resident
