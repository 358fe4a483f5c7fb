#pragma once
#include "kernels/async_cuda.cuh"
#include "kernels/swila_mix_cuda.cuh"

namespace weir::cuda::swila {

// Rows of several tokens. The state stays in registers through the whole row; eight tokens at a
// time have their inputs brought to shared memory, while the eight before are computed, and are
// prepared there: within such a tile no warp waits for another, as a warp has all mixtures of its
// value dims. A token's arithmetic is that of a row of one.
//
// Floor, of a head and token with J = 4, D = 64: 192 multiply-adds of 256 rows, 384 cycles of a
// multiprocessor.

template <class L, bool kGated>
struct Tile {
  static constexpr int kTokens = 8, kMixed = L::J * L::D;
  alignas(16) float vectors[kTokens * 3 * L::D];  // q, k, v: as they are, then activated
  float key_router[kTokens * kMixed], query_router[kTokens * kMixed], beta[kTokens * kMixed];
  float key_mix[kTokens * L::D], query_mix[kTokens * L::D];
  float decay[kGated ? kTokens * kMixed : 4];     // the logits, then exp(g)
};

template <class L, bool kGated>
struct RowShared {
  static constexpr int kTokens = Tile<L, kGated>::kTokens;
  Tile<L, kGated> tile[2];
  float squares[kTokens][L::kWarps];  // of each warp's outputs
  float out[kTokens][L::D];
};

template <class L, bool kGated>
struct RowRunner {
  using T = Tile<L, kGated>;
  const SwilaMix& op;
  const Place& place;
  RowShared<L, kGated>& shared;

  __device__ bool temporal() const { return op.key_mix.data != nullptr; }

  // `dim` columns of `tokens` tokens from token t of the row on.
  __device__ void bring(float* to, int pitch, const Acts& acts, int64_t column, int dim, int t,
                        int tokens) const {
    if (acts.data == nullptr) return;
    for (int i = threadIdx.x; i < tokens * dim / 4; i += L::kThreads) {
      const int token = i / (dim / 4), c = i % (dim / 4) * 4;
      copy_16_bytes(to + token * pitch + c, at(acts, place.begin + t + token) + column + c);
    }
  }
  __device__ void fetch(T& to, int t, int tokens) const {
    const int64_t channel = int64_t(place.head) * L::D, mixed = channel * L::J;
    bring(to.vectors, 3 * L::D, op.q, channel, L::D, t, tokens);
    bring(to.vectors + L::D, 3 * L::D, op.k, channel, L::D, t, tokens);
    bring(to.vectors + 2 * L::D, 3 * L::D, op.v, channel, L::D, t, tokens);
    bring(to.key_router, T::kMixed, op.key_router, mixed, T::kMixed, t, tokens);
    bring(to.query_router, T::kMixed, op.query_router, mixed, T::kMixed, t, tokens);
    bring(to.beta, T::kMixed, op.beta, mixed, T::kMixed, t, tokens);
    bring(to.key_mix, L::D, op.key_mix, channel, L::D, t, tokens);
    bring(to.query_mix, L::D, op.query_mix, channel, L::D, t, tokens);
    if constexpr (kGated) bring(to.decay, T::kMixed, op.decay_in, mixed, T::kMixed, t, tokens);
    copies_commit();
  }

  // Each thread has channels of its own, and one decay.
  __device__ void prepare(T& tile, int tokens, Channel* own) const {
#pragma unroll
    for (int u = 0; u < L::kOwn; ++u) {
      const int i = threadIdx.x + u * L::kThreads;
      if (i >= 3 * L::D) continue;
      for (int t = 0; t < tokens; ++t) {
        float& x = tile.vectors[t * 3 * L::D + i];
        x = own[u].push(x);
      }
    }
    if constexpr (kGated) {
      const int64_t i = int64_t(place.head) * T::kMixed + threadIdx.x;
      const float a = op.decay_a[place.head * L::J + int(threadIdx.x) / L::D];
      const float shift = op.dt_bias[i];
      for (int t = 0; t < tokens; ++t) {
        float& x = tile.decay[t * T::kMixed + threadIdx.x];
        x = expf(-a * softplus(x + shift));
      }
    }
  }

  __device__ Logits logits(const T& tile, int t) const {
    const int mixed = t * T::kMixed + place.mixture * L::D + place.value;
    Logits in{.key_router = tile.key_router[mixed], .query_router = tile.query_router[mixed],
              .beta = tile.beta[mixed]};
    if (temporal()) {
      in.key_mix = tile.key_mix[t * L::D + place.value];
      in.query_mix = tile.query_mix[t * L::D + place.value];
    }
    return in;
  }

  __device__ void token(const T& tile, int t, State<L>& state, Mixed& mine) const {
    mix<L>(logits(tile, t), temporal(), mine);
    const float answer = state.template step<kGated>(
        tile.vectors + t * 3 * L::D, kGated ? tile.decay + t * T::kMixed : nullptr, mine);
    const float out = sum_over_groups<L::kLanes>(answer * mine.prior);
    const float squares = sum_over_lanes<L::kLanes>(out * out);
    if (threadIdx.x % 32 == 0) shared.squares[t][threadIdx.x / 32] = squares;
    if (place.mixture == 0) shared.out[t][place.value] = out;
  }

  // Normalises and writes the outputs of a tile.
  __device__ void write(int first, int tokens) const {
    for (int i = threadIdx.x; i < tokens * L::D; i += L::kThreads) {
      const int t = i / L::D, d = i % L::D;
      float all = 0;
#pragma unroll
      for (int w = 0; w < L::kWarps; ++w) all += shared.squares[t][w];
      at(op.out, place.begin + first + t)[place.head * L::D + d] =
          shared.out[t][d] * op.norm_weight[d] / sqrtf(all / float(L::D) + op.norm_eps);
    }
  }

  __device__ void run(int count, State<L>& state, Mixed& mine, Channel* own) const {
    fetch(shared.tile[0], 0, min(T::kTokens, count));
#pragma unroll 1
    for (int first = 0; first < count; first += T::kTokens) {
      T& tile = shared.tile[first / T::kTokens % 2];
      const int tokens = min(T::kTokens, count - first), next = first + T::kTokens;
      copies_wait();
      __syncthreads();  // the tile is there, and the last one has been read
      if (next < count) {
        fetch(shared.tile[next / T::kTokens % 2], next, min(T::kTokens, count - next));
      }
      prepare(tile, tokens, own);
      __syncthreads();  // the tile is prepared
#pragma unroll 1
      for (int t = 0; t < tokens; ++t) token(tile, t, state, mine);
      __syncthreads();  // its outputs are there
      write(first, tokens);
    }
  }
};

}  // namespace weir::cuda::swila
