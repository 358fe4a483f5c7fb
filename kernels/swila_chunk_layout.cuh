#pragma once
#include "kernels/swila_chunk_cuda.cuh"
#include "kernels/tensor_core.cuh"

namespace weir::cuda::swila_chunk {

// SwilaMix over rows of many tokens, in the exact blocked form of swila_chunk.h: one block per
// (head, slice of its value dims, row), which takes 16 tokens at a time. Four kinds of warps pass a
// chunk on:
//   prepare  convolve, norm and decay queries, keys and values; the products between tokens, G, H
//   state    hold S, 16 value dims of one mixture a warp, in registers through the whole row:
//            R = v - S k of every token, S += U k', answers S q + H U. They also bring the
//            logits of the chain's factors and turn them into those.
//   chain    one thread a value dim, all its mixtures: r and u of one token after the other, four
//            at a time: what earlier fours have left is taken out of R at once
//   finish   one thread a value dim: mixes the answers with rho, norms and writes them
// Only state -> chain -> state is a loop; the rest runs beside it.
//
// Loops are short on purpose: what a quarter of the multiprocessor does not keep of the four kinds'
// code comes at eight instructions in 50 to 90 cycles.
//
// Floor, plain, of a head and token: 4 KB, 220 cycles of a multiprocessor's share of a copy; 27
// products of 2,048 (35 cycles); the loop takes about 100 cycles a token by latency alone.

constexpr int kTokens = 16;             // of a chunk
constexpr int kMixtures = 4, kDim = 64;  // the sizes that are served
constexpr int kWidth = 4;               // of the convolution

constexpr int kKeyPitch = kDim + 8, kTokenPitch = kTokens + 8;  // of halves
constexpr int kLogPitch = kDim + 8;

// What the block is made for: kValues of the head's value dims, 16, 32 or 64.
template <bool gated, bool temporal, int values>
struct Variant {
  static constexpr bool kGated = gated, kTemporal = temporal;
  static constexpr int kValues = values;
  static constexpr int kSets = gated ? kMixtures : 1;   // of decayed keys
  static constexpr int kLanes = (values + 31) / 32 * 32;  // threads of the chain; of finish
  // Threads of each kind, in this order; chain and finish share 128.
  static constexpr int kStates = 8 * values, kPreparers = gated ? 256 : 128;
  static constexpr int kThreads = kStates + 128 + kPreparers;
  static constexpr int kValuePitch = values + 4;
  static constexpr int kMixed = kTokens * values * kMixtures;
};

// What the preparing warps make of a chunk.
template <class V>
struct Stage {
  // Keys, and queries with their sign changed; gated: for each mixture, times exp(L).
  half k[V::kSets][kTokens * kKeyPitch];
  half q[V::kSets][kTokens * kKeyPitch];
  half end[V::kGated ? kMixtures : 1][V::kGated ? kTokens * kKeyPitch : 8];  // k exp(last L - L)
  float v[kTokens * V::kValuePitch];
  float gram[V::kSets][kTokens * kTokens];      // G, [t][s], for s < t
  half asked[V::kSets][kTokens * kTokenPitch];  // H, [t][s], zeros for s > t
  float decay[V::kGated ? kMixtures : 1][V::kGated ? kDim : 4];  // of the state, by the chunk
};

// The chain's factors of a chunk: first logits, [token][value / 2][mixture][2], then what they
// stand for, [token][value][mixture].
template <class V>
struct Factors {
  // log2 of the prior but for a constant; temporal: the router's part of the prior.
  alignas(16) float router[V::kMixed];
  float beta[V::kMixed];
  float keep[V::kTemporal ? kTokens * V::kValues : 4];  // of the last posterior, in the prior
};

template <class V>
struct Shared {
  Stage<V> stage[2];
  Factors<V> factors[2];
  // [token][value][mixture], the four mixtures of token t turned by t: R, which the chain replaces
  // by u, not turned; the answers, whose first the finish replaces by their mixture.
  float recalled[V::kMixed];
  float answers[V::kMixed];
  half u[kMixtures * V::kValues * kTokenPitch];  // [mixture][value][token]
  float squares[2][V::kLanes / 32][kTokens];
  float key_taps[2][kWidth][kDim];               // of queries and keys
  float value_taps[kWidth][V::kValues];
  // Gated only: keys and queries before any decay, <q_t, k_t>, and L in powers of two.
  half plain_k[V::kGated ? kTokens * kKeyPitch : 8];
  half plain_q[V::kGated ? kTokens * kKeyPitch : 8];
  float diagonal[kTokens];
  float logs[V::kGated ? kMixtures : 1][V::kGated ? kTokens * kLogPitch : 4];
};

// Where the block is.
struct Place {
  int head, value;      // the slice's first value within its head
  int begin, count;     // the row's tokens in the step
  bool fresh;           // the row starts from a zero state
  Slot slot;

  __device__ int chunks() const { return (count + kTokens - 1) / kTokens; }
  // The number of (mixture, value or key dim) among all of the mixer's.
  __device__ int64_t mixed(int mixture, int dim) const {
    return (int64_t(head) * kMixtures + mixture) * kDim + dim;
  }
  __device__ int64_t channel(int dim) const { return int64_t(head) * kDim + dim; }
};

// Barriers of the block; 0 is __syncthreads()'s. Those of two stages are two each.
constexpr int kPrepareBarrier = 1, kFinishBarrier = 2, kFull = 3, kEmpty = 5, kRecalled = 7,
              kWritten = 8, kAnswered = 9, kMixed = 10;

constexpr float kLog2E = 1.4426950408889634f;

__device__ inline float reciprocal(float x) { return __fdividef(1.0f, x); }
__device__ inline float fast_sigmoid(float x) {
  return reciprocal(1.0f + exp2_fast(-kLog2E * x));
}
// x becomes softmax(x).
__device__ inline void softmax(float (&x)[kMixtures]) {
  const float most = kLog2E * fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
#pragma unroll
  for (int j = 0; j < kMixtures; ++j) x[j] = exp2_fast(fmaf(kLog2E, x[j], -most));
  const float scale = reciprocal((x[0] + x[1]) + (x[2] + x[3]));
#pragma unroll
  for (int j = 0; j < kMixtures; ++j) x[j] *= scale;
}

// What lane l gives load_matrices() for a fragment whose first number is at `at`.
__device__ inline uint32_t rows_of_a(const half* at, int pitch) {
  const int lane = threadIdx.x % 32;
  return shared_address(at + (lane % 16) * pitch + lane / 16 * 8);
}
// Of two neighbouring B whose columns are rows in memory.
__device__ inline uint32_t rows_of_b(const half* at, int pitch) {
  const int lane = threadIdx.x % 32;
  return shared_address(at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}

}  // namespace weir::cuda::swila_chunk
