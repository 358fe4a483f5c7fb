#pragma once
#include "kernels/swila_chunk_prepare.cuh"

// The warps that convolve, where keys and queries decay for each mixture.
namespace weir::cuda::swila_chunk {

// log2(exp(softplus(x))) = max(y, 0) + log2(1 + e), e = 2^-|y|, y = x log2(e). For log2(1 + e) / e
// the polynomial through its values at the six Chebyshev nodes of 0 .. 1, wrong by 1e-5 of it.
__device__ inline float log2_softplus(float y) {
  const float e = exp2_fast(-fabsf(y));
  float p = fmaf(-0.033822046f, e, 0.144471096f);
  p = fmaf(p, e, -0.30163801f);
  p = fmaf(p, e, 0.468658879f);
  p = fmaf(p, e, -0.720358773f);
  p = fmaf(p, e, 1.44268147f);
  return fmaf(e, p, fmaxf(y, 0.0f));
}

// Two warps have a mixture, each half of the chunk's tokens. L are the sums of log2 decays from the
// half's start on. With a = exp2(L), and b what is left of a from the token until the half's end,
//   G, H of tokens t, s of one half    <k_t a_t, k_s / a_s>, <q_t a_t, k_s / a_s>
//   of t in the upper, s in the lower  <k_t a_t, k_s b_s>, <q_t a_t, k_s b_s>
// The former are products of halves where little is lost in the half; else by tf32, which has a
// float's range, unless the half is strong: then they are made of others whose exponents are never
// positive, as those of the latter.
template <class V>
struct Gates : Convolver<V> {
  static constexpr int kHalf = kTokens / 2, kKeyRun = 2;
  static constexpr int kSteps = kDim / 16;  // of 16 channels, of which a lane has 4
  // Where values are few, what is prepared sets the pace, and less code is faster.
  static constexpr int kUnrolled = V::kValues == kDim ? 2 : 1;
  using Base = Convolver<V>;
  using Base::op, Base::maps, Base::place, Base::shared, Base::warp, Base::lane;
  template <int kRun>
  using Run = typename Base::template Run<kRun>;

  __device__ Gates(const SwilaMix& op, const Maps& maps, const Place& place, Shared<V>& shared)
      : Base{op, maps, place, shared} {}

  __device__ int mixture() const { return warp % kMixtures; }
  __device__ bool upper() const { return warp >= kMixtures; }
  __device__ int first() const { return upper() ? kHalf : 0; }  // of its tokens

  // By one thread: the mixture's logits of chunk n; and another chunk's to the cache.
  __device__ void bring_logits(int n) const {
    if (n >= place.chunks()) return;
    const uint32_t full = shared_address(&shared.logits_full[mixture()]);
    barrier_expect(full, kTokens * kDim * sizeof(float));
    bring_box(shared.logs[mixture()], maps.gates, full, 0, place.head * kMixtures + mixture(),
              place.begin + n * kTokens);
  }
  __device__ void prefetch_logits(int n) const {
    if (n >= place.chunks()) return;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    prefetch_box(maps.gates, 0, place.head * kMixtures + mixture(), place.begin + n * kTokens);
#endif
  }

  // Two tokens' queries or keys, for four warps each. Sixteen lanes have four channels each.
  __device__ void make_keys(int n) const {
    const int which = warp / 4, channel = lane % 16 * 4;
    const int t = warp % 4 * 4 + lane / 16 * kKeyRun;
    sleep_for(&shared.raw_full[which], n);
    Run<kKeyRun> x;
    Base::template convolve<kKeyRun>(shared.raw[which] + t * kDim + channel, kDim,
                                     shared.key_taps[which][0] + channel,
                                     place.count - n * kTokens - t, x);
    if (n > 0) sleep_for(&shared.plain_empty, n - 1);
    half* const to = which == 0 ? shared.plain_q : shared.plain_k;
    Base::template store_keys<kKeyRun>(which, x, to + t * kKeyPitch + channel);
  }
  // Four channels of a token's values a lane.
  __device__ void make_values(int n) const {
    constexpr int kLanes = V::kValues / 4;
    const int t = (warp * 32 + lane) / kLanes, channel = lane % kLanes * 4;
    if (t >= kTokens) return;
    sleep_for(&shared.raw_full[2], n);
    Run<1> x;
    Base::template convolve<1>(shared.raw_v + t * V::kValues + channel, V::kValues,
                               shared.value_taps[0] + channel, place.count - n * kTokens - t, x);
    if (n > 0) sleep_for(&shared.v_empty, n - 1);
    *reinterpret_cast<float4*>(&shared.v[t * V::kValuePitch + channel]) = x[0];
  }

  // L lies where the logits did, in token t's row, but that of an odd token in each other's place
  // runs of 16 channels lie; c is the first of some.
  __device__ const float* log_of(int t, int c) const {
    return &shared.logs[mixture()][t * kDim + (c ^ t % 2 * 16)];
  }
  // Of the lane's two channels: exp(A_log), and dt_bias times log2(e). Asked for anew each chunk,
  // long before they are needed, as there are no registers to keep them in.
  struct Gate {
    float a;
    float2 shift;
  };
  __device__ Gate gate() const {
    const float* const bias = op.dt_bias + place.mixed(mixture(), lane * 2);
    return {op.decay_a[place.head * kMixtures + mixture()], {kLog2E * bias[0], kLog2E * bias[1]}};
  }
  // How much any channel loses in the half.
  enum Loss { kLittle, kMuch, kMost };  // 2^12, 2^60, more
  // L of the warp's tokens; a lane has two channels.
  __device__ Loss decays(int n, const Gate& gate) const {
    float2 x[kHalf], sum{0, 0};
    float* const rows = &shared.logs[mixture()][first() * kDim];
    sleep_for(&shared.logits_full[mixture()], n);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) x[i] = load_pair(rows + i * kDim + lane * 2);
    __syncwarp();
    const int count = place.count - n * kTokens - first();
    if (count < kHalf) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        if (i >= count) x[i] = {-1e30f, -1e30f};  // no decay
      }
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      sum.x = fmaf(-gate.a, log2_softplus(fmaf(kLog2E, x[i].x, gate.shift.x)), sum.x);
      sum.y = fmaf(-gate.a, log2_softplus(fmaf(kLog2E, x[i].y, gate.shift.y)), sum.y);
      *reinterpret_cast<float2*>(rows + i * kDim + (lane * 2 ^ i % 2 * 16)) = sum;
    }
    *reinterpret_cast<float2*>(&shared.kept[upper()][mixture()][lane * 2]) = {exp2_fast(sum.x),
                                                                            exp2_fast(sum.y)};
    const float least = fminf(sum.x, sum.y);
    if (!__any_sync(0xffffffffu, least < -12.0f)) return kLittle;
    return __any_sync(0xffffffffu, least < -60.0f) ? kMost : kMuch;
  }

  __device__ static float4 exp2_of(float4 x) {
    return {exp2_fast(x.x), exp2_fast(x.y), exp2_fast(x.z), exp2_fast(x.w)};
  }
  __device__ static float4 times(float4 x, float4 y) {
    return {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w};
  }
  __device__ static float4 load_four(const half* from) {
    const uint2 four = *reinterpret_cast<const uint2*>(from);
    const float2 low = unpack(four.x), high = unpack(four.y);
    return {low.x, low.y, high.x, high.y};
  }
  // sum += what four channels of the lane's token bring to G and H of the half.
  __device__ static void multiply_near(float (&sum)[4], float4 k, float4 q, float4 back) {
    const uint32_t low[4] = {to_tf32(k.x), to_tf32(q.x), to_tf32(k.y), to_tf32(q.y)};
    const uint32_t high[4] = {to_tf32(k.z), to_tf32(q.z), to_tf32(k.w), to_tf32(q.w)};
    multiply_tf32(sum, low, to_tf32(back.x), to_tf32(back.y));
    multiply_tf32(sum, high, to_tf32(back.z), to_tf32(back.w));
  }

  // Keys and queries as the state meets them, decayed since the chunk's start or until its end. A
  // lane has channels of one token. Where its L were it leaves what the product of the two halves
  // takes of the token in a step: of the upper half an A, k a and q a, of the lower one a B, k b.
  // Weak: also G, H of the half.
  template <bool kUpper, bool kStrong>
  __device__ void decay_keys(Stage<V>& to, float (&near)[4]) const {
    const int t = (kUpper ? kHalf : 0) + lane / 4, c = lane % 4 * 4, j = mixture();
    const int at = t * kKeyPitch + c, odd = t % 2 * 16;
    float* const logs = &shared.logs[j][t * kDim + c];
#pragma unroll kUnrolled
    for (int i = 0; i < kSteps; ++i) {
      float* const log = logs + (16 * i ^ odd);
      const float4 L = load4(log);
      const float4 key = load_four(&shared.plain_k[at + 16 * i]);
      const float4 query = load_four(&shared.plain_q[at + 16 * i]);
      const float4 a = exp2_of(L), k = times(key, a), q = times(query, a);
      float4 end;  // until the half's
      if constexpr (kStrong) {
        const float4 last = load4(log_of((kUpper ? kHalf : 0) + kHalf - 1, c + 16 * i));
        end = times(key, exp2_of({last.x - L.x, last.y - L.y, last.z - L.z, last.w - L.w}));
        __syncwarp();
      } else {
        const float4 back = times(key, exp2_of({-L.x, -L.y, -L.z, -L.w}));
        multiply_near(near, k, q, back);
        end = times(back, load4(&shared.kept[kUpper][j][c + 16 * i]));
      }
      const float4 other = load4(&shared.kept[!kUpper][j][c + 16 * i]);
      store_halves(&to.k[j][at + 16 * i], kUpper ? times(k, other) : k);
      store_halves(&to.q[j][at + 16 * i], kUpper ? times(q, other) : q);
      store_halves(&to.end[j][at + 16 * i], kUpper ? end : times(end, other));
      if constexpr (kUpper) {
        *reinterpret_cast<uint4*>(log) = {pack(k.x, k.y), pack(q.x, q.y), pack(k.z, k.w),
                                          pack(q.z, q.w)};
      } else {
        *reinterpret_cast<uint2*>(log) = {pack(end.x, end.y), pack(end.z, end.w)};
      }
    }
  }

  // The same by halves, where channels lose little.
  template <bool kUpper>
  __device__ void decay_keys_by_halves(Stage<V>& to, float (&near)[4]) const {
    const int t = (kUpper ? kHalf : 0) + lane / 4, c = lane % 4 * 4, j = mixture();
    const int at = t * kKeyPitch + c, odd = t % 2 * 16;
    float* const logs = &shared.logs[j][t * kDim + c];
    const auto four = [](half* from) -> uint2& { return *reinterpret_cast<uint2*>(from); };
#pragma unroll kUnrolled
    for (int i = 0; i < kSteps; ++i) {
      float* const log = logs + (16 * i ^ odd);
      const float4 L = load4(log);
      const uint2 key = four(&shared.plain_k[at + 16 * i]);
      const uint2 query = four(&shared.plain_q[at + 16 * i]);
      const float4 a = exp2_of(L), back = exp2_of({-L.x, -L.y, -L.z, -L.w});
      const uint2 since = packed(a), k = times_halves(key, since), q = times_halves(query, since);
      const uint2 b = times_halves(key, packed(back));
      const uint32_t left[4] = {k.x, q.x, k.y, q.y};
      multiply(near, left, b.x, b.y);
      const float4 end = times(back, load4(&shared.kept[kUpper][j][c + 16 * i]));
      const float4 other = load4(&shared.kept[!kUpper][j][c + 16 * i]);
      if constexpr (kUpper) {
        const uint2 all = packed(times(a, other));
        four(&to.k[j][at + 16 * i]) = times_halves(key, all);
        four(&to.q[j][at + 16 * i]) = times_halves(query, all);
        four(&to.end[j][at + 16 * i]) = times_halves(key, packed(end));
        *reinterpret_cast<uint4*>(log) = {k.x, q.x, k.y, q.y};
      } else {
        four(&to.k[j][at + 16 * i]) = k;
        four(&to.q[j][at + 16 * i]) = q;
        four(&to.end[j][at + 16 * i]) = times_halves(key, packed(times(end, other)));
        *reinterpret_cast<uint2*>(log) = times_halves(key, packed(end));
      }
    }
  }

  __device__ static void store_pair(half* to, float low, float high) {
    *reinterpret_cast<uint32_t*>(to) = pack(low, high);
  }
  // G and H of the warp's half.
  __device__ void put_near(Stage<V>& to, const float (&sum)[4]) const {
    const int g = lane / 4, p = lane % 4 * 2, t = first() + g, s = first() + p, j = mixture();
    if (p < g) to.gram[j][s * kTokens + g - p] = sum[0];
    if (p + 1 < g) to.gram[j][(s + 1) * kTokens + g - p - 1] = sum[1];
    store_pair(&to.asked[j][t * kTokenPitch + s], p <= g ? sum[2] : 0.0f,
               p + 1 <= g ? sum[3] : 0.0f);
  }
  // By the lower warp: G and H of the upper one's tokens and its own, once that has been through
  // decay_keys().
  __device__ void put_far(Stage<V>& to) const {
    const int j = mixture(), g = lane / 4, p = lane % 4 * 2, t = kHalf + g;
    float sum[4] = {};
    meet(kHanded + j, 64);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint4 left = *reinterpret_cast<const uint4*>(log_of(t, 16 * i + 2 * p));
      const uint2 right = *reinterpret_cast<const uint2*>(log_of(g, 16 * i + 2 * p));
      const uint32_t a[4] = {left.x, left.y, left.z, left.w};
      multiply(sum, a, right.x, right.y);
    }
    to.gram[j][p * kTokens + t - p] = sum[0];
    to.gram[j][(p + 1) * kTokens + t - p - 1] = sum[1];
    store_pair(&to.asked[j][t * kTokenPitch + p], sum[2], sum[3]);
    store_pair(&to.asked[j][g * kTokenPitch + kHalf + p], 0, 0);
  }

  // Strong: G and H of mixture j for all t > s of the warp's half such that t lies in the upper and
  // s in the lower half of one run of 2 half tokens: both operands are decayed to the lower half's
  // last token, behind it on the left, up to it on the right, so that no exponent is positive.
  // half = 1, 2 and 4 have each pair once. Left are keys over queries of the four t, right the four
  // s; what else the product has is not used.
  __device__ void level(int half, Stage<V>& to) const {
    const int g = lane / 4, p = lane % 4 * 2, j = mixture();
    const auto run = [half](int i) { return (i & -half) * 2; };
    const auto token = [&](int i) { return first() + run(i) + (i & (half - 1)); };
    const int s = token(g % 4), t = s + half, middle = first() + run(g % 4) + half - 1;
    float sum[4] = {};
#pragma unroll 1
    for (int i = p; i < kDim; i += 16) {
      uint32_t left[4], right[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = i + 8 * h;
        const float2 end = load_pair(log_of(middle, c));
        const float2 Lt = load_pair(log_of(t, c)), Ls = load_pair(log_of(s, c));
        const float2 since{exp2_fast(Lt.x - end.x), exp2_fast(Lt.y - end.y)};
        const float2 until{exp2_fast(end.x - Ls.x), exp2_fast(end.y - Ls.y)};
        const float2 k = load_halves(&shared.plain_k[t * kKeyPitch + c]);
        const float2 q = load_halves(&shared.plain_q[t * kKeyPitch + c]);
        const float2 key = load_halves(&shared.plain_k[s * kKeyPitch + c]);
        left[2 * h] = pack(k.x * since.x, k.y * since.y);
        left[2 * h + 1] = pack(q.x * since.x, q.y * since.y);
        right[h] = pack(key.x * until.x, key.y * until.y);
      }
      multiply(sum, left, right[0], right[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = p + i, from = token(n % 4);
      if (g >= 4 || n >= 4 || run(n) != run(g)) continue;
      to.gram[j][from * kTokens + t - from] = sum[i];
      to.asked[j][t * kTokenPitch + from] = __float2half_rn(sum[2 + i]);
      to.asked[j][from * kTokenPitch + t] = __float2half_rn(0.0f);
    }
  }
  __device__ void strong_products(Stage<V>& to) const {
#pragma unroll 1
    for (int half = kHalf / 2; half > 0; half /= 2) level(half, to);
    if (lane >= kHalf) return;
    const int t = first() + lane;
    float sum = 0;  // <q_t, k_t>
#pragma unroll 1
    for (int c = 0; c < kDim; c += 2) {
      const float2 q = load_halves(&shared.plain_q[t * kKeyPitch + c]);
      const float2 k = load_halves(&shared.plain_k[t * kKeyPitch + c]);
      sum += q.x * k.x + q.y * k.y;
    }
    to.asked[mixture()][t * kTokenPitch + t] = __float2half_rn(sum);
  }

  template <bool kUpper>
  __device__ void products(Stage<V>& to, Loss loss) const {
    const int j = mixture();
    float near[4] = {};
    const bool strong = loss == kMost;
    if (loss == kLittle) {
      decay_keys_by_halves<kUpper>(to, near);
    } else if (strong) {
      strong_products(to);
      __syncwarp();
      decay_keys<kUpper, true>(to, near);
    } else {
      decay_keys<kUpper, false>(to, near);
    }
    publish_to_copy_engine();
    if constexpr (kUpper) {
      arrive(kHanded + j, 64);
    } else {
      const float2 lower = load_pair(&shared.kept[0][j][lane * 2]);
      const float2 upper = load_pair(&shared.kept[1][j][lane * 2]);
      *reinterpret_cast<float2*>(&to.decay[j][lane * 2]) = {lower.x * upper.x, lower.y * upper.y};
    }
    warp_arrive(&shared.plain_empty);
    if (!strong) put_near(to, near);
    if constexpr (!kUpper) put_far(to);
  }

  // By the lower warp: the mixture's L are needed no more.
  __device__ void bring_next(int n) const {
    __syncwarp();
    if (lane == 0) {
      bring_logits(n);
      prefetch_logits(n + 1);
    }
    __syncwarp();
  }
  // The same, for which addresses are computed anew: a chunk's are more than there are registers,
  // and what the compiler would put aside for them comes back late.
  __device__ Gates anew() const {
    Gates same = *this;
    asm volatile("" : "+r"(same.warp), "+r"(same.lane));
    return same;
  }
  __device__ void run() const {
    const int chunks = place.chunks();
    if (!upper()) bring_next(0);
    Base::start();
#pragma unroll 1
    for (int n = 0; n < chunks; ++n) {
      Stage<V>& to = shared.stage[n % V::kStages];
      anew().make_keys(n);
      const Gate gate = anew().gate();
      anew().make_values(n);
      warp_arrive(&shared.plain_full);
      const Loss loss = anew().decays(n, gate);
      meet(kPaired + mixture(), 64);
      sleep_for(&shared.plain_full, n);
      Base::bring(n + 1);
      await_stage(shared, n);
      if (upper()) {
        anew().template products<true>(to, loss);
      } else {
        anew().template products<false>(to, loss);
      }
      warp_arrive(&shared.full[n % V::kStages]);
      if (!upper()) bring_next(n + 1);
    }
  }
};

}  // namespace weir::cuda::swila_chunk
