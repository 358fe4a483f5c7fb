#pragma once
#include "kernels/swila_chunk_layout.cuh"

// The warps that hold the state: 16 or 32 value dims of one mixture each, with all keys. Its sign
// is changed, as is that of what is written, of queries and of H, so that nothing is subtracted.
namespace weir::cuda::swila_chunk {

template <class V>
struct StateWarp {
  static constexpr int kTiles = V::kTiles, kKeyTiles = kDim / 8, kTokenTiles = kTokens / 8;
  // Registers for R of all tiles are too few: they are put, one at a time, where R will be.
  static constexpr bool kPark = kTiles > 1;
  static constexpr int kAtOnce = kTiles;
  using Answers = float[kTiles][kTokenTiles][4];  // [value, token]
  const SwilaMix& op;
  const Place& place;
  Shared<V>& shared;
  int mixture, value;   // the warp's, of the slice
  int g, p;             // the lane's row and column of a fragment
  float S[kTiles][kKeyTiles][4];  // -S, [value, key]

  __device__ StateWarp(const SwilaMix& op, const Place& place, Shared<V>& shared)
      : op(op), place(place), shared(shared), mixture(threadIdx.x / 32 % kMixtures),
        value(threadIdx.x / (32 * kMixtures) * 16 * kTiles), g(threadIdx.x % 32 / 4),
        p(threadIdx.x % 4 * 2) {}
  __device__ const Stage<V>& stage(int chunk) const { return shared.stage[chunk % V::kStages]; }
  __device__ int group() const { return value / 32; }
  __device__ int set() const { return V::kGated ? mixture : 0; }

  // Visits the lane's pairs of the state in memory.
  template <typename Visit>
  __device__ void each_pair(const Visit& visit) {
    float* const row = at(op.state, place.slot) +
                       place.mixed(mixture, place.value + value + g) * kDim + p;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          visit(*reinterpret_cast<float2*>(row + (16 * m + 8 * h) * kDim + 8 * n),
                S[m][n][2 * h], S[m][n][2 * h + 1]);
        }
      }
    }
  }
  __device__ void load() {
    each_pair([&](const float2& from, float& low, float& high) {
      const float2 pair = place.fresh ? float2{0, 0} : from;
      low = -pair.x;
      high = -pair.y;
    });
  }
  __device__ void store() {
    each_pair([](float2& to, float low, float high) { to = {-low, -high}; });
  }

  // R of kCount tiles from m on starts as v.
  template <int kCount>
  __device__ void load_values(Answers& R, int m) const {
    const float* const from = &shared.v[p * V::kValuePitch + value + g];
#pragma unroll
    for (const int end = m + kCount; m < end; ++m) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          R[m][n][i] = from[(8 * n + i % 2) * V::kValuePitch + 16 * m + i / 2 * 8];
        }
      }
    }
  }
  // Visits the lane's numbers of kCount tiles from m on where they are in [token][value][mixture].
  template <int kCount, class Numbers, typename Visit>
  __device__ void each_place(Numbers& of, int m, const Visit& visit) const {
    float* const to = &shared.recalled[(p * V::kValues + value + g) * kMixtures];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = turned(mixture, p + i % 2);
#pragma unroll
      for (int k = m; k < m + kCount; ++k) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          visit(to[((8 * n + i % 2) * V::kValues + 16 * k + i / 2 * 8) * kMixtures + at],
                of[k][n][i]);
        }
      }
    }
  }
  template <int kCount>
  __device__ void put(const Answers& from, int m) const {
    each_place<kCount>(from, m, [](float& to, float x) { to = x; });
  }
  template <int kCount>
  __device__ void get(Answers& to, int m) const {
    each_place<kCount>(to, m, [](float from, float& x) { x = from; });
  }

  // sum += -S x' for every token x, of kCount tiles from `first` on.
  template <int kCount>
  __device__ void add_recalled(Answers& sum, const half* x, int first) const {
    const uint32_t rows = rows_of_b(x, kKeyPitch);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t b[4];
      load_matrices(b, rows + 2 * 16 * i);
#pragma unroll
      for (int m = first; m < first + kCount; ++m) {
        uint32_t state[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float(&tile)[4] = S[m][2 * i + h];
          state[2 * h] = pack(tile[0], tile[1]);
          state[2 * h + 1] = pack(tile[2], tile[3]);
        }
        multiply(sum[m][0], state, b[0], b[1]);
        multiply(sum[m][1], state, b[2], b[3]);
      }
    }
  }
  __device__ void ask_answers(const Stage<V>& in, Answers& O) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i) O[m][i / 4][i % 4] = 0;
    }
    add_recalled<kTiles>(O, in.q[set()], 0);
  }

  // R = v - S k of a chunk, with the state as it is.
  __device__ void ask(Answers& R, int chunk) const {
    const Stage<V>& in = stage(chunk);
    sleep_for(&shared.full[chunk % V::kStages], chunk / V::kStages);
#pragma unroll
    for (int m = 0; m < kTiles; m += kAtOnce) {
      load_values<kAtOnce>(R, m);
      add_recalled<kAtOnce>(R, in.k[set()], m);
      if constexpr (kPark) put<kAtOnce>(R, m);
    }
    warp_arrive(&shared.v_empty);
  }
  // <k_t, k_s> of the next chunk's tokens t and this one's s, decayed: a B [s, t] for each eight.
  __device__ void cross(const Stage<V>& in, const Stage<V>& next, uint32_t (&x)[4]) const {
    float sum[2][4] = {};
    product(next.k[set()], V::kGated ? in.end[mixture] : in.k[0], sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = pack(sum[i % 2][i / 2 * 2], sum[i % 2][i / 2 * 2 + 1]);
  }

  using Written = uint32_t[kTiles][4];
  __device__ void load_written(Written& u) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      load_transposed(u[m], rows_of_b(&shared.u[mixture][value + 16 * m], V::kWrittenPitch));
    }
  }
  // R of the next chunk loses what this one's tokens have written, and goes to the chain.
  __device__ void hand_over(Answers& R, const Written& u, const uint32_t (&x)[4]) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (kPark) get<1>(R, m);
      multiply(R[m][0], u[m], x[0], x[1]);
      multiply(R[m][1], u[m], x[2], x[3]);
      put<1>(R, m);
    }
    arrive(kRecalled + group(), V::kOfGroup);
  }
  // S = S diag(decay)
  __device__ void decay(const Stage<V>& in) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float2 by = load_pair(&in.decay[mixture][8 * n + p]);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) S[m][n][i] *= i % 2 == 0 ? by.x : by.y;
      }
    }
  }
  // -S += -U' K
  __device__ void advance(const Stage<V>& in, const Written& u) {
    const uint32_t rows = rows_of_a(V::kGated ? in.end[mixture] : in.k[0], kKeyPitch);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t k[4];
      load_transposed(k, rows + 2 * 16 * i);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply(S[m][2 * i], u[m], k[0], k[1]);
        multiply(S[m][2 * i + 1], u[m], k[2], k[3]);
      }
    }
  }
  // O += -U (-H)'
  __device__ void answer(const Stage<V>& in, const Written& u, Answers& O) const {
    uint32_t b[4];
    load_matrices(b, rows_of_b(in.asked[set()], kTokenPitch));
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      multiply(O[m][0], u[m], b[0], b[1]);
      multiply(O[m][1], u[m], b[2], b[3]);
    }
  }

  // Gated, they are computed anew: all of a chunk's are more than there are registers.
  __device__ void forget_addresses() {
    if constexpr (V::kGated) asm volatile("" : "+r"(mixture), "+r"(value), "+r"(g), "+r"(p));
  }

  // While the chain is with a chunk, the next one's R is made of the state before it, and of what
  // its tokens have in common; what is left to do once u is there is one product.
  __device__ void run() {
    const int chunks = place.chunks();
    Answers R, O;
    load();
    ask(R, 0);
    if constexpr (!kPark) put<kTiles>(R, 0);
    arrive(kRecalled + group(), V::kOfGroup);
    ask_answers(stage(0), O);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      const bool more = c + 1 < chunks;
      const Stage<V>& in = stage(c);
      forget_addresses();
      uint32_t x[4];
      Written u;
      if constexpr (V::kGated) decay(in);
      if (c > 0) sleep_for(&shared.mixed, c - 1);  // the last answers, where R will be
      if (more) {
        ask(R, c + 1);
        cross(in, stage(c + 1), x);
      }
      meet(kWritten + group(), V::kOfGroup);
      forget_addresses();
      load_written(u);
      if (more) hand_over(R, u, x);
      advance(in, u);
      answer(in, u, O);
      warp_arrive(&shared.empty[c % V::kStages]);
      sleep_for(&shared.taken[group()], more ? c + 1 : c);
      put<kTiles>(O, 0);
      warp_arrive(&shared.answered);
      if (more) ask_answers(stage(c + 1), O);
    }
    store();
  }
};

}  // namespace weir::cuda::swila_chunk
