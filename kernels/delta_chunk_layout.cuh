#pragma once
#include "kernels/delta_chunk_cuda.cuh"
#include "kernels/tensor_core.cuh"

namespace weir::cuda::chunk {

// The chunk kernel: one block per (value head, slice of its values, row). Eight warps prepare
// chunks of 64 tokens, one ahead of the others: convolution, norms, gates and the products between
// tokens. Each of the other kWarps holds 16 rows of the state in registers through the whole row
// of tokens and has its part of every product to itself.
//
// Everything is linear in the values, so the state is transposed against the formulas of
// delta_chunk.h: U' and O' of [values, tokens] are accumulators next to S of [values, keys].

constexpr int kTokens = 64;       // of a chunk
constexpr int kBlock = 16;        // tokens that share a decay reference
constexpr int kPreparers = 256;   // threads

constexpr int kTaps = 5;          // of a convolution: four, oldest first, and the bias

// What is passed from the preparing warps to the others, twice; pitches in halves, so that the
// rows of a fragment lie in different banks.
template <int K, bool kChannel, int kWarps>
struct Layout {
  static constexpr int kKeyPitch = K + 8, kTokenPitch = kTokens + 8, kValuePitch = 16 * kWarps + 8;
  static constexpr int kLogPitch = K + 4, kDiagonalPitch = kBlock + 4;

  struct Stage {
    // Scalar decay: the keys. Per channel: the keys times the erase gate and exp(L).
    half k[kTokens * kKeyPitch];
    half q[kTokens * kKeyPitch];                          // per channel: times exp(L)
    half end[kChannel ? kTokens * kKeyPitch : 8];         // per channel: keys times exp(last - L)
    half a[kTokens * kTokenPitch];   // -A below the diagonal blocks, (I + A)^-1 in them
    half p[kTokens * kTokenPitch];   // P, with zeros above the diagonal in the diagonal blocks
    float written[kTokens];          // what a token's values are multiplied with
    // Scalar decay: what a token's column of S k, S q and U is multiplied with.
    float recalled[kTokens], asked[kTokens], kept[kTokens];
    float decay[kChannel ? K : 4];   // of the state, over the whole chunk
  };
  Stage stage[2];
  half v[kTokens * kValuePitch];   // values, each warp's own columns
  float key_taps[2][kTaps][K];     // of queries and keys
  float value_taps[kTaps][16 * kWarps];
  float diagonal[4][kBlock * kDiagonalPitch];  // A's diagonal blocks, transposed
  float logs[kChannel ? kTokens * kLogPitch : kTokens];  // L, in powers of two
  float beta[kTokens];
  float run_sums[kChannel ? kPreparers * 4 : 4];         // log decays of each thread's tokens
  float squares[kWarps][kTokens];
  float scale[kTokens];
};

// Where the block is.
struct Place {
  int key_head, value_head, decay_head;
  int value;            // first value of the slice within its head
  int begin, count;     // the row's tokens in the step
  bool fresh;           // the row starts from a zero state
  const float* history; // the row's, [conv_width - 1, channels]
  int64_t channels;     // of one history entry
};

// Start the kernel with blocks of `slice` values of a head: 16, 32, 64 or 128.
void start_head_64(const DeltaMix& op, Context& context, int slice);
void start_head_128(const DeltaMix& op, Context& context, int slice);
void start_channel_64(const DeltaMix& op, Context& context, int slice);
void start_channel_128(const DeltaMix& op, Context& context, int slice);

// Barriers of the block; 0 is __syncthreads()'s.
constexpr int kPrepareBarrier = 1, kConsumeBarrier = 2, kFull = 3, kEmpty = 5;

}  // namespace weir::cuda::chunk
