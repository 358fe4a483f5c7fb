#pragma once
#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/resident_walk_cuda.cuh"

// The linear phases of the resident kernel: the warp that brings the weights, and those that
// multiply.
namespace weir::cuda::resident {

// --- the copying warp ---------------------------------------------------------------------------

__device__ inline const char* find_row(const LinearPhase& l, int row) {
#pragma unroll 1
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

// A row of each of a tile's lanes, or null.
__device__ inline const char* find_row(const LinearPhase& l, int tile, int lane) {
  if (tile >= tiles_of(l) || lane >= kTileRows) return nullptr;
  const int row = row_of_tile(l, tile, lane);
  return row < l.rows ? find_row(l, row) : nullptr;
}

// Returns when the ring's next stage may be filled; its barrier.
__device__ inline uint32_t wait_for_stage(Walk& walk) {
  const uint32_t full = shared_address(shared_memory().full),
                 free = shared_address(shared_memory().free);
  // The stage is free at once in the first round: the phase before the first is done.
  barrier_wait(free + 8 * walk.stage, walk.parity ^ 1);
  const int before = walk.stage - kInFlight;
  if (walk.issued++ >= kInFlight) {
    barrier_wait(full + 8 * (before + (before < 0 ? kStages : 0)), walk.parity ^ int(before < 0));
  }
  return full + 8 * walk.stage;
}

// The stage of a tile that begins with that column.
__device__ inline void copy_stage(const LinearPhase& l, const char* from, int column, Walk& walk,
                                  uint64_t policy) {
  Shared& shared = shared_memory();
  const int lane = threadIdx.x % 32;
  const uint32_t bytes = min(kStageColumns, l.in - column) * 2;
  const int rows = __popc(__ballot_sync(0xffffffffu, from != nullptr));
  const uint32_t full = wait_for_stage(walk);
  if (lane == 0) barrier_expect(full, bytes * rows);
  __syncwarp();
  if (from != nullptr) {
    load_row(shared_address(shared.ring) + walk.stage * kStageBytes + lane * kPitch,
             from + column * 2, bytes, full, policy);
  }
  walk.next_stage();
}

// In the order of multiply_batch().
__device__ inline void copy_tiles(const LinearPhase& l, Walk& walk, uint64_t policy) {
  const int lane = threadIdx.x % 32, tiles = tiles_of(l), in = l.in, blocks = gridDim.x;
  for (int tile = walk.first_tile(); tile < tiles; tile += kBatch * blocks) {
    static_assert(kBatch == 2);
    const char* const first = find_row(l, tile, lane);
    const char* const second = find_row(l, tile + blocks, lane);
    for (int column = 0; column < in; column += kStageColumns) {
      copy_stage(l, first, column, walk, policy);
      if (tile + blocks < tiles) copy_stage(l, second, column, walk, policy);
    }
  }
  walk.tiles += tiles;
}

// --- a linear phase -----------------------------------------------------------------------------

// x of a stage's columns. A thread reads four neighbouring columns of each token, a warp 128; as
// bf16 halves, they go to the lanes that multiply by them through shared memory. There a warp has
// every kWarps-th run of 32, a lane eight of a run of one token: lanes of the lower half the high
// bf16 halves, the others the low ones.
struct Columns {
  static constexpr int kAsked = 3;
  Me me;
  uint4 half[kStageRuns] = {};
  // The thread's own, in the order of their use: those asked for, and from where, in fours from x's
  // beginning on; zeros after them.
  float4 four[kAsked] = {};
  uint32_t from[kAsked] = {};
  int next_token = 0, next_column = 0;  // to be asked for
  int unasked = 0;                      // how many, from there on

  __device__ int own_token() const { return me.thread % 16 / 4; }
  // The first of the four; beyond the last column something else that is there and is not used.
  __device__ int own(int in) const { return me.thread * 4 < in ? me.thread * 4 : 0; }

  __device__ void ask(const LinearPhase& l, int q) {
    const int64_t row = l.index == nullptr ? next_token : l.index[next_token];
    from[q] = uint32_t((row * l.x_stride + next_column + own(l.in - next_column)) / 4);
    four[q] = look4(l.x + int64_t(from[q]) * 4);
    --unasked;
    if (++next_token < l.tokens) return;
    next_token = 0;
    next_column += kStageColumns;
    if (next_column >= l.in) next_column = 0;
  }
  // `count` tokens' columns will be wanted.
  __device__ void ask_first(const LinearPhase& l, int count) {
    unasked = count;
#pragma unroll
    for (int q = 0; q < kAsked; ++q) {
      if (unasked > 0) ask(l, q);
    }
  }
  // The next of them, once it is there; then another is asked for.
  __device__ float4 take(const LinearPhase& l) {
    for (int turn = 0; l.x_left && !written(four[0]); count_turn(turn)) {
#pragma unroll
      for (int q = 0; q < kAsked; ++q) {
        if (!written(four[q])) four[q] = look4(l.x + int64_t(from[q]) * 4);
      }
    }
    __syncwarp();
    const float4 x = four[0];
#pragma unroll
    for (int q = 0; q + 1 < kAsked; ++q) {
      four[q] = four[q + 1];
      from[q] = from[q + 1];
    }
    four[kAsked - 1] = {0, 0, 0, 0};
    if (unasked > 0) ask(l, kAsked - 1);
    return x;
  }
  // A token's columns to the lanes that multiply by them, and the first one's also to those without
  // a token, whose sums nothing stores. `first`: all warps are known to have read what was there.
  __device__ void share(const LinearPhase& l, int token, float4 x, bool first) {
    uint2 high, low;
    split(x, high, low);
    if (!l.keep_low) low = {0, 0};
    auto& halves = shared_memory().halves;
    if (!first) barrier_among<kAll>(kComputing);  // they are read
    reinterpret_cast<uint2*>(halves[0])[me.thread] = high;
    reinterpret_cast<uint2*>(halves[1])[me.thread] = low;
    barrier_among<kAll>(kComputing);  // all halves are there
    if ((own_token() < l.tokens ? own_token() : 0) != token) return;
    const auto* from = reinterpret_cast<const uint4*>(halves[me.lane() / 16]) + me.warp() * 4 +
                       me.lane() % 4;
#pragma unroll
    for (int r = 0; r < kStageRuns; ++r) half[r] = from[r * kWarps * kRun / 8];
  }

  // As they lie.
  __device__ void load(const LinearPhase& l, bool first) {
#pragma unroll 1
    for (int t = 0; t < l.tokens; ++t) share(l, t, take(l), first && t == 0);
  }

  // 1 / rms of the group of columns that the thread's belong to.
  __device__ float scale_of(const LinearPhase& l, int token, const float4& x) const {
    float sum = me.thread * 4 < l.in ? delta::dot(x, x) : 0.0f;
#pragma unroll 1
    for (int step = l.norm_lanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (l.norm_warps > 1) {
      float* const squares = shared_memory().squares[token % 2];
      if (me.lane() == 0) squares[me.warp()] = sum;
      barrier_among<kAll>(kComputing);  // all squares are there
      const int mask = l.norm_warps - 1;
      sum = squares[(me.warp() & ~mask) + (me.lane() & mask)];
#pragma unroll 1
      for (int step = l.norm_warps / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
      }
    }
    return rsqrtf(sum * l.share + l.eps);
  }

  // Normed. The weights and the gate are there before x is.
  __device__ void load_normed(const LinearPhase& l) {
    const int in_group = own(l.in) - (own(l.in) / kRun * l.groups_a_run >> 16) * l.group;
    const auto weight = *reinterpret_cast<const float4*>(l.weight + in_group);
    const float* const gate = l.gate + own(l.in);
    float4 next = l.gate == nullptr ? weight : look4(gate);
#pragma unroll 1
    for (int t = 0; t < l.tokens; ++t) {
      float4 factor = weight;
      if (l.gate != nullptr) {
        const float* const here = gate + t * l.gate_stride;
        for (int turn = 0; !written(next); count_turn(turn)) next = look4(here);
        factor = delta::times(weight, next);
        if (t + 1 < l.tokens) next = look4(here + l.gate_stride);
      }
      float4 x = take(l);
      const float scale = scale_of(l, t, x);
      x = {x.x * scale * factor.x, x.y * scale * factor.y, x.z * scale * factor.z,
           x.w * scale * factor.w};
      share(l, t, x, t == 0);
      if (l.normed != nullptr && blockIdx.x + 1 == gridDim.x && me.thread * 4 < l.in) {
        *reinterpret_cast<float4*>(l.normed + t * l.normed_stride + own(l.in)) = x;
      }
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

// Where a lane finds its weights.
struct Weights {
  const char* first;  // in the ring's first stage
  uint32_t full, free;

  __device__ explicit Weights(Me me) {
    Shared& shared = shared_memory();
    first = shared.ring + me.lane() / 4 * kPitch + me.warp() * kRun * 2 + me.lane() % 4 * 16;
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
    float2 sum{even[0] + odd[0], even[1] + odd[1]};  // of high or of low halves
    sum.x += __shfl_xor_sync(0xffffffffu, sum.x, 16);
    sum.y += __shfl_xor_sync(0xffffffffu, sum.y, 16);
    if (me.lane() < 16) *reinterpret_cast<float2*>(sums + me.lane() * 2) = sum;
  }
};

// x of several stages is read again for each batch.
__device__ inline void multiply_all(const LinearPhase& l, Walk& walk, Columns& x, bool whole) {
  const int tiles = tiles_of(l), in = l.in, blocks = gridDim.x, warp = x.me.warp();
  const Weights weights(x.me);
  int batch = 0;
#pragma unroll 1
  for (int tile = walk.first_tile(); tile < tiles; tile += kBatch * blocks, ++batch) {
    const bool two = tile + blocks < tiles;
    Sums first, second;
#pragma unroll 1
    for (int column = 0; column < in; column += kStageColumns) {
      const int runs = ((in - column) / kRun - warp + kWarps - 1) / kWarps;
      if (!whole) x.load(l, batch == 0 && column == 0);
      first.add(weights, walk, x, runs);
      if (two) second.add(weights, walk, x, runs);
    }
    if (batch >= 2) sums_wait(kSumsRead + batch % 2);
    float* const sums = shared_memory().sums[batch % 2] + warp * kBatchOutputs;
    first.leave_in(sums, x.me);
    second.leave_in(sums + kOutputs, x.me);
    sums_arrive(kSumsThere + batch % 2);
  }
  walk.tiles += tiles;
}

__device__ inline void run_linear(const LinearPhase& l, Walk& walk) {
  const bool whole = l.in <= kStageColumns;  // x of a token is one stage's
  const int tile = walk.first_tile(), next = tile + kBatch * int(gridDim.x);
  Columns x{.me = find_me()};
  int stages = (l.in + kStageColumns - 1) / kStageColumns;
  if (!whole && next < tiles_of(l)) stages = 1 << 16;  // of as many batches as come
  x.ask_first(l, l.tokens * stages);
  const bool late = walk.late;
  const Late history = late ? shared_memory().late[x.me.thread] : Late{};
  walk.late = false;
  if (l.group > 0) {
    x.load_normed(l);
    // The block has seen every answer of the mixer before: no block reads the history again.
    if (late) write_history(history);
  } else if (whole) {
    x.load(l, true);
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
__device__ inline void store_batch(const LinearPhase& l, int first, int batch, bool again, int o) {
  const int tile = first + o / kOutputs * int(gridDim.x), token = o / kTileRows % kTokensMost;
  const int row = row_of_tile(l, tile, o % kTileRows);
  const bool valid = tile < tiles_of(l) && token < l.tokens && row < l.rows;
  const float* const base = l.base + int64_t(token) * l.base_stride + row;
  float before = 0, bias = 0;  // asked for before the products are there
  if (valid && l.base != nullptr) before = look(base);
  if (valid && l.biased) bias = bias_of(l, row);
  sums_wait(kSumsThere + batch % 2);
  const float* const from = shared_memory().sums[batch % 2] + o;
  float even = 0, odd = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w += 2) {
    even += from[w * kBatchOutputs];
    odd += from[(w + 1) * kBatchOutputs];
  }
  if (valid && l.base_left && !written(before)) before = await(base);
  float value = before + bias + (even + odd);
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
  if (again) sums_arrive(kSumsRead + batch % 2);
}

__device__ inline void store_all(const LinearPhase& l, Walk& walk, int o) {
  const int tiles = tiles_of(l), step = kBatch * int(gridDim.x);
  int batch = 0;
#pragma unroll 1
  for (int tile = walk.first_tile(); tile < tiles; tile += step, ++batch) {
    store_batch(l, tile, batch, tile + 2 * step < tiles, o);
  }
  walk.tiles += tiles;
}

}  // namespace weir::cuda::resident
