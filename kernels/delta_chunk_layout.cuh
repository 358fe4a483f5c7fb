#pragma once
#include "kernels/delta_chunk_cuda.cuh"
#include "kernels/ring.h"
#include "kernels/tensor_core.cuh"

namespace weir::cuda::chunk {

// Rows of many tokens run in chunks of 64. Where rows and heads are few, in two kernels: the first
// makes of every chunk of every value head, all of them side by side, what the state needs of it:
// convolution, norms, gates and the products between tokens, half precision, into a tile of scratch
// memory. The second walks along a row with the state in registers and does nothing but products
// with it. Rows whose tiles do not fit the scratch memory take several turns. Where rows and heads
// are many, one kernel does both (delta_chunk_row.cuh).
//
// Everything is linear in the values, so the state is transposed against the formulas of
// delta_chunk.h: U' and O' of [values, tokens] are accumulators next to S of [values, keys].

constexpr int kTokens = 64;       // of a chunk
constexpr int kBlock = 16;        // tokens that share a decay reference
constexpr int kPairs = 10;        // blocks of 16 x 16 on and below the diagonal of 64 x 64
constexpr int kSliceValues = 16;  // of a warp

// What a tile holds besides its values. Keys, queries and P lie in panels of 64 channels, rows of
// 128 bytes whose 16-byte pieces are permuted by the row (the copy engine's 128-byte swizzle), so
// that neither the rows nor the columns of a fragment meet in a bank; A's 16 x 16 blocks as two
// columns of 8 x 8.
template <int K, bool kChannel>
struct alignas(128) Image {
  // Scalar decay: the keys. Per channel: the keys times the erase gate and exp(L).
  half k[kTokens * K];
  half q[kTokens * K];                        // per channel: times exp(L)
  half p[kTokens * kTokens];                  // P, with zeros above the diagonal
  half end[kChannel ? kTokens * K : 8];       // per channel: keys times exp(last - L)
  half a[kPairs * kBlock * kBlock];  // -A below the diagonal blocks, (I + A)^-1 in them
  // Scalar decay: what a token's column of S k, S q and U is multiplied with.
  float recalled[kChannel ? 4 : kTokens], asked[kChannel ? 4 : kTokens];
  float kept[kChannel ? 4 : kTokens];
  float decay[kChannel ? K : 4];     // of the state, over the whole chunk
};

// Where token t's channel lies in k, q and end, or P's column.
__device__ inline int panel_at(int t, int channel) {
  const int piece = channel % 64 / 8 ^ t % 8;
  return channel / 64 * (kTokens * 64) + t * 64 + piece * 8 + channel % 8;
}
// panel_at() of a few tokens from one on, as many as it is a multiple of.
struct PanelRun {
  int first;
  __device__ PanelRun(int t, int channel) : first(panel_at(t, channel)) {}
  __device__ int operator[](int i) const { return (first ^ 8 * i) + 64 * i; }
};
// Block (b, c), c <= b, of a, and a number's place within a block.
__device__ constexpr int pair_at(int b, int c) {
  return (b * (b + 1) / 2 + c) * kBlock * kBlock;
}
__device__ constexpr int within_pair(int row, int column) {
  return column / 8 * 128 + row * 8 + column % 8;
}
// Token t's value within a slice of 16.
__device__ inline int value_at(int t, int value) {
  return t * kSliceValues + (value / 8 ^ t / 4 % 2) * 8 + value % 8;
}

// A tile: an image, and after it the values' slices, each [64, 16], times beta or the write gate.
inline __host__ __device__ size_t tile_bytes(size_t image, int value_dim) {
  return image + size_t(value_dim) * kTokens * sizeof(half);
}

// Which tiles a launch is about. Tiles are numbered through the rows' chunks: groups of `group`
// rows one after the other, and within a group the first chunks of its rows, then the second ones
// and so on, so that the rows of a group advance side by side. Every number stands for the tiles of
// all value heads.
struct Turn {
  int group;           // a power of two, 32 at most
  int first, count;    // numbers
  unsigned char* tiles;  // of `first`; [count, value_heads] of tile_bytes()
  bool follows;        // a turn of the same op came before
};

// A group of rows, one in each lane of a warp.
struct Group {
  int row;       // of lane 0
  int begin;     // tiles of the groups before
  int chunks;    // of this lane's row; 0 where it is none of the group
  bool found;

  // The number of the tile of chunk c of the row in lane `of`.
  __device__ int tile(int of, int c) const {
    const unsigned later = __ballot_sync(0xffffffffu, chunks > c);
    return begin + __reduce_add_sync(0xffffffffu, min(chunks, c)) +
           __popc(later & ((1u << of) - 1));
  }
  // How many chunks of that row have numbers below `end`.
  __device__ int chunks_before(int of, int end) const {
    const int most = __shfl_sync(0xffffffffu, chunks, of);
    int c = 0;
    for (int step = most == 0 ? 0 : 1 << (31 - __clz(most)); step > 0; step /= 2) {
      if (c + step <= most && tile(of, c + step - 1) < end) c += step;
    }
    return c;
  }
};

// Without branches: a warp asks for many rows at one time.
__device__ inline int chunks_of(const Rows& rows, int row) {
  const int there = min(row, rows.count - 1);
  const int count = rows.begin[there + 1] - rows.begin[there];
  const bool served = row == there && rows.slot[there] != kPadding && count > kStepTokensMost;
  return served ? (count + kTokens - 1) / kTokens : 0;
}
constexpr int kRunsAtOnce = 4;  // of 32 rows
// By a whole warp: the first of the rows `row`, row + step, .. that has chunks; rows.count or more:
// there is none.
__device__ inline int next_long_row(const Rows& rows, int row, int step) {
#pragma unroll 1
  for (; row < rows.count; row += kRunsAtOnce * 32 * step) {
    int chunks[kRunsAtOnce];
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) {
      chunks[i] = chunks_of(rows, row + (32 * i + int(threadIdx.x) % 32) * step);
    }
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) {
      const unsigned found = __ballot_sync(0xffffffffu, chunks[i] > 0);
      if (found != 0) return row + (32 * i + __ffs(found) - 1) * step;
    }
  }
  return row;
}

// By a whole warp: the first group for which hit(first row, first tile, end of tiles) holds.
template <typename Hit>
__device__ inline Group find_group(const Rows& rows, int group, const Hit& hit) {
  const int lane = threadIdx.x % 32;
  int before = 0;
#pragma unroll 1
  for (int run = 0; run < rows.count; run += 32 * kRunsAtOnce) {
    int of_run[kRunsAtOnce];
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) of_run[i] = chunks_of(rows, run + 32 * i + lane);
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) {
      const int row = run + 32 * i, chunks = of_run[i];
      if (row >= rows.count) break;
      int sum = chunks;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += left;
      }
      const int first = lane & ~(group - 1);
      const int begin = before + __shfl_sync(0xffffffffu, sum - chunks, first);
      const int end = before + __shfl_sync(0xffffffffu, sum, lane | (group - 1));
      const unsigned hits = __ballot_sync(0xffffffffu, hit(row + first, begin, end));
      if (hits != 0) {
        const int of = (__ffs(hits) - 1) & ~(group - 1);
        const int there = __shfl_sync(0xffffffffu, begin, of);
        const int mine = __shfl_sync(0xffffffffu, chunks, (of + lane) % 32);
        return {row + of, there, lane < group ? mine : 0, true};
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
  }
  return {.found = false};
}

struct Tile {
  int row = -1, chunk = 0;  // -1: there is no such tile
};

// By a whole warp.
__device__ inline Tile find_tile(const Rows& rows, int group, int number) {
  const Group g = find_group(rows, group, [&](int, int begin, int end) {
    return begin <= number && number < end;
  });
  if (!g.found) return {};
  // The rows' chunks before c are numbered before all chunks c.
  const int most = __reduce_max_sync(0xffffffffu, g.chunks);
  int c = 0;
  for (int step = 1 << (31 - __clz(most)); step > 0; step /= 2) {
    const int below = __reduce_add_sync(0xffffffffu, min(g.chunks, c + step));
    if (g.begin + below <= number) c += step;
  }
  const int rank = number - g.begin - __reduce_add_sync(0xffffffffu, min(g.chunks, c));
  const unsigned has = __ballot_sync(0xffffffffu, g.chunks > c);
  const int lane = threadIdx.x % 32;
  const bool mine = g.chunks > c && __popc(has & ((1u << lane) - 1)) == rank;
  return {g.row + __ffs(__ballot_sync(0xffffffffu, mine)) - 1, c};
}

// Where a block is.
struct Place {
  int key_head, value_head, decay_head;
  int begin, count;      // the row's tokens in the step
  int oldest;            // the ring's row that its first input replaces; -1: from a zero state
  const float* history;  // the row's, [conv_width - 1, channels]
  int channels;          // of a row of the history

  __device__ bool fresh() const { return oldest < 0; }
  // How far into the history an input before the row lies: the `age`-th that is kept, oldest first.
  __device__ int kept(int age, int width) const {
    return ring_row_of_age(oldest, age, width - 1) * channels;
  }
};

__device__ inline Place place_of(const DeltaMix& op, int row, int value_head) {
  const int begin = op.rows.begin[row], first = op.rows.first[row];
  return {.key_head = value_head * op.key_heads / op.value_heads,
          .value_head = value_head,
          .decay_head = value_head * op.decay_heads / op.value_heads,
          .begin = begin,
          .count = op.rows.begin[row + 1] - begin,
          .oldest = first == 0 ? -1 : oldest_ring_row(first, op.conv_width),
          .history = op.history.data == nullptr ? nullptr : at(op.history, op.rows.slot[row]),
          .channels = 2 * op.key_heads * op.key_dim + op.value_heads * op.value_dim};
}

// One turn: both kernels, the second in blocks of `slice` values (16, 32 or 64) and `rows`
// rows at a time.
struct Starts {
  void (*prepare)(const DeltaMix& op, Context& context, const Turn& turn);
  void (*advance)(const DeltaMix& op, Context& context, const Turn& turn, int slice, int rows);
  size_t image;  // bytes
  int blocks;    // of prepare() on a multiprocessor
};
// Whole rows in one kernel: keys of 128, values in multiples of it. What it returns is where their
// answers were left, rounded, for the Linear that follows, and then perhaps not in op.out.
SplitVectors start_rows(const DeltaMix& op, Context& context);
// The same of heads whose channels each have their own decay, or erase gate.
SplitVectors start_channel_rows(const DeltaMix& op, Context& context);

Starts head_starts(int key_dim);     // one number decays a head, or none
Starts channel_starts(int key_dim);  // each key channel has its own decay, or erase gate

}  // namespace weir::cuda::chunk
