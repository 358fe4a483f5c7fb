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
  CUtensorMap map[Linear::kParts];
  int first_tile[Linear::kParts + 1];  // tiles of `rows` rows; none spans two slabs
  int first_row[Linear::kParts];       // of y
  int rows[Linear::kParts];
};

struct Job {
  CUtensorMap x;  // [planes, tokens, in]
  Slabs slabs;    // gated: the gate's matrix and, as second map, the other one's
  Acts y;         // gated: silu(gate) * up
  SplitVectors split;            // gated or normed: y, or y times norm_weight; or null
  const float* norm_weight;      // null: not normed
  float* squares_to;             // normed: [tiles, kHopperTokens] sums of y's squares
  const float* squares;          // of x, if it lacks its norm's scale
  int squares_count;             // 0: it lacks none
  float eps;
  const float* bias[Linear::kParts];
  int part_end[Linear::kParts];  // rows of y above it
  int tokens, padded;            // padded to 8
  int planes;                    // of x: 2 high and low, 1 high alone
  int chunks;                    // of 64 columns
  int in;
  int cluster, stages;
  bool accumulate, gated;
  bool plain;                    // y is stored in fours and has no bias
};

// Where a block's work lies.
struct Block {
  int slab, first_row;   // of the slab
  int rank, first, end;  // chunks
};

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

// What x's norm multiplies each token by, or 1; for later, by as many threads as tokens.
__device__ inline void load_scales(const Job& job, float* scale) {
  if (threadIdx.x >= job.tokens) return;
  float sum = 0;
#pragma unroll 4
  for (int i = 0; i < job.squares_count; ++i) sum += job.squares[i * kHopperTokens + threadIdx.x];
  scale[threadIdx.x] =
      job.squares_count == 0 ? 1.0f : 1.0f / sqrtf(sum / float(job.in) + job.eps);
}

// The cluster's sums of the same four numbers, in the order of the blocks' ranks.
template <int kCluster>
__device__ inline float4 sum_of(const float* mine) {
  float4 part[kCluster];
#pragma unroll
  for (int c = 0; c < kCluster; ++c) part[c] = read_four(mine, uint32_t(c));
#pragma unroll
  for (int c = 1; c < kCluster; ++c) part[0] = add(part[0], part[c]);
  return part[0];
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
__device__ __noinline__ void store_slowly(const Job& job, const Block& block, const float* sums,
                                          const float* scale, int tile_rows) {
  const Share share(job, block);
#pragma unroll 1
  for (int i = threadIdx.x; i < share.count * tile_rows; i += blockDim.x) {
    const int token = share.first + i / tile_rows, column = i % tile_rows;
    if (block.first_row + column >= job.slabs.rows[block.slab]) continue;
    float v = 0;
    for (int c = 0; c < job.cluster; ++c) {
      v += read_peer(sums + token * (tile_rows + 4) + column, uint32_t(c));
    }
    v *= scale[token];
    const int row = job.slabs.first_row[block.slab] + block.first_row + column;
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
__device__ inline void leave_squares(const Job& job, const float* squares, const Share& share) {
  __syncthreads();  // they are there
  float* to = job.squares_to + int(blockIdx.x) / job.cluster * kHopperTokens + share.first;
#pragma unroll 1
  for (int t = threadIdx.x; t < share.count; t += blockDim.x) {
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < kFours; ++i) sum += squares[t * kFours + i];
    to[t] = sum;
  }
}

// Adds the cluster's sums, each [tokens][kRows + 4] in its block's shared memory, and stores those
// of this block's share.
template <int kRows, int kCluster>
__device__ inline void store_sums(const Job& job, const Block& block, float* sums,
                                  const float* scale) {
  constexpr int kFours = kRows / 4;
  const Share share(job, block);
  const int rows = job.slabs.rows[block.slab], above = job.slabs.first_row[block.slab];
  float* squares = sums + job.tokens * (kRows + 4);  // [own tokens, kFours]
#pragma unroll 1
  for (int i = threadIdx.x; i < share.count * kFours; i += blockDim.x) {
    const int token = share.first + i / kFours, row = block.first_row + i % kFours * 4;
    const bool exists = row < rows;
    auto* to = reinterpret_cast<float4*>(at(job.y, token) + above + row);
    float4 v = {};
    if (job.accumulate && exists) v = *to;
    const float4 sum = sum_of<kCluster>(sums + token * (kRows + 4) + i % kFours * 4);
    if (exists) *to = v = add(v, times(sum, scale[token]));
    if (job.norm_weight == nullptr) continue;
    squares[i] = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    if (!exists) continue;
    const float4 weight = *reinterpret_cast<const float4*>(job.norm_weight + row);
    store_split(job.split, int64_t(token) * rows + row,
                {v.x * weight.x, v.y * weight.y, v.z * weight.z, v.w * weight.w});
  }
  if (job.norm_weight != nullptr) leave_squares<kFours>(job, squares, share);
}

// Within 1e-6 of it.
__device__ inline float gated(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// silu(gate) * up: the upper half of a block's rows are the gate's, the lower the other matrix's.
template <int kRows, int kCluster>
__device__ inline void store_gated(const Job& job, const Block& block, const float* sums,
                                   const float* scale) {
  constexpr int kFours = kRows / 8;
  const Share share(job, block);
  const int rows = job.slabs.rows[0];
#pragma unroll 1
  for (int i = threadIdx.x; i < share.count * kFours; i += blockDim.x) {
    const int token = share.first + i / kFours, row = block.first_row + i % kFours * 4;
    const float* mine = sums + token * (kRows + 4) + i % kFours * 4;
    const float4 g = times(sum_of<kCluster>(mine), scale[token]);
    const float4 u = times(sum_of<kCluster>(mine + kRows / 2), scale[token]);
    if (row >= rows) continue;
    const float4 v = {gated(g.x, u.x), gated(g.y, u.y), gated(g.z, u.z), gated(g.w, u.w)};
    *reinterpret_cast<float4*>(at(job.y, token) + row) = v;
    store_split(job.split, int64_t(token) * rows + row, v);
  }
}

template <int kRows, int kCluster>
__device__ inline void store_all(const Job& job, const Block& block, float* sums,
                                 const float* scale) {
  if constexpr (kRows % 16 == 0) {
    if (job.gated) return store_gated<kRows, kCluster>(job, block, sums, scale);
  }
  store_sums<kRows, kCluster>(job, block, sums, scale);
}

#endif  // 9.0a

}  // namespace weir::cuda::hopper
