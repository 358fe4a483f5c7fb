#pragma once
#include "kernels/swila_chunk_prepare.cuh"

// The warps that hold the state, 16 value dims of one mixture each with all keys, and bring the
// chain's factors.
namespace weir::cuda::swila_chunk {

template <class V>
struct StateWarp {
  static constexpr int kTiles = kDim / 8, kTokenTiles = kTokens / 8;
  const SwilaMix& op;
  const Place& place;
  Shared<V>& shared;
  int mixture, value;   // the warp's, of the slice
  int g, p;             // the lane's row and column of a fragment
  float S[kTiles][4];         // [value, key]
  float R[kTokenTiles][4];    // [value, token]
  float O[kTokenTiles][4];    // [value, token]

  __device__ StateWarp(const SwilaMix& op, const Place& place, Shared<V>& shared)
      : op(op), place(place), shared(shared), mixture(threadIdx.x / 32 % kMixtures),
        value(threadIdx.x / (32 * kMixtures) * 16), g(threadIdx.x % 32 / 4),
        p(threadIdx.x % 4 * 2) {}

  __device__ float* state_row(int half_row) const {
    const int64_t row = place.mixed(mixture, place.value + value + g + 8 * half_row);
    return at(op.state, place.slot) + row * kDim + p;
  }
  __device__ void load() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* const row = state_row(h);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 pair = place.fresh ? float2{0, 0} : load_pair(row + 8 * n);
        S[n][2 * h] = pair.x;
        S[n][2 * h + 1] = pair.y;
      }
    }
  }
  __device__ void store() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* const row = state_row(h);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        *reinterpret_cast<float2*>(row + 8 * n) = {S[n][2 * h], S[n][2 * h + 1]};
      }
    }
  }

  // R starts as v.
  __device__ void load_values(const Stage<V>& in) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        R[n][i] = in.v[(8 * n + p + i % 2) * V::kValuePitch + value + g + i / 2 * 8];
      }
    }
  }
  __device__ void store_tile(const float (&tile)[kTokenTiles][4], float* to) const {
    to += (p * V::kValues + value + g) * kMixtures;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int turned = (mixture + p + i % 2) % kMixtures;
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        to[((8 * n + i % 2) * V::kValues + i / 2 * 8) * kMixtures + turned] = tile[n][i];
      }
    }
  }

  // tile -= S x' for every token x.
  __device__ void subtract_recalled(float (&tile)[kTokenTiles][4], const half* x) const {
    const uint32_t rows = rows_of_b(x, kKeyPitch);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t state[4], b[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state[2 * h] = pack(-S[2 * i + h][0], -S[2 * i + h][1]);
        state[2 * h + 1] = pack(-S[2 * i + h][2], -S[2 * i + h][3]);
      }
      load_matrices(b, rows + 2 * 16 * i);
      multiply(tile[0], state, b[0], b[1]);
      multiply(tile[1], state, b[2], b[3]);
    }
  }

  __device__ int set() const { return V::kGated ? mixture : 0; }

  // S = S diag(decay) + U' K
  __device__ void advance(const Stage<V>& in, const uint32_t (&u)[4]) {
    if constexpr (V::kGated) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 by = load_pair(&in.decay[mixture][8 * n + p]);
        S[n][0] *= by.x;
        S[n][1] *= by.y;
        S[n][2] *= by.x;
        S[n][3] *= by.y;
      }
    }
    const uint32_t rows = rows_of_a(V::kGated ? in.end[mixture] : in.k[0], kKeyPitch);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t k[4];
      load_transposed(k, rows + 2 * 16 * i);
      multiply(S[2 * i], u, k[0], k[1]);
      multiply(S[2 * i + 1], u, k[2], k[3]);
    }
  }

  // O += U H'
  __device__ void answer(const Stage<V>& in, const uint32_t (&u)[4]) {
    uint32_t b[4];
    load_matrices(b, rows_of_b(in.asked[set()], kTokenPitch));
    multiply(O[0], u, b[0], b[1]);
    multiply(O[1], u, b[2], b[3]);
  }

  // The factors of one token and two neighbouring values are one thread's.
  static constexpr int kPairs = V::kValues / 2;
  __device__ int factor_token() const { return int(threadIdx.x) / kPairs; }
  __device__ int factor_value() const { return int(threadIdx.x) % kPairs * 2; }

  // Has the logits of a chunk brought.
  __device__ void fetch(int chunk) {
    const int t = chunk * kTokens + factor_token();
    if (t < place.count) {
      Factors<V>& to = shared.factors[chunk % 2];
      const int token = place.begin + t;
      const int64_t column = place.mixed(0, place.value + factor_value());
      const float* const router = at(op.key_router, token) + column;
      const float* const beta = at(op.beta, token) + column;
#pragma unroll
      for (int j = 0; j < kMixtures; ++j) {
        copy_pair(&to.router[8 * threadIdx.x + 2 * j], router + j * kDim);
        copy_pair(&to.beta[8 * threadIdx.x + 2 * j], beta + j * kDim);
      }
      if constexpr (V::kTemporal) {
        copy_pair(&to.keep[2 * threadIdx.x],
                  at(op.key_mix, token) + place.channel(place.value + factor_value()));
      }
    }
    copies_commit();
  }

  // Eight numbers [mixture][2] of this thread become [2][mixture], each by `change` of the four
  // mixtures of one value.
  template <typename Change>
  __device__ static void turn(float* eight, const Change& change) {
    float x[2][kMixtures];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 four = load4(eight + 4 * h);
      x[0][2 * h] = four.x;
      x[1][2 * h] = four.y;
      x[0][2 * h + 1] = four.z;
      x[1][2 * h + 1] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      change(i, x[i]);
      *reinterpret_cast<float4*>(eight + 4 * i) = {x[i][0], x[i][1], x[i][2], x[i][3]};
    }
  }

  // Turns the logits that this thread has fetched into factors. A token behind the row's end
  // changes nothing.
  __device__ void mix(int chunk) {
    copies_wait();
    Factors<V>& in = shared.factors[chunk % 2];
    const bool inside = chunk * kTokens + factor_token() < place.count;
    turn(&in.beta[8 * threadIdx.x], [&](int, float (&x)[kMixtures]) {
#pragma unroll
      for (int j = 0; j < kMixtures; ++j) x[j] = inside ? fast_sigmoid(x[j]) : 0.0f;
    });
    float* const keep = &in.keep[V::kTemporal ? 2 * threadIdx.x : 0];
    turn(&in.router[8 * threadIdx.x], [&](int i, float (&x)[kMixtures]) {
      float share = kLog2E;
      if constexpr (V::kTemporal) {
        softmax(x);
        share = fast_sigmoid(keep[i]);
        keep[i] = inside ? fast_sigmoid(-keep[i]) : 1.0f;
      }
#pragma unroll
      for (int j = 0; j < kMixtures; ++j) x[j] = inside ? x[j] * share : 0.0f;
    });
  }

  // R of a chunk that the preparing warps have handed over, and its factors, go to the chain.
  __device__ void ask(int chunk) {
    const Stage<V>& in = shared.stage[chunk % 2];
    load_values(in);
    subtract_recalled(R, in.k[set()]);
    store_tile(R, shared.recalled);
    arrive(kRecalled, V::kStates + V::kLanes);
  }
  __device__ void ask_answers(int chunk) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) O[n][i] = 0;
    }
    subtract_recalled(O, shared.stage[chunk % 2].q[set()]);
  }

  __device__ void run() {
    const int chunks = place.chunks();
    fetch(0);
    load();
    mix(0);
    if (chunks > 1) fetch(1);
    meet(kFull, V::kStates + V::kPreparers);
    ask(0);
    ask_answers(0);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      const bool more = c + 1 < chunks;
      if (more) {
        mix(c + 1);
        meet(kFull + (c + 1) % 2, V::kStates + V::kPreparers);
      }
      meet(kWritten, V::kStates + V::kLanes);
      uint32_t u[4];
      load_matrices(u, rows_of_a(&shared.u[(mixture * V::kValues + value) * kTokenPitch],
                                 kTokenPitch));
      const Stage<V>& in = shared.stage[c % 2];
      advance(in, u);
      if (more) ask(c + 1);
      if (c + 2 < chunks) fetch(c + 2);
      answer(in, u);
      if (c + 2 < chunks) arrive(kEmpty + c % 2, V::kStates + V::kPreparers);
      if (c > 0) meet(kMixed, V::kStates + V::kLanes);
      store_tile(O, shared.answers);
      arrive(kAnswered, V::kStates + V::kLanes);
      if (more) ask_answers(c + 1);
    }
    store();
  }
};

}  // namespace weir::cuda::swila_chunk
