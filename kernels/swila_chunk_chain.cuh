#pragma once
#include "kernels/swila_chunk_layout.cuh"

// The warps where one token waits for the last: two neighbouring threads have a value dim, each two
// mixtures of it.
namespace weir::cuda::swila_chunk {

// r or rho of value d of the slice and a mixture, as the row's last step has left it.
template <class V>
__device__ inline float begin_with(const SlotState& kept, const Place& place, int j, int d) {
  if (!V::kTemporal || place.fresh) return 1.0f / kMixtures;
  return at(kept, place.slot)[place.mixed(j, place.value + d)];
}

// Factors of a token: -beta, and `prior`, log2 of the router's prior but for a constant. Temporal:
// the router's prior times gk / (1 - gk), so that the prior is r + prior but for a constant.
template <class V>
struct Chain {
  static constexpr int kOwn = kMixtures / 2;
  using Two = float[kOwn];
  const SwilaMix& op;
  const Place& place;
  Shared<V>& shared;
  int warp = int(threadIdx.x) / 32 - V::kFirstChain, group = warp / 2;
  int d = warp * 16 + int(threadIdx.x) % 32 / 2;        // of the slice
  int first = int(threadIdx.x) % 2 * kOwn;              // of the mixtures

  struct Factors {
    Two prior, beta;
  };
  // From where factors_of() says.
  __device__ static void load(const float* first_token, int t, Factors& to) {
    const float4 four = load4(first_token + t * kMixtures * V::kValues);
    to.prior[0] = four.x;
    to.prior[1] = four.y;
    to.beta[0] = four.z;
    to.beta[1] = four.w;
  }

  __device__ static float sum_of_both(const Two& x) {
    const float sum = x[0] + x[1];
    return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
  }
  // Each e[j] less the largest of all mixtures'.
  __device__ static void take_largest(Two& e) {
    float most = fmaxf(e[0], e[1]);
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
#pragma unroll
    for (int j = 0; j < kOwn; ++j) e[j] -= most;
  }
  // a = 2^e weight, e <= 0; one over their sum over all mixtures. Weights sum to about one or more
  // and are below 2^59: what is lost below the smallest number, 2^-126, is nothing to a sum of
  // 2^-44. Where it is less, the largest e is exchanged too, and taken off; there a weight below
  // the smallest number counts for nothing, so that the sum is one above it.
  __device__ static float weigh(const Two& e, const Two& weight, Two& a) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) a[j] = exp2_fast(e[j]) * weight[j];
    const float sum = sum_of_both(a);
    float scale = reciprocal(sum);
    asm volatile("" : "+f"(scale));  // before the branch
    constexpr float kLeast = 5.7e-14f;
    if (__any_sync(0xffffffffu, sum < kLeast)) {
      Two less;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) less[j] = weight[j] < 1.2e-38f ? -INFINITY : e[j];
      take_largest(less);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) a[j] = exp2_fast(less[j]) * weight[j];
      scale = reciprocal(sum_of_both(a));
    }
    return scale;
  }

  // r, and -u, u = beta r delta, of one token from delta; r is the last one's before.
  __device__ static void switch_mixtures(const Factors& in, const Two& delta, Two& r, Two& u) {
    Two e, a;
    float scale;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const float half_delta = -0.5f * kLog2E * delta[j];
      e[j] = V::kTemporal ? half_delta * delta[j] : fmaf(half_delta, delta[j], in.prior[j]);
      u[j] = in.beta[j] * delta[j];
      if constexpr (V::kTemporal) r[j] += in.prior[j];
    }
    if constexpr (V::kTemporal) {
      scale = weigh(e, r, a);
    } else {
      take_largest(e);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) a[j] = exp2_fast(e[j]);
      scale = reciprocal(sum_of_both(a));
    }
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      u[j] = a[j] * u[j] * scale;
      if constexpr (V::kTemporal) r[j] = a[j] * scale;
    }
  }

  // R of the token that is next, `now`, and of those behind it, which lack what the token before it
  // has written, -u in `last`: that is taken out of them while `now` waits for its exponentials.
  struct Window {
    Two now, later[kTokens - 1], last;
  };
  __device__ void take(Window& R) const {
    const float* const from = &shared.recalled[d * kMixtures];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float2 two = load_pair(from + t * V::kValues * kMixtures + (t & 2 ? 2 - first : first));
      Two& to = t == 0 ? R.now : R.later[t == 0 ? 0 : t - 1];
      to[turned(0, t) % 2] = two.x;
      to[turned(1, t) % 2] = two.y;
    }
    R.last[0] = R.last[1] = 0;
  }

  // Rows of G, of the thread's mixtures: of a token with the one n before it at n.
  static constexpr int kSets = V::kGated ? kOwn : 1;
  static constexpr int kTokensUnrolled = 2;
  using Row = float4[kSets][kTokens / 4];
  template <int kCount>
  __device__ static void load_row(const float* gram, int s, int four, Row& to) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if (4 * four < kCount) to[set][four] = load4(gram + set * kGramSize + s * kTokens + 4 * four);
    }
  }

  // Eight tokens from t on, with kLater behind the first. All move on by one with each token. G has
  // the row of the token before; what has been used of it is loaded for the next one, long before
  // that asks for it.
  template <int kLater>
  __device__ void eight(const float* gram, const float* keys, int t, Window& R, Row& G,
                        Two& r) const {
    constexpr int kCount = kLater + 2 < kTokens ? kLater + 2 : kTokens;
    Factors factors, next;
    load(keys, t, next);
#pragma unroll kTokensUnrolled
    for (const int end = t + 8; t < end; ++t) {
      const int row = min(t, kTokens - 2);
      Two u, second;
      factors = next;
      load(keys, min(t + 1, kTokens - 1), next);
#pragma unroll
      for (int four = 0; 4 * four < kCount; ++four) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          const float4 from = G[V::kGated ? j : 0][four];
          const float g[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int later = 4 * four + i - 2;
            if (later < 0 || later >= kLater) continue;
            float& to = later == 0 ? second[j] : R.later[later == 0 ? 0 : later - 1][j];
            to = fmaf(g[i], R.last[j], R.later[later][j]);
          }
        }
        load_row<kCount>(gram, row, four, G);
      }
      if constexpr (kLater + 1 == kTokens) {  // the chunk's last, while `last` is none
#pragma unroll
        for (int j = 0; j < kOwn; ++j) R.later[kLater - 2][j] = R.later[kLater - 1][j];
      }
      switch_mixtures(factors, R.now, r, u);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        R.now[j] = fmaf(G[V::kGated ? j : 0][0].y, u[j], second[j]);
        R.last[j] = u[j];
      }
      const uint32_t both = pack(u[0], u[1]);
      const half2 halves = *reinterpret_cast<const half2*>(&both);
      shared.u[first][t * V::kWrittenPitch + d] = __low2half(halves);
      shared.u[first + 1][t * V::kWrittenPitch + d] = __high2half(halves);
    }
  }

  __device__ void run() const {
    const int chunks = place.chunks();
    Two r;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) r[j] = begin_with<V>(op.posterior, place, first + j, d);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      Window R;
      Row G;
      sleep_for(&shared.keys_ready[c % 2], c / 2);
      meet(kRecalled + group, V::kOfGroup);
      const float* const gram = shared.stage[c % V::kStages].gram[V::kGated ? first : 0];
      take(R);
#pragma unroll
      for (int four = 0; four < kTokens / 4; ++four) load_row<kTokens>(gram, 0, four, G);
      warp_arrive(&shared.taken[group]);
      const float* const keys = factors_of<V>(shared.keys[c % 2], d, first / kOwn);
      eight<15>(gram, keys, 0, R, G, r);
      eight<7>(gram, keys, 8, R, G, r);
      arrive(kWritten + group, V::kOfGroup);
    }
    if constexpr (V::kTemporal) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        at(op.posterior, place.slot)[place.mixed(first + j, place.value + d)] = r[j];
      }
    }
  }
};

}  // namespace weir::cuda::swila_chunk
