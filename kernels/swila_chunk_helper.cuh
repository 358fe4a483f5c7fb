#pragma once
#include "kernels/swila_chunk_chain.cuh"

// The warps that do what need not wait in the chain: logits become its factors, and answers become
// outputs.
namespace weir::cuda::swila_chunk {

template <class V>
struct Helper {
  static constexpr int kThreads = 32 * V::kHelpers;
  const SwilaMix& op;
  const Maps& maps;
  const Place& place;
  Shared<V>& shared;
  int thread = int(threadIdx.x) - 32 * V::kFirstHelper;

  __device__ static void meet_helpers() { meet(kHelped, kThreads); }

  // By one thread: the slice's numbers of chunk n, of all mixtures or of none.
  __device__ void bring_mixed(const CUtensorMap& map, float* to, int n, uint32_t full) const {
    bring_box(to, map, full, place.value, place.head * kMixtures, place.begin + n * kTokens);
  }
  __device__ void bring_mix(const CUtensorMap& map, float* to, int n, uint32_t full) const {
    bring_box(to, map, full, place.head * kDim + place.value, place.begin + n * kTokens);
  }
  static constexpr int kMixedBytes = V::kMixed * sizeof(float);
  static constexpr int kMixBytes = V::kTemporal ? kMixedBytes / kMixtures : 0;

  // By one thread: what the key side has of chunk n; the last chunk's mixes have been read.
  __device__ void bring_keys(int n) const {
    if (n >= place.chunks()) return;
    const uint32_t full = shared_address(&shared.keys_full[n % 2]);
    barrier_expect(full, 2 * kMixedBytes + kMixBytes);
    bring_mixed(maps.key_router, shared.keys[n % 2].router, n, full);
    bring_mixed(maps.beta, shared.keys[n % 2].beta, n, full);
    if (V::kTemporal) bring_mix(maps.key_mix, shared.key_mix, n, full);
  }
  __device__ void bring_queries(int n) const {
    if (n >= place.chunks()) return;
    const uint32_t full = shared_address(&shared.query_full);
    barrier_expect(full, kMixedBytes + kMixBytes);
    bring_mixed(maps.query_router, shared.query_router, n, full);
    if (V::kTemporal) bring_mix(maps.query_mix, shared.query_mix, n, full);
  }

  // Calls visit(t, d, at) for every token and value of a chunk, which one thread has; `at` is where
  // the value's first mixture lies.
  template <typename Visit>
  __device__ void each_value(const Visit& visit) const {
    constexpr int kStep = kThreads / V::kValues;
    const int d = thread % V::kValues;
#pragma unroll 2
    for (int t = thread / V::kValues; t < kTokens; t += kStep) {
      visit(t, d, t * kMixtures * V::kValues + d);
    }
  }
  // Changes four mixtures' numbers from `from` on.
  template <typename Change>
  __device__ static void change_four(float* from, const Change& change) {
    float x[kMixtures];
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) x[j] = from[j * V::kValues];
    change(x);
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) from[j * V::kValues] = x[j];
  }

  // A warp has kAtOnce tokens at one time; a lane kPer values of one, 32 apart.
  static constexpr int kPer = V::kValues == kDim ? 2 : 1, kLanes = V::kValues / kPer;
  static constexpr int kAtOnce = 32 / kLanes, kOfWarp = kTokens / V::kHelpers;

  // The logits of a token that is not the row's are some other row's, which may be anything.
  __device__ static void clear_four(float* from) {
#pragma unroll 1
    for (int j = 0; j < kMixtures; ++j) from[j * V::kValues] = 0;
  }
  // Logits of chunk n become the chain's factors. A token behind the row's end changes nothing.
  __device__ void make_factors(int n) const {
    sleep_for(&shared.keys_full[n % 2], n / 2);
    auto& keys = shared.keys[n % 2];
#pragma unroll 1
    for (int i = 0; i < kOfWarp; i += kAtOnce) {
      const int t = thread / 32 * kOfWarp + i + thread % 32 / kLanes, d = thread % kLanes;
      const int at = t * kMixtures * V::kValues;
      const bool inside = n * kTokens + t < place.count;
      float prior[kPer][kMixtures], beta[kPer][kMixtures];
      if (!inside) {
#pragma unroll 1
        for (int from = at + d; from < at + V::kValues; from += kLanes) {
          clear_four(keys.router + from);
          clear_four(keys.beta + from);
        }
      }
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
#pragma unroll
        for (int j = 0; j < kMixtures; ++j) {
          prior[k][j] = keys.router[at + j * V::kValues + d + 32 * k];
          beta[k][j] = keys.beta[at + j * V::kValues + d + 32 * k];
        }
      }
      __syncwarp();  // all have read their logits
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        const float mix = V::kTemporal ? shared.key_mix[t * V::kValues + d + 32 * k] : 0.0f;
        change(inside, mix, prior[k], beta[k]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          *reinterpret_cast<float4*>(factors_of<V>(keys, d + 32 * k, h) + at) = {
              prior[k][2 * h], prior[k][2 * h + 1], beta[k][2 * h], beta[k][2 * h + 1]};
        }
      }
    }
    publish_to_copy_engine();
    warp_arrive(&shared.keys_ready[n % 2]);
  }
  // beta with its sign changed.
  __device__ static void change(bool inside, float mix, float (&prior)[kMixtures],
                                float (&beta)[kMixtures]) {
    const float shift = inside ? 0.0f : INFINITY;
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) {
      beta[j] = reciprocal(-1.0f - exp2_fast(fmaf(-kLog2E, beta[j], shift)));
    }
    if constexpr (V::kTemporal) {
      const float odds = exp2_fast(kLog2E * fminf(mix, 60.0f));  // gk / (1 - gk)
      softmax(prior, inside ? odds : 0.0f);
    } else {
#pragma unroll
      for (int j = 0; j < kMixtures; ++j) prior[j] = inside ? prior[j] * kLog2E : 0.0f;
    }
  }

  // Temporal: the query side's logits of chunk n become rho where they lie. A thread carries the
  // rho of kOwn (mixture, value) from token to token.
  static constexpr int kColumns = kMixtures * V::kValues;
  static constexpr int kOwn = (kColumns + kThreads - 1) / kThreads;
  static constexpr int kScanned = 8;  // tokens at one time
  __device__ void make_priors(int n, float (&last)[kOwn]) const {
    sleep_for(&shared.query_full, n);
    const int count = place.count - n * kTokens;
    each_value([&](int t, int d, int at) {
      if (t >= count) clear_four(shared.query_router + at);
      change_four(shared.query_router + at, [&](float (&x)[kMixtures]) {
        float& mix = shared.query_mix[t * V::kValues + d];
        const float share = t < count ? fast_sigmoid(mix) : 0.0f;
        mix = 1.0f - share;
        softmax(x, share);
      });
    });
    meet_helpers();
#pragma unroll
    for (int u = 0; u < kOwn; ++u) {
      const int column = thread + u * kThreads;
      if (column >= kColumns) continue;
      float* const at = shared.query_router + column;
      const float* const keep = shared.query_mix + column % V::kValues;
#pragma unroll 1
      for (int t = 0; t < kTokens; t += kScanned) {
        float x[kScanned], kept[kScanned];
#pragma unroll
        for (int i = 0; i < kScanned; ++i) {
          x[i] = at[(t + i) * kColumns];
          kept[i] = keep[(t + i) * V::kValues];
        }
#pragma unroll
        for (int i = 0; i < kScanned; ++i) {
          last[u] = fmaf(kept[i], last[u], x[i]);
          at[(t + i) * kColumns] = last[u];
        }
      }
    }
    publish_to_copy_engine();
    meet_helpers();
  }

  // The mixed answer of token t and value d.
  __device__ float mix(int t, int d) const {
    float rho[kMixtures], out = 0;
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) {
      rho[j] = shared.query_router[(t * kMixtures + j) * V::kValues + d];
    }
    if constexpr (!V::kTemporal) softmax(rho);
    const float4 four = load4(&shared.recalled[(t * V::kValues + d) * kMixtures]);
    const bool pairs = t & 2, ones = t & 4;
    const float x[kMixtures] = {pairs ? four.z : four.x, pairs ? four.w : four.y,
                                pairs ? four.x : four.z, pairs ? four.y : four.w};
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) out = fmaf(rho[j], ones ? x[j ^ 1] : x[j], out);
    return out;
  }

  __device__ void finish(int n, const float (&weight)[kPer]) const {
    if constexpr (!V::kTemporal) sleep_for(&shared.query_full, n);
    sleep_for(&shared.answered, n);
    const int warp = thread / 32, lane = thread % 32, d = lane % kLanes;
    const int count = min(kTokens, place.count - n * kTokens);
    float* const to = at(op.out, place.begin + n * kTokens) + place.channel(place.value + d);
#pragma unroll 2
    for (int i = 0; i < kOfWarp; i += kAtOnce) {
      const int t = warp * kOfWarp + i + lane / kLanes;
      const float out = mix(t, d);
      if constexpr (V::kValues == kDim) {
        const float other = mix(t, d + 32);
        const float squares = sum_over_lanes(out * out + other * other);
        const float scale = rsqrt_fast(squares / kDim + op.norm_eps);
        if (t < count) {
          to[t * op.out.stride] = out * scale * weight[0];
          to[t * op.out.stride + 32] = other * scale * weight[1];
        }
      } else {
        if (t < count) to[t * op.out.stride] = out;
      }
    }
    warp_arrive(&shared.mixed);
  }

  // The same, for which addresses are computed anew.
  __device__ Helper anew() const {
    Helper same = *this;
    asm volatile("" : "+r"(same.thread));
    return same;
  }
  __device__ void run() const {
    const int chunks = place.chunks();
    float weight[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      weight[i] = V::kValues == kDim ? op.norm_weight[thread % 32 + 32 * i] : 1.0f;
    }
    float last[kOwn];
#pragma unroll
    for (int u = 0; u < kOwn; ++u) {
      const int column = thread + u * kThreads;
      last[u] = column < kColumns ? begin_with<V>(op.prior, place, column / V::kValues,
                                                  column % V::kValues)
                                  : 0.0f;
    }
    if (thread == 0) {
      bring_keys(0);
      bring_queries(0);
    }
    __syncwarp();
    make_factors(0);
    meet_helpers();
    if (thread == 0) bring_keys(1);
    __syncwarp();
    if (chunks > 1) make_factors(1);
#pragma unroll 1
    for (int n = 0; n < chunks; ++n) {
      if constexpr (V::kTemporal) anew().make_priors(n, last);
      if (thread == 0) {
        sleep_for(&shared.answered, n);  // the chain has read its factors
        bring_keys(n + 2);
      }
      __syncwarp();
      anew().finish(n, weight);
      if (anew().thread < 32) {
        meet(kFinished, kThreads);  // all have read the queries' logits
        if (anew().thread == 0) bring_queries(n + 1);
      } else {
        arrive(kFinished, kThreads);
      }
      __syncwarp();
      if (n + 2 < chunks) anew().make_factors(n + 2);
    }
    if constexpr (V::kTemporal) {
#pragma unroll
      for (int u = 0; u < kOwn; ++u) {
        const int column = thread + u * kThreads;
        if (column >= kColumns) continue;
        at(op.prior, place.slot)[place.mixed(column / V::kValues,
                                             place.value + column % V::kValues)] = last[u];
      }
    }
  }
};

}  // namespace weir::cuda::swila_chunk
