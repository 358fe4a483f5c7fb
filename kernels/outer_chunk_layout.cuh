#pragma once
#include <algorithm>

#include "kernels/async_cuda.cuh"
#include "kernels/long_rows_cuda.cuh"
#include "kernels/outer_chunk_cuda.cuh"
#include "kernels/tensor_core.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda::adding {

// The chunk form of outer_chunk.h with chunks of 16 tokens: one block per (16 kWarps values of a
// head, or of two that share keys; row). Tiles of 32 tokens come by asynchronous copies, the next
// one while the state passes this one's two chunks. All warps narrow a tile's inputs to halves
// and make P, the products between tokens of a chunk; then each of kWarps warps, which holds 16
// values of the state in registers through the whole row, has its part of everything to itself:
//   O' = S (q * exp L)' + V' P',  S = S diag(exp L_last) + V' (k * exp(L_last - L))
// of [values, tokens] and [values, keys]. With chunks as short as a block of outer_chunk.h there
// are no blocks below the diagonal, and every decay is one inside 16 tokens.
//
// Floor of a tile and head, 128x128: q, k, v and out, 64 KB, and the decays of each channel, 16
// KB: 3,500 or 4,400 cycles of a multiprocessor's share of a copy; 2.2 million products, 1,000.

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kTokens = 32;                  // of a tile: a lane's each
constexpr int kBlock = 16;                   // tokens of a chunk
constexpr int kBlocks = kTokens / kBlock;

// What decays: all of a head alike (or nothing), each key channel or each value on its own; or
// nothing, with a running sum of keys.
enum class By : uint8_t { Head, Key, Value, Sum };

// Where there are too few rows and heads for the machine, rows are cut into segments of `tokens`:
// one launch finds what each segment alone makes of a zero state, a second one where each segment
// starts (the recurrence is linear in the state), and a third one answers them all.
struct Segments {
  int tokens = 0;         // of a segment; 0: rows stay whole
  int most = 1;           // of a row
  float* ends = nullptr;  // for each segment and block end_floats(): state, sum of keys, decays
};
// 16-byte aligned in its parts.
__host__ __device__ constexpr int end_floats(int keys, int values) {
  return values * keys + keys + (keys > values ? keys : values);
}

// kGather: only what a segment makes of the state.
template <int K_, By kBy_, int kWarps_, bool kGather_>
struct Layout {
  static constexpr int K = K_, kWarps = kWarps_;
  static constexpr bool kGather = kGather_;
  static constexpr bool kKey = kBy_ == By::Key, kValue = kBy_ == By::Value;
  static constexpr bool kHead = !kKey && !kValue;    // one number a token decays all, or none
  static constexpr bool kSum = kBy_ == By::Sum;      // one more warp has the sum of keys
  static constexpr int kHolders = kWarps + (kSum ? 1 : 0);
  static constexpr int kThreads = kHolders > 8 ? 32 * kHolders : 256;
  static constexpr int kResident = K > 128 || kSum || (kValue && kWarps > 4) ? 1 : 2;  // blocks
  static constexpr int kValues = 16 * kWarps;
  static constexpr int kHeads = kHead ? 2 : 1;       // at most, of a block
  static constexpr int kChannels = kKey ? K : kValues;  // that decay on their own
  // In halves, so that the rows of a fragment lie in different banks.
  static constexpr int kKeyPitch = K + 8, kValuePitch = kValues + 8, kBlockPitch = kBlock + 8;

  // A tile as it lies in device memory.
  float raw_q[kTokens * K], raw_k[kTokens * K], raw_v[kTokens * kValues];
  // Per key or value: log decays, then what the state is multiplied with.
  float decay[kHead ? 4 : kTokens * kChannels];
  half q[kTokens * kKeyPitch];          // scaled; per key: times exp(L)
  half k[kTokens * kKeyPitch];          // per key: times exp(last - L)
  half v[kTokens * kValuePitch];        // per value: times exp(last - L)
  // Per key, of each chunk: its last 8 tokens' queries times their decays since the eighth, its
  // first 8 tokens' keys times those up to it.
  half later_q[kKey && !kGather ? kBlocks * 8 * kKeyPitch : 8];
  half earlier_k[kKey && !kGather ? kBlocks * 8 * kKeyPitch : 8];
  half p[kHeads][kTokens * kBlockPitch];  // P, zeros above the diagonal
  float whole[kHead ? kHeads * kBlocks : kBlocks * kChannels];  // exp(last): a chunk's, of S
  // Per value: P transposed, [s, t] of each chunk; exp(L), and what a chunk's own tokens answer.
  float p_wide[kValue ? kBlocks * kBlock * kBlock : 4];
  float since[kValue ? kTokens * kValues : 4], own[kValue ? kTokens * kValues : 4];
  // Otherwise, for each head and token: L in powers of two, what V is written with, exp(L), and
  // what V is written with times exp(last - L).
  float logs[kHeads][kTokens], written[kHeads][kTokens];
  float asked[kHeads][kTokens], kept[kHeads][kTokens];
  float divisor[kTokens];
  float total[kGather ? (K > kValues ? K : kValues) : 4];  // decays of the whole segment
};

// Where the block is.
struct Place {
  int row;
  int head, key_head, query;  // head: the first
  int heads;                  // of the block, one or two
  int value;                  // the block's first value, counted over all heads
  int value_column;           // where it begins in op.v
  int begin, count;           // tokens in the step, of the row or its segment
  int segment, segments;      // which one, and of how many
  bool fresh;                 // it starts from a zero state
};

// Between the two launches over segments: from what each makes of a zero state to where it starts,
// and the slot's state to what the row leaves.
void pass_segments(const OuterStep& op, Context& context, int slice, const Segments& segments);

// Start the kernel with blocks of `slice` values: 16, 32, 64 or 128.
void start_head(const OuterStep& op, Context& context, int slice, const Segments& segments);
void start_key(const OuterStep& op, Context& context, int slice, const Segments& segments);
void start_value(const OuterStep& op, Context& context, int slice, const Segments& segments);
void start_sum(const OuterStep& op, Context& context, int slice, const Segments& segments);

}  // namespace weir::cuda::adding
