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

  // A warp has kAtOnce tokens at one time; a lane kPer values of one, 32 apart.
  static constexpr int kPer = V::kValues == kDim ? 2 : 1, kLanes = V::kValues / kPer;
  static constexpr int kAtOnce = 32 / kLanes, kOfWarp = kTokens / V::kHelpers;

  // The logits of a token that is not the row's are some other row's, which may be anything.
  __device__ static void clear_four(float* from) {
#pragma unroll 1
    for (int j = 0; j < kMixtures; ++j) from[j * V::kValues] = 0;
  }
  __device__ void clear_keys(int n) const {
    auto& keys = shared.keys[n % 2];
#pragma unroll 1
    for (int i = 0; i < kOfWarp; i += kAtOnce) {
      const int t = thread / 32 * kOfWarp + i + thread % 32 / kLanes;
      if (n * kTokens + t < place.count) continue;
#pragma unroll 1
      for (int d = thread % kLanes; d < V::kValues; d += kLanes) {
        clear_four(keys.router + t * kMixtures * V::kValues + d);
        clear_four(keys.beta + t * kMixtures * V::kValues + d);
      }
    }
  }
  // Logits of chunk n become the chain's factors. A token behind the row's end changes nothing.
  __device__ void make_factors(int n) const {
    sleep_for(&shared.keys_full[n % 2], n / 2);
    auto& keys = shared.keys[n % 2];
    if (place.count - n * kTokens < kTokens) clear_keys(n);
#pragma unroll 1
    for (int i = 0; i < kOfWarp; i += kAtOnce) {
      const int t = thread / 32 * kOfWarp + i + thread % 32 / kLanes, d = thread % kLanes;
      const int at = t * kMixtures * V::kValues;
      const bool inside = n * kTokens + t < place.count;
      float prior[kPer][kMixtures], beta[kPer][kMixtures];
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
      beta[j] = fmaf(-0.5f, tanh_fast(fmaf(0.5f, beta[j], -shift)), -0.5f);
    }
    if constexpr (V::kTemporal) {
      const float odds = exp2_fast(kLog2E * fminf(mix, 40.0f));  // gk / (1 - gk)
      softmax(prior, inside ? odds : 0.0f);
    } else {
#pragma unroll
      for (int j = 0; j < kMixtures; ++j) prior[j] = inside ? prior[j] * kLog2E : 0.0f;
    }
  }

  // Temporal: a thread has one value and a run of kRun tokens, another run each chunk, so that who
  // has the chunk's last token has the next one's first. rho[k][m] is that of the run's token k and
  // of mixture m ^ turned(0, first): of the answers' place turned(m, k), see turned().
  static constexpr int kRuns = kThreads / V::kValues, kRun = kTokens / kRuns;
  using Mixes = float[kRun][kMixtures];
  using Four = float[kMixtures];
  __device__ int value() const { return thread % V::kValues; }
  __device__ int run_of(int n) const { return (thread / V::kValues + n) % kRuns; }

  // Those of a token behind the row's end change nothing.
  __device__ static void clear_queries(float* logits, float* mixes, int first, int count) {
#pragma unroll 1
    for (int k = 0; k < kRun; ++k) {
      if (first + k < count) continue;
      clear_four(logits + k * kMixtures * V::kValues);
      mixes[k * V::kValues] = -INFINITY;
    }
  }
  __device__ static void add_earlier(const float (&through)[kRun], const Four& before,
                                     Mixes& rho) {
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
#pragma unroll
      for (int m = 0; m < kMixtures; ++m) rho[k][m] = fmaf(through[k], before[m], rho[k][m]);
    }
  }
  // rho of chunk n from the query side's logits; `last`, by mixture, is that of the token before
  // the chunk, if the thread has its first one. Each run starts from nothing. What it comes to, and
  // by how much it lessens what was before, is left where the logits of its first token were, for
  // the runs behind it.
  __device__ void make_priors(int n, Mixes& rho, Four& last) const {
    sleep_for(&shared.query_full, n);
    const int run = run_of(n), first = run * kRun, turn = turned(0, first);
    float* const mixes = shared.query_mix + first * V::kValues + value();
    const auto logit = [&](int token, int k, int m) -> float& {
      return shared.query_router[((token * kMixtures + turn) * V::kValues + value() ^
                                  m * V::kValues) + k * kMixtures * V::kValues];
    };
    if (place.count - n * kTokens < kTokens) {
      clear_queries(shared.query_router + first * kMixtures * V::kValues + value(), mixes, first,
                    place.count - n * kTokens);
    }
    float through[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
#pragma unroll
      for (int m = 0; m < kMixtures; ++m) rho[k][m] = logit(first, k, m);
      const float share = fast_sigmoid(mixes[k * V::kValues]), keep = 1.0f - share;
      softmax(rho[k], share);
      through[k] = keep;
      if (k == 0) continue;
      through[k] *= through[k - 1];
#pragma unroll
      for (int m = 0; m < kMixtures; ++m) rho[k][m] = fmaf(keep, rho[k - 1][m], rho[k][m]);
    }
    if (run == 0) add_earlier(through, last, rho);
#pragma unroll
    for (int m = 0; m < kMixtures; ++m) logit(first, 0, m) = rho[kRun - 1][m];
    mixes[0] = through[kRun - 1];
    publish_to_copy_engine();
    meet_helpers();
    if (run > 0) {
      Four before;
#pragma unroll
      for (int m = 0; m < kMixtures; ++m) before[m] = logit(0, 0, m);
#pragma unroll 1
      for (int token = kRun; token < first; token += kRun) {
        const float left = shared.query_mix[token * V::kValues + value()];
#pragma unroll
        for (int m = 0; m < kMixtures; ++m) before[m] = fmaf(left, before[m], logit(token, 0, m));
      }
      add_earlier(through, before, rho);
    }
    if (run < kRuns - 1) return;
    constexpr int kLastTurn = turned(0, kTokens - kRun);
#pragma unroll
    for (int m = 0; m < kMixtures; ++m) last[m] = rho[kRun - 1][m ^ kLastTurn];
  }

  // What each token of the run is scaled by: each lane has its share of the squares, and another
  // warp those of 32 values. Through where the mixes were, which all have read.
  __device__ void scales(int first, float (&of)[kRun]) const {
    static_assert(V::kValues == kDim && kRun == 4);
    const int lane = thread % 32, half = thread / 32 % 2;
    float* const sums = shared.query_mix + (first + 1) * V::kValues;
    const bool one = lane & 1, two = lane & 2;
    const auto halved = [](bool second, float x, float y, int step) {
      return (second ? y : x) + __shfl_xor_sync(0xffffffffu, second ? x : y, step);
    };
    float sum = halved(two, halved(one, of[0], of[1], 1), halved(one, of[2], of[3], 1), 2);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane < kRun) sums[kRun * half + lane] = sum;
    publish_to_copy_engine();
    __syncwarp();
    meet_helpers();
    const float4 left = load4(sums), right = load4(sums + kRun);
    const float all[kRun] = {left.x + right.x, left.y + right.y, left.z + right.z,
                             left.w + right.w};
#pragma unroll
    for (int k = 0; k < kRun; ++k) of[k] = rsqrt_fast(all[k] / kDim + op.norm_eps);
  }
  __device__ void finish(int n, const Mixes& rho, float weight) const {
    const int first = run_of(n) * kRun;
    sleep_for(&shared.answered, n);
    float out[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const float4 four =
          load4(&shared.recalled[((first + k) * V::kValues + value()) * kMixtures]);
      const float(&by)[kMixtures] = rho[k];
      out[k] = by[turned(0, k)] * four.x + by[turned(1, k)] * four.y +
               (by[turned(2, k)] * four.z + by[turned(3, k)] * four.w);
    }
    warp_arrive(&shared.mixed);
    if (thread == 0) bring_keys(n + 2);  // the chain has read its factors
    __syncwarp();
    if constexpr (V::kValues == kDim) {
      float scale[kRun];
#pragma unroll
      for (int k = 0; k < kRun; ++k) scale[k] = out[k] * out[k];
      scales(first, scale);
#pragma unroll
      for (int k = 0; k < kRun; ++k) out[k] *= scale[k] * weight;
    }
    const int count = place.count - n * kTokens - first;
    float* const to = at(op.out, place.begin + n * kTokens + first) +
                      place.channel(place.value + value());
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if (k < count) to[k * op.out.stride] = out[k];
    }
  }

  // The mixed answer of token t and value d. In place i lies mixture turned(i, t).
  __device__ float mix(int t, int d) const {
    const int first = (t * kMixtures + turned(0, t)) * V::kValues + d;
    float rho[kMixtures];
#pragma unroll
    for (int i = 0; i < kMixtures; ++i) rho[i] = shared.query_router[first ^ i * V::kValues];
    softmax(rho);
    const float4 four = load4(&shared.recalled[(t * V::kValues + d) * kMixtures]);
    return rho[0] * four.x + rho[1] * four.y + (rho[2] * four.z + rho[3] * four.w);
  }

  // Of the warp's two tokens, whose squares its lanes have, each lane's share: what they are scaled
  // by. Even lanes add up the first's, odd ones the second's.
  __device__ void scales(float (&of)[2]) const {
    const bool odd = thread & 1;
    float sum = (odd ? of[1] : of[0]) + __shfl_xor_sync(0xffffffffu, odd ? of[0] : of[1], 1);
#pragma unroll
    for (int step = 2; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float mine = rsqrt_fast(sum / kDim + op.norm_eps);
    const float other = __shfl_xor_sync(0xffffffffu, mine, 1);
    of[0] = odd ? other : mine;
    of[1] = odd ? mine : other;
  }

  __device__ void finish(int n, const float (&weight)[kPer]) const {
    sleep_for(&shared.query_full, n);
    sleep_for(&shared.answered, n);
    constexpr int kTurns = kOfWarp / kAtOnce;
    const int lane = thread % 32, d = lane % kLanes;
    const int first = thread / 32 * kOfWarp + lane / kLanes;
    const int count = min(kTokens, place.count - n * kTokens);
    float out[kTurns][kPer];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) out[i][k] = mix(first + i * kAtOnce, d + 32 * k);
    }
    warp_arrive(&shared.mixed);
    if constexpr (V::kValues == kDim) {
      float scale[kTurns];
#pragma unroll
      for (int i = 0; i < kTurns; ++i) scale[i] = out[i][0] * out[i][0] + out[i][1] * out[i][1];
      scales(scale);
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        out[i][0] *= scale[i] * weight[0];
        out[i][1] *= scale[i] * weight[1];
      }
    }
    float* const to = at(op.out, place.begin + n * kTokens) + place.channel(place.value + d);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int t = first + i * kAtOnce;
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if (t < count) to[t * op.out.stride + 32 * k] = out[i][k];
      }
    }
  }

  // The same, for which addresses are computed anew.
  __device__ Helper anew() const {
    Helper same = *this;
    asm volatile("" : "+r"(same.thread));
    return same;
  }
  __device__ void run() const {
    const int chunks = place.chunks();
    float weight[kPer], last[kMixtures];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int d = V::kTemporal ? value() : thread % 32 + 32 * i;
      weight[i] = V::kValues == kDim ? op.norm_weight[d] : 1.0f;
    }
#pragma unroll
    for (int j = 0; j < kMixtures; ++j) last[j] = begin_with<V>(op.prior, place, j, value());
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
      Mixes rho;
      if constexpr (V::kTemporal) anew().make_priors(n, rho, last);
      if constexpr (V::kTemporal) {
        anew().finish(n, rho, weight[0]);
      } else {
        if (thread == 0) {
          sleep_for(&shared.answered, n);  // the chain has read its factors
          bring_keys(n + 2);
        }
        __syncwarp();
        anew().finish(n, weight);
      }
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
      if (run_of(chunks) != 0) return;
#pragma unroll
      for (int j = 0; j < kMixtures; ++j) {
        at(op.prior, place.slot)[place.mixed(j, place.value + value())] = last[j];
      }
    }
  }
};

}  // namespace weir::cuda::swila_chunk
