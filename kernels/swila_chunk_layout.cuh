#pragma once
#include "kernels/chunk_math_cuda.cuh"
#include "kernels/swila_chunk_cuda.cuh"
#include "kernels/tensor_core.cuh"
#include "kernels/warp_barrier_cuda.cuh"
#include "kernels/wgmma_cuda.cuh"

namespace weir::cuda::swila_chunk {

// SwilaMix over rows of many tokens, in the exact blocked form of swila_chunk.h: one block per
// (head, slice of its value dims, row), which takes 16 tokens at a time. The copy engine brings
// inputs, and four kinds of warps pass a chunk on:
//   convolve  queries, keys and values; the products between tokens, G and H. Gated: decays, keys
//             and queries decayed, G and H of each mixture
//   state     hold S, 16 or 32 value dims of one mixture a warp, in registers through the whole
//             row: R = v - S k of every token, S += U k', answers S q + H U
//   chain     two threads a value dim, two mixtures each, with the chunk's R in registers: r and u
//             of one token after the other; what a token writes is taken out of R of those after it
//   helpers   make factors of the chain's logits a chunk ahead; mix the answers with rho, norm and
//             write them
// Only state -> chain -> state is a loop; the rest runs beside it, a chunk ahead or behind.
//
// Floor, plain, of a head and token: 4 KB, 220 cycles of a multiprocessor's share of a copy; 27
// products of 2,048 (35 cycles); the loop takes about 140 cycles a token by latency alone.

constexpr int kTokens = 16;             // of a chunk
constexpr int kMixtures = 4, kDim = 64;  // the sizes that are served
constexpr int kWidth = 4;               // of the convolution
constexpr int kRawTokens = kTokens + kWidth - 1;  // with the convolution's past

constexpr int kKeyPitch = kDim + 8, kTokenPitch = kTokens + 8;  // of halves
// Of G; the sets that neighbouring threads read lie in other banks.
constexpr int kGramSize = (kTokens - 1) * kTokens + 4;

// What the block is made for: kValues of the head's value dims, 16, 32 or 64.
template <bool gated, bool temporal, int values>
struct Variant {
  static constexpr bool kGated = gated, kTemporal = temporal;
  static constexpr int kValues = values;
  static constexpr int kSets = gated ? kMixtures : 1;  // of decayed keys
  // Warps of each kind, in this order; the chain's are four, of which some may have nothing to do.
  static constexpr int kTiles = values == 64 ? 2 : 1;  // of 16 values, of a state's warp
  static constexpr int kHolders = kMixtures * values / (16 * kTiles);
  static constexpr int kChains = values / 16, kHelpers = values == 64 ? 8 : 4;
  static constexpr int kConvolvers = gated ? 8 : 4;
  static constexpr int kFirstChain = kHolders, kFirstHelper = kFirstChain + 4;
  static constexpr int kFirstConvolver = kFirstHelper + kHelpers;
  static constexpr int kThreads = 32 * (kFirstConvolver + kConvolvers);
  // The chain and the state pass on 32 values together.
  static constexpr int kGroups = (values + 31) / 32;
  static constexpr int kOfGroup = 32 * (kHolders + kChains) / kGroups;  // threads
  static constexpr int kStages = gated ? 2 : 3;
  static constexpr int kValuePitch = values + 4, kWrittenPitch = values + 8;
  static constexpr int kMixed = kTokens * values * kMixtures;
};

// What is prepared of a chunk.
template <class V>
struct Stage {
  // Keys, and queries with their sign changed; gated: for each mixture, times exp(L).
  alignas(16) half k[V::kSets][kTokens * kKeyPitch];
  alignas(16) half q[V::kSets][kTokens * kKeyPitch];
  alignas(16) half end[V::kGated ? kMixtures : 1][V::kGated ? kTokens * kKeyPitch : 8];  // until
  alignas(16) float gram[V::kSets][kGramSize];  // G: of token s + n with s at [s][n]
  alignas(16) half asked[V::kSets][kTokens * kTokenPitch];    // -H, [t][s], zeros for s > t
  alignas(16) float decay[V::kGated ? kMixtures : 1][V::kGated ? kDim : 4];  // by the chunk
};

template <class V>
struct Shared {
  // What the copy engine brings: projections from three tokens before the chunk on, and logits,
  // [token][mixture][value]. Those of the chain become factors where they lie, see factors_of().
  alignas(128) float raw[2][kRawTokens * kDim];       // queries, keys
  alignas(128) float raw_v[kRawTokens * V::kValues];
  struct Keys {
    alignas(128) float router[V::kMixed];
    alignas(128) float beta[V::kMixed];
  };
  Keys keys[2];
  alignas(128) float query_router[V::kMixed];
  static constexpr int kMix = V::kTemporal ? kTokens * V::kValues : 32;
  alignas(128) float key_mix[kMix];
  alignas(128) float query_mix[kMix];

  Stage<V> stage[V::kStages];
  alignas(16) float v[kTokens * V::kValuePitch];
  // R, later the answers: [token][value][mixture], mixture j of token t in place turned(j, t).
  alignas(16) float recalled[V::kMixed];
  // -u, [token][value]; the mixtures that neighbouring threads write lie in other banks.
  alignas(16) half u[kMixtures][kTokens * V::kWrittenPitch + 8];
  alignas(16) float key_taps[2][kWidth][kDim];                // of queries and keys
  alignas(16) float value_taps[kWidth][V::kValues];
  // Gated only: the gates' logits as the copy engine brings them, [token][channel], which become
  // the log decays' sums, see Gates; keys and queries before any decay, the queries' sign changed;
  // what each half of the chunk leaves of a channel.
  alignas(128) float logs[V::kGated ? kMixtures : 1][V::kGated ? kTokens * kDim : 4];
  alignas(16) half plain_k[V::kGated ? kTokens * kKeyPitch : 8];
  alignas(16) half plain_q[V::kGated ? kTokens * kKeyPitch : 8];
  alignas(16) float kept[2][V::kGated ? kMixtures : 1][V::kGated ? kDim : 4];

  // Barriers: there, and read.
  uint64_t raw_full[3], keys_full[2], query_full;   // by the copy engine
  uint64_t keys_ready[2], v_empty, full[V::kStages], empty[V::kStages];
  uint64_t taken[V::kGroups];                       // R is in the chain's registers
  uint64_t answered, mixed;
  uint64_t logits_full[kMixtures], plain_full, plain_empty;  // gated only

  __device__ void init() {
    const auto init = [](uint64_t& one, int arrivals) {
      barrier_init(shared_address(&one), uint32_t(arrivals));
    };
    for (uint64_t& one : raw_full) init(one, 1);
    for (int i = 0; i < 2; ++i) {
      init(keys_full[i], 1);
      init(keys_ready[i], V::kHelpers);
    }
    for (uint64_t& one : full) init(one, V::kConvolvers);
    for (uint64_t& one : empty) init(one, V::kHolders);
    init(query_full, 1);
    init(v_empty, V::kHolders);
    for (uint64_t& one : taken) init(one, V::kChains / V::kGroups);
    init(answered, V::kHolders);
    init(mixed, V::kHelpers);
    for (uint64_t& one : logits_full) init(one, 1);
    init(plain_full, V::kConvolvers);
    init(plain_empty, V::kConvolvers);
    barrier_init_done();
  }
};

// Where the chain's factors of the first token, value d and two mixtures from 2 half on lie: prior
// and beta of each, side by side. Where the router's and beta's logits of the token were there is
// room for one half of the values each. Of eight neighbouring values no two lie in the same banks.
template <class V>
__device__ inline float* factors_of(typename Shared<V>::Keys& keys, int d, int half) {
  constexpr int kHalf = V::kValues / 2;
  float* const at = d < kHalf ? keys.router : keys.beta;
  return at + d % kHalf * 2 * kMixtures + (half ^ (d >> 2 & 1)) * kMixtures;
}

// Has the copy engine bring a box; the barrier was told to expect it. Coordinates: innermost first.
template <typename... Coordinates>
__device__ inline void bring_box(float* to, const CUtensorMap& map, uint32_t full,
                                 Coordinates... from) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  copy_box(shared_address(to), map, from..., full, kReadOnce);
#endif
}

// Boxes of the inputs: of projections kRawTokens tokens and a head's (values: the slice's)
// channels; of logits the slice's values of all mixtures and kTokens tokens, of gates all key dims
// of one mixture.
struct Maps {
  CUtensorMap raw[3], key_router, beta, query_router, key_mix, query_mix, gates;
};

// Where the block is.
struct Place {
  int head, value;      // the slice's first value within its head
  int begin, count;     // the row's tokens in the step
  bool fresh;           // the row starts from a zero state
  int oldest;           // the ring's row that its first input replaces
  Slot slot;

  __device__ int chunks() const { return (count + kTokens - 1) / kTokens; }
  // The number of (mixture, value or key dim) among all of the mixer's.
  __device__ int64_t mixed(int mixture, int dim) const {
    return (int64_t(head) * kMixtures + mixture) * kDim + dim;
  }
  __device__ int64_t channel(int dim) const { return int64_t(head) * kDim + dim; }
};

// Of four neighbouring tokens pairs the mixtures lie in other banks.
__device__ constexpr int turned(int mixture, int t) { return mixture ^ (t & 2) ^ (t >> 2 & 1); }

// Named barriers; 0 is __syncthreads()'s. The first two have one for each group of values, kPaired
// and kHanded one for each mixture.
constexpr int kRecalled = 1, kWritten = 3, kConvolved = 5, kHelped = 6, kPaired = 7, kHanded = 11,
              kFinished = 15;

// Until the state needs no more of what lay where chunk n will.
template <class V>
__device__ inline void await_stage(const Shared<V>& shared, int n) {
  if (n >= V::kStages) sleep_for(&shared.empty[n % V::kStages], n / V::kStages - 1);
}

__device__ inline float2 load_pair(const float* from) {
  return *reinterpret_cast<const float2*>(from);
}

__device__ inline float2 load_halves(const half* from) {
  return unpack(*reinterpret_cast<const uint32_t*>(from));
}

// x becomes softmax(x) times `by`.
__device__ inline void softmax(float (&x)[kMixtures], float by = 1) {
  const float most = kLog2E * fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
#pragma unroll
  for (int j = 0; j < kMixtures; ++j) x[j] = exp2_fast(fmaf(kLog2E, x[j], -most));
  const float scale = by * reciprocal((x[0] + x[1]) + (x[2] + x[3]));
#pragma unroll
  for (int j = 0; j < kMixtures; ++j) x[j] *= scale;
}

// sum += A B' of 16 tokens' queries or keys each.
__device__ inline void product(const half* left, const half* right, float (&sum)[2][4]) {
  const uint32_t rows = rows_of_a(left, kKeyPitch), columns = rows_of_b(right, kKeyPitch);
#pragma unroll
  for (int i = 0; i < kDim; i += 16) {
    uint32_t a[4], b[4];
    load_matrices(a, rows + 2 * i);
    load_matrices(b, columns + 2 * i);
    multiply(sum[0], a, b[0], b[1]);
    multiply(sum[1], a, b[2], b[3]);
  }
}

}  // namespace weir::cuda::swila_chunk
