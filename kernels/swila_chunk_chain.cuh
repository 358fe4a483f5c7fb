#pragma once
#include "kernels/swila_chunk_prepare.cuh"

// The warps with a thread for each value dim of the slice: the chain, where one token waits for the
// last, and what is done with the answers. Threads beyond the slice double its first ones and write
// nothing.
namespace weir::cuda::swila_chunk {

// r or rho of value d of the slice, as the row's last step has left it.
template <class V>
__device__ inline void begin_with(const SlotState& kept, const Place& place, int d,
                                  float (&last)[kMixtures]) {
#pragma unroll
  for (int j = 0; j < kMixtures; ++j) {
    last[j] = 1.0f / kMixtures;
    if constexpr (V::kTemporal) {
      if (!place.fresh) last[j] = at(kept, place.slot)[place.mixed(j, place.value + d)];
    }
  }
}
template <class V>
__device__ inline void leave(const SlotState& kept, const Place& place, int d,
                             const float (&last)[kMixtures]) {
  if constexpr (V::kTemporal) {
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) {
      at(kept, place.slot)[place.mixed(j, place.value + d)] = last[j];
    }
  }
}

template <class V>
struct Chain {
  static constexpr int kFour = 4;  // tokens that are one behind the other in registers
  using Tile = float[kFour][kMixtures];
  const SwilaMix& op;
  const Place& place;
  Shared<V>& shared;
  int thread = int(threadIdx.x) - V::kStates, d = thread % V::kValues;

  __device__ float* recalled(int t) const {
    return &shared.recalled[(t * V::kValues + d) * kMixtures];
  }
  // G of token t with the four from s on, for each mixture or for all.
  __device__ static void gram(const Stage<V>& in, int t, int s, float (&G)[V::kSets][kFour]) {
#pragma unroll
    for (int set = 0; set < V::kSets; ++set) {
      const float4 four = load4(&in.gram[set][t * kTokens + s]);
      G[set][0] = four.x;
      G[set][1] = four.y;
      G[set][2] = four.z;
      G[set][3] = four.w;
    }
  }
  __device__ static void take(float G, const float (&u)[kMixtures], int j,
                              float (&R)[kMixtures]) {
    R[j] = fmaf(-G, u[j], R[j]);
  }

  // The four tokens from t on lose what the four from s on have written.
  __device__ void lose(const Stage<V>& in, int t, int s, Tile& R) const {
    Tile u;
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      const float4 four = load4(recalled(s + i));
      u[i][0] = four.x;
      u[i][1] = four.y;
      u[i][2] = four.z;
      u[i][3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      float G[V::kSets][kFour];
      gram(in, t + i, s, G);
#pragma unroll
      for (int k = 0; k < kFour; ++k) {
#pragma unroll
        for (int j = 0; j < kMixtures; ++j) take(G[V::kGated ? j : 0][k], u[k], j, R[i]);
      }
    }
  }

  // r and beta r delta of one token from delta; a token's prior is mixed with r, the last one's.
  __device__ void switch_mixtures(const Factors<V>& in, int t, const float (&delta)[kMixtures],
                                  float (&r)[kMixtures], float (&u)[kMixtures]) const {
    const int at = t * V::kValues + d;
    const float4 router = load4(&in.router[at * kMixtures]);
    const float4 beta = load4(&in.beta[at * kMixtures]);
    const float share[4] = {router.x, router.y, router.z, router.w};
    float a[kMixtures], written[kMixtures] = {beta.x, beta.y, beta.z, beta.w};
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) {
      float log_prior = share[j];
      if constexpr (V::kTemporal) log_prior = __log2f(fmaf(in.keep[at], r[j], log_prior));
      a[j] = fmaf(-0.5f * kLog2E * delta[j], delta[j], log_prior);
      written[j] *= delta[j];
    }
    const float most = fmaxf(fmaxf(a[0], a[1]), fmaxf(a[2], a[3]));
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) a[j] = exp2_fast(a[j] - most);
    const float scale = reciprocal((a[0] + a[1]) + (a[2] + a[3]));
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) {
      r[j] = a[j] * scale;
      u[j] = a[j] * written[j] * scale;
    }
  }

  // The four tokens from t on, one after the other.
  __device__ void solve_four(const Stage<V>& in, const Factors<V>& factors, int t,
                             float (&r)[kMixtures]) const {
    Tile R, u;
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      const float4 four = load4(recalled(t + i));
      const float of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < kMixtures; ++j) R[i][j] = of[(j + i) % kMixtures];
    }
#pragma unroll 1
    for (int s = 0; s < t; s += kFour) lose(in, t, s, R);
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      float G[V::kSets][kFour];
      gram(in, t + i, t, G);
#pragma unroll
      for (int k = 0; k < i; ++k) {
#pragma unroll
        for (int j = 0; j < kMixtures; ++j) take(G[V::kGated ? j : 0][k], u[k], j, R[i]);
      }
      switch_mixtures(factors, t + i, R[i], r, u[i]);
      *reinterpret_cast<float4*>(recalled(t + i)) = {u[i][0], u[i][1], u[i][2], u[i][3]};
    }
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) {
      *reinterpret_cast<uint2*>(&shared.u[(j * V::kValues + d) * kTokenPitch + t]) = {
          pack(u[0][j], u[1][j]), pack(u[2][j], u[3][j])};
    }
  }

  __device__ void run() const {
    const int chunks = place.chunks();
    float r[kMixtures];
    begin_with<V>(op.posterior, place, d, r);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      meet(kRecalled, V::kStates + V::kLanes);
      if (thread < V::kValues) {
#pragma unroll 1
        for (int t = 0; t < kTokens; t += kFour) {
          solve_four(shared.stage[c % 2], shared.factors[c % 2], t, r);
        }
      }
      arrive(kWritten, V::kStates + V::kLanes);
    }
    if (thread < V::kValues) leave<V>(op.posterior, place, d, r);
  }
};

template <class V>
struct Finish {
  static constexpr int kFour = 4;  // tokens whose logits are under way while four are finished
  const SwilaMix& op;
  const Place& place;
  Shared<V>& shared;
  int thread = (int(threadIdx.x) - V::kStates) % 64, d = thread % V::kValues;

  struct Logits {
    float router[kFour][kMixtures], mix[kFour];
  };
  // Of the four tokens from t of the row on.
  __device__ void load(int t, Logits& to) const {
    const float* const router = op.query_router.data + place.mixed(0, place.value + d);
    const float* const mix = op.query_mix.data + place.channel(place.value + d);
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      const int64_t token = place.begin + min(t + i, place.count - 1);
#pragma unroll
      for (int j = 0; j < kMixtures; ++j) {
        to.router[i][j] = router[token * op.query_router.stride + j * kDim];
      }
      if (V::kTemporal) to.mix[i] = mix[token * op.query_mix.stride];
    }
  }

  // Logits become rho of each token; `last` is the rho of the one before.
  __device__ void priors(int t, float (&last)[kMixtures], Logits& x) const {
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      softmax(x.router[i]);
      if constexpr (V::kTemporal) {
        const bool inside = t + i < place.count;
        const float share = inside ? fast_sigmoid(x.mix[i]) : 0.0f;
        const float keep = inside ? fast_sigmoid(-x.mix[i]) : 1.0f;
#pragma unroll
        for (int j = 0; j < kMixtures; ++j) {
          last[j] = x.router[i][j] = fmaf(keep, last[j], share * x.router[i][j]);
        }
      }
    }
  }

  // The sums of squares over the warp's values of four tokens of the chunk from t on.
  __device__ void square(const float (&out)[kFour], int t, float* sums) const {
    float two[2];
    const int lane = thread % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = out[i] * out[i], high = out[i + 2] * out[i + 2];
      two[i] = (lane & 1 ? high : low) +
               __shfl_xor_sync(0xffffffffu, lane & 1 ? low : high, 1);
    }
    float sum = (lane & 2 ? two[1] : two[0]) +
                __shfl_xor_sync(0xffffffffu, lane & 2 ? two[0] : two[1], 2);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane < 4) sums[t + lane % 2 * 2 + lane / 2] = sum;
  }

  __device__ float& answer(int t) const {
    return shared.answers[(t * V::kValues + d) * kMixtures];
  }
  // Mixes the answers of four tokens of the chunk from t on.
  __device__ void mix(const Logits& rho, int t, float* sums) const {
    float out[kFour];
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      const float4 four = load4(&answer(t + i));
      const float of[4] = {four.x, four.y, four.z, four.w};
      out[i] = 0;
#pragma unroll
      for (int j = 0; j < kMixtures; ++j) {
        out[i] = fmaf(rho.router[i][j], of[(j + i) % kMixtures], out[i]);
      }
    }
    if constexpr (V::kValues == kDim) square(out, t, sums);
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      if (thread < V::kValues) answer(t + i) = out[i];
    }
  }

  // What has been mixed, normed where the block has all of the head's values.
  __device__ void write(int first, int turn, float weight) const {
    float* const out = op.out.data + place.channel(place.value + d);
    const int tokens = min(kTokens, place.count - first);
    if (V::kValues == kDim) meet(kFinishBarrier, V::kLanes);  // all squares are there
    if (thread >= V::kValues) return;
#pragma unroll 4
    for (int t = 0; t < tokens; ++t) {
      float scale = 1;
      if constexpr (V::kValues == kDim) {
        const float squares = shared.squares[turn][0][t] + shared.squares[turn][1][t];
        scale = weight * rsqrtf(squares / float(kDim) + op.norm_eps);
      }
      out[(place.begin + first + t) * op.out.stride] = answer(t) * scale;
    }
  }

  __device__ void run() const {
    const int chunks = place.chunks();
    const float weight = V::kValues == kDim ? op.norm_weight[d] : 1.0f;
    float last[kMixtures];
    begin_with<V>(op.prior, place, d, last);
    Logits next;
    load(0, next);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      const int first = c * kTokens;
#pragma unroll 1
      for (int t = 0; t < kTokens; t += kFour) {
        Logits rho = next;
        load(first + t + kFour, next);
        priors(first + t, last, rho);
        if (t == 0) meet(kAnswered, V::kStates + V::kLanes);
        mix(rho, t, shared.squares[c % 2][thread / 32]);
      }
      write(first, c % 2, weight);
      if (c + 1 < chunks) arrive(kMixed, V::kStates + V::kLanes);
    }
    if (thread < V::kValues) leave<V>(op.prior, place, d, last);
  }
};

}  // namespace weir::cuda::swila_chunk
