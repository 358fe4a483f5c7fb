#pragma once
// What a block of Hopper's Linear is given, and what it does with its sums when all have been added
// up: the other blocks' of its cluster, bias, residual, and the op after the Linear, if that one is
// done in the same kernel.
#include <cuda.h>

#include "kernels/linear_cuda.cuh"
#include "kernels/wgmma_cuda.cuh"

namespace weir::cuda::hopper {

// Consecutive parts that lie next to each other are one matrix: a slab.
struct Slabs {
  int first_tile[Linear::kParts + 1];  // tiles of `rows` rows; none spans two slabs
  int first_row[Linear::kParts];       // of y
  int rows[Linear::kParts];
  CUtensorMap map[Linear::kParts];
};

// What every thread reads comes first and close together: parameters are fetched some at a time,
// and the first to read them waits.
struct Job {
  int tokens, padded;            // padded to 8
  int planes;                    // of x: 2 high and low, 1 high alone
  int chunks;                    // of 64 columns
  int in;
  int cluster, stages;
  int early;                     // stages of the matrix asked for before x can be read
  int squares_count;             // 0: x lacks no scale
  float eps;
  bool accumulate, gated;
  bool split_alone;              // gated: y is read as split vectors alone
  bool alone;                    // see store_alone()
  bool plain;                    // y is stored in fours and has no bias
  Acts y;                        // gated: silu(gate) * up
  SplitVectors split;            // gated or normed: y, or y times norm_weight; or null
  const float* norm_weight;      // null: not normed
  float* squares_to;             // normed: [tiles, kHopperTokens] sums of y's squares
  const float* squares;          // of x, if it lacks its norm's scale
  Slabs slabs;    // gated: the gate's matrix and, as second map, the other one's
  CUtensorMap x;  // [planes, tokens, in]
  const float* bias[Linear::kParts];
  int part_end[Linear::kParts];  // rows of y above it
};

// Where a block's work lies.
struct Block {
  int slab, first_row;   // of the slab
  int rows, above;       // the slab's, and those of y above it
  int rank, first, end;  // chunks
};

// Of a token's sums in shared memory, in numbers. Eight more than a multiple of 16: a quarter of a
// warp that stores pairs of four tokens then meets every bank once.
constexpr int stride_of(int rows) { return rows % 16 == 8 ? rows : rows + 8; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ inline float4 read_four(const float* mine, uint32_t rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(peer_address(mine, rank))
               : "memory");
  return v;
}

__device__ inline float4 add(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ inline float4 times(const float4& a, float b) {
  return {a.x * b, a.y * b, a.z * b, a.w * b};
}

// The threads of a block that store its sums, all but the copying warp's.
struct Team {
  int thread, count;
  __device__ void meet() const { barrier_among<2>(count); }
  // Arrives where the others meet.
  __device__ void leave() const { asm volatile("bar.arrive 2, %0;" ::"r"(count) : "memory"); }
};

// What x's norm multiplies each token by, or 1; for later, by `threads` threads.
__device__ inline void load_scales(const Job& job, float* scale, int thread, int threads) {
#pragma unroll 1
  for (int t = thread; t < job.tokens; t += threads) {
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < job.squares_count; ++i) sum += job.squares[i * kHopperTokens + t];
    scale[t] = job.squares_count == 0 ? 1.0f : 1.0f / sqrtf(sum / float(job.in) + job.eps);
  }
}

// The cluster's sums of the same four numbers, in the order of the blocks' ranks.
template <int kCluster>
__device__ inline float4 sum_of(const float* mine) {
  if constexpr (kCluster == 1) {
    return *reinterpret_cast<const float4*>(mine);
  } else {
    float4 part[kCluster];
#pragma unroll
    for (int c = 0; c < kCluster; ++c) part[c] = read_four(mine, uint32_t(c));
#pragma unroll
    for (int c = 1; c < kCluster; ++c) part[0] = add(part[0], part[c]);
    return part[0];
  }
}

// Which tokens of the block's tile are this block's to store; the others are its cluster's.
struct Share {
  int first, count;
  __device__ Share(const Job& job, const Block& block) {
    const int most = (job.tokens + job.cluster - 1) / job.cluster;
    first = block.rank * most;
    count = min(most, job.tokens - first);
  }
};

// Adds up and stores what is not plain, a number at a time. Seldom needed: what blocks run at their
// end is kept short, as its instructions come from memory anew when other kernels ran before.
__device__ __noinline__ void store_slowly(const Job& job, const Block& block, const Team& team,
                                          const float* sums, const float* scale, int tile_rows) {
  const Share share(job, block);
#pragma unroll 1
  for (int i = team.thread; i < share.count * tile_rows; i += team.count) {
    const int token = share.first + i / tile_rows, column = i % tile_rows;
    if (block.first_row + column >= block.rows) continue;
    float v = 0;
    for (int c = 0; c < job.cluster; ++c) {
      v += read_peer(sums + token * stride_of(tile_rows) + column, uint32_t(c));
    }
    v *= scale[token];
    const int row = block.above + block.first_row + column;
    int part = 0;
    while (row >= job.part_end[part]) ++part;
    const int above = part == 0 ? 0 : job.part_end[part - 1];
    if (job.bias[part] != nullptr) v += job.bias[part][row - above];
    float* y = at(job.y, token) + row;
    *y = job.accumulate ? *y + v : v;
  }
}

// The tile's part of each own token's sum of squares, of those of its fours.
template <int kFours>
__device__ inline void leave_squares(const Job& job, const Team& team, const float* squares,
                                     const Share& share) {
  team.meet();  // they are there
  float* to = job.squares_to + int(blockIdx.x) / job.cluster * kHopperTokens + share.first;
#pragma unroll 1
  for (int t = team.thread; t < share.count; t += team.count) {
    float sum = 0;
#pragma unroll 6
    for (int i = 0; i < kFours; ++i) sum += squares[t * kFours + i];
    to[t] = sum;
  }
}

// Four numbers of y as they were, and their norm's weights, read before the sums are there: the
// block's i-th four, of `fours` in each token's part of the tile.
struct Old {
  float4 y{}, weight{};
  __device__ Old() = default;
  __device__ Old(const Job& job, const Block& block, const Share& share, int fours, int i) {
    const int row = block.first_row + i % fours * 4;
    if (!job.plain || i >= share.count * fours || row >= block.rows) return;
    const float* from = at(job.y, share.first + i / fours) + block.above + row;
    if (job.accumulate) y = __ldcg(reinterpret_cast<const float4*>(from));
    if (job.norm_weight == nullptr) return;
    weight = *reinterpret_cast<const float4*>(job.norm_weight + row);
  }
};

// Adds the cluster's sums, each [tokens][stride_of(kRows)] in its block's shared memory, and stores
// those of this block's share. `old` is what belongs to the thread's first four.
template <int kRows, int kCluster>
__device__ inline void store_sums(const Job& job, const Block& block, const Team& team,
                                  float* sums, const float* scale, Old old) {
  constexpr int kFours = kRows / 4, kStride = stride_of(kRows);
  const Share share(job, block);
  float* squares = sums + job.tokens * kStride;  // [own tokens, kFours]
#pragma unroll 1
  for (int i = team.thread; i < share.count * kFours; i += team.count) {
    const Old own = old;
    old = Old(job, block, share, kFours, i + team.count);
    const int token = share.first + i / kFours, row = block.first_row + i % kFours * 4;
    const float4 sum = sum_of<kCluster>(sums + token * kStride + i % kFours * 4);
    const float4 v = add(own.y, times(sum, scale[token]));
    const bool exists = row < block.rows;
    if (exists) *reinterpret_cast<float4*>(at(job.y, token) + block.above + row) = v;
    if (job.norm_weight == nullptr) continue;
    squares[i] = exists ? v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w : 0.0f;
    if (!exists) continue;
    const float4& w = own.weight;
    store_split(job.split, int64_t(token) * block.rows + row,
                {v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w});
  }
  if (job.norm_weight != nullptr) leave_squares<kFours>(job, team, squares, share);
}

// Within 1e-6 of it.
__device__ inline float gated(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// silu(gate) * up: the upper half of a block's rows are the gate's, the lower the other matrix's.
template <int kRows, int kCluster>
__device__ inline void store_gated(const Job& job, const Block& block, const Team& team,
                                   const float* sums, const float* scale) {
  constexpr int kFours = kRows / 8;
  const Share share(job, block);
#pragma unroll 1
  for (int i = team.thread; i < share.count * kFours; i += team.count) {
    const int token = share.first + i / kFours, row = block.first_row + i % kFours * 4;
    const float* mine = sums + token * stride_of(kRows) + i % kFours * 4;
    const float4 g = times(sum_of<kCluster>(mine), scale[token]);
    const float4 u = times(sum_of<kCluster>(mine + kRows / 2), scale[token]);
    if (row >= block.rows) continue;
    const float4 v = {gated(g.x, u.x), gated(g.y, u.y), gated(g.z, u.z), gated(g.w, u.w)};
    if (!job.split_alone) *reinterpret_cast<float4*>(at(job.y, token) + row) = v;
    store_split(job.split, int64_t(token) * block.rows + row, v);
  }
}

// Two lanes' pairs of eight columns and of the next eight become four neighbours of the one and
// four of the other: what this lane stores.
__device__ inline float4 four_of(const float2& a, const float2& b, bool second) {
  const float2 given = second ? a : b;
  const float2 got = {__shfl_xor_sync(~0u, given.x, 1), __shfl_xor_sync(~0u, given.y, 1)};
  if (second) return {got.x, got.y, b.x, b.y};
  return {a.x, a.y, got.x, got.y};
}

// A warpgroup's sums straight from its registers, of a block that has all columns of its rows.
template <int kRows>
__device__ inline void store_alone(const Job& job, const Block& block, const float* scale,
                                   const float (&sum)[kRows / 2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool second = lane % 2 != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = warp * 16 + half * 8 + lane / 4;
    const bool wanted = token < job.tokens;
    const float by = wanted ? scale[token] : 0.0f;
    float* const to = at(job.y, wanted ? token : 0) + block.above;
    const int64_t split_to = int64_t(token) * block.rows;
    const auto pair = [&](int j) {
      return float2{sum[4 * j + 2 * half] * by, sum[4 * j + 2 * half + 1] * by};
    };
    const auto gated_pair = [&](int j) {
      const float2 g = pair(j), u = pair(j + kRows / 16);
      return float2{gated(g.x, u.x), gated(g.y, u.y)};
    };
    const int row = block.first_row + lane % 4 / 2 * 4 + (second ? 8 : 0);
    if constexpr (kRows % 32 == 0) {
      if (job.gated) {
#pragma unroll
        for (int j = 0; j < kRows / 16; j += 2) {
          const float4 v = four_of(gated_pair(j), gated_pair(j + 1), second);
          if (!wanted || row + 8 * j >= block.rows) continue;
          if (!job.split_alone) *reinterpret_cast<float4*>(to + row + 8 * j) = v;
          store_split(job.split, split_to + row + 8 * j, v);
        }
        continue;
      }
    }
    if constexpr (kRows % 16 == 0) {
#pragma unroll
      for (int j = 0; j < kRows / 8; j += 2) {
        const float4 v = four_of(pair(j), pair(j + 1), second);
        if (wanted && row + 8 * j < block.rows) *reinterpret_cast<float4*>(to + row + 8 * j) = v;
      }
    }
  }
}

template <int kRows, int kCluster>
__device__ inline void store_all(const Job& job, const Block& block, const Team& team,
                                 float* sums, const float* scale, const Old& old) {
  if constexpr (kRows % 16 == 0) {
    if (job.gated) return store_gated<kRows, kCluster>(job, block, team, sums, scale);
  }
  store_sums<kRows, kCluster>(job, block, team, sums, scale, old);
}

#endif  // 9.0a

}  // namespace weir::cuda::hopper
