#pragma once
#include "kernels/swila_chunk_prepare.cuh"

// The warps that convolve, where keys and queries decay for each mixture.
namespace weir::cuda::swila_chunk {

// log2(exp(softplus(x))). log(1 + e) is its series where 1 + e would lose e. No branches.
__device__ inline float log2_softplus(float x) {
  const float e = exp2_fast(fminf(kLog2E * x, 126.0f));
  const float series = kLog2E * e * (1.0f - e * (0.5f - e * (1.0f / 3.0f)));
  float log;
  asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(1.0f + e));
  return x > 30.0f ? kLog2E * x : e < 0.015625f ? series : log;
}

template <class V>
struct Gates : Convolver<V> {
  static constexpr int kEight = 8, kMiddle = kTokens / 2 - 1, kHalf = kDim / 2;
  using Base = Convolver<V>;
  using Base::op, Base::place, Base::shared, Base::warp, Base::lane, Base::meet_convolvers;

  __device__ Gates(const SwilaMix& op, const Maps& maps, const Place& place, Shared<V>& shared)
      : Base{op, maps, place, shared} {}

  // Warps j and j + 4 have mixture j, each 32 of its key dims.
  __device__ int mixture() const { return warp % kMixtures; }
  __device__ bool upper() const { return warp >= kMixtures; }
  __device__ int key_dim() const { return warp / kMixtures * kHalf + lane; }
  __device__ void meet_pair() const { meet(kPaired + mixture(), 64); }

  __device__ const float* logits() const {
    return op.decay_in.data + place.mixed(mixture(), key_dim());
  }
  // The logits of eight tokens of the row from t on.
  __device__ void load(int t, float (&x)[kEight]) const {
    const int last = place.count - 1;
    const float* from = logits() + (place.begin + min(t, last)) * op.decay_in.stride;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      x[i] = *from;
      from += t + i < last ? op.decay_in.stride : 0;
    }
  }
  // Asks for a later chunk's lines: a warp has one of each token.
  __device__ void prefetch(int first) const {
    const int t = first + lane;
    if (lane < kTokens && t < place.count) {
      prefetch_line(logits() - lane + (place.begin + t) * op.decay_in.stride);
    }
  }

  // Behind each row of L there is room for eight numbers more: what the middle token's L, and the
  // chunk's end since then, leave of a channel.
  __device__ static int behind(int half, int c) {
    return (8 * half + c / 8) * kLogPitch + kDim + c % 8;
  }
  // The log decays' sums L from the chunk's start on. `next` has the logits of its first eight
  // tokens.
  __device__ void decays(int first, float a, float shift, float (&next)[kEight]) const {
    float* const logs = shared.logs[mixture()];
    float sum = 0, middle = 0;
#pragma unroll 1
    for (int t = 0; t < kTokens; t += kEight) {
      float x[kEight];
#pragma unroll
      for (int i = 0; i < kEight; ++i) x[i] = a * log2_softplus(next[i] + shift);
      load(first + t + kEight, next);
      middle = sum;
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        sum -= first + t + i < place.count ? x[i] : 0.0f;
        logs[(t + i) * kLogPitch + key_dim()] = sum;
      }
    }
    logs[behind(0, key_dim())] = exp2_fast(middle);
    logs[behind(1, key_dim())] = exp2_fast(sum - middle);
  }

  // Whether a channel of the mixture loses more than 2^60 in half of the chunk.
  __device__ bool strong() const {
    const float* const logs = &shared.logs[mixture()][lane * 2];
    const float2 first = load_pair(logs), middle = load_pair(logs + kMiddle * kLogPitch),
                 last = load_pair(logs + (kTokens - 1) * kLogPitch);
    const float most = fmaxf(fmaxf(first.x - middle.x, first.y - middle.y),
                             fmaxf(middle.x - last.x, middle.y - last.y));
    return __any_sync(0xffffffffu, most > 60.0f);
  }

  // Keys and queries as the state meets them, decayed since the chunk's start or until its end, and
  // what the warp's half of the channels gives to G and H. What is multiplied is decayed from and
  // to the middle token: exponents of both signs, so tf32, which has a float's range.
  using Products = float[2][2][4];  // G, H
  __device__ void half_products(Stage<V>& to, Products& sum) const {
    const int g = lane / 4, p = lane % 4 * 2, j = mixture(), end = upper() ? kDim : kHalf;
    const float* const logs = shared.logs[j];
#pragma unroll 1
    for (int c = end - kHalf + p; c < end; c += 8) {
      const float2 middle = load_pair(logs + kMiddle * kLogPitch + c);
      const float2 since = load_pair(logs + behind(0, c)), until = load_pair(logs + behind(1, c));
      uint32_t k[4], q[4], b[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // tokens g and g + 8
        const int at = (g + 8 * h) * kKeyPitch + c;
        const float2 L = load_pair(logs + (g + 8 * h) * kLogPitch + c);
        const float2 key = load_halves(&shared.plain_k[at]);
        const float2 query = load_halves(&shared.plain_q[at]);
        const float2 up{exp2_fast(L.x - middle.x), exp2_fast(L.y - middle.y)};
        const float2 down{exp2_fast(middle.x - L.x), exp2_fast(middle.y - L.y)};
        const float2 x{key.x * up.x, key.y * up.y}, y{query.x * up.x, query.y * up.y};
        const float2 z{key.x * down.x, key.y * down.y};
        store_pair(&to.k[j][at], x.x * since.x, x.y * since.y);
        store_pair(&to.q[j][at], -y.x * since.x, -y.y * since.y);
        store_pair(&to.end[j][at], z.x * until.x, z.y * until.y);
        k[h] = to_tf32(x.x), k[2 + h] = to_tf32(x.y);
        q[h] = to_tf32(y.x), q[2 + h] = to_tf32(y.y);
        b[h][0] = to_tf32(z.x), b[h][1] = to_tf32(z.y);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        multiply_tf32(sum[0][n], k, b[n][0], b[n][1]);
        multiply_tf32(sum[1][n], q, b[n][0], b[n][1]);
      }
    }
  }
  __device__ static void store_pair(half* to, float low, float high) {
    *reinterpret_cast<uint32_t*>(to) = pack(low, high);
  }
  // The lower warp of a mixture adds G up, the upper one H, through the place of L.
  __device__ void add_products(Stage<V>& to, Products& sum) const {
    float* const mine = &shared.logs[mixture()][upper() ? 0 : 256];
    float* const other = &shared.logs[mixture()][upper() ? 256 : 0];
    meet_pair();  // both have read L
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      mine[32 * i + lane] = upper() ? sum[0][i / 4][i % 4] : sum[1][i / 4][i % 4];
    }
    meet_pair();
    const int g = lane / 4, p = lane % 4 * 2, j = mixture();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int t = g + i % 4 / 2 * 8, s = i / 4 * 8 + p + i % 2;
      const float rest = other[32 * i + lane];
      if (upper()) {
        const float one = sum[1][i / 4][i % 4] + rest;
        to.asked[j][t * kTokenPitch + s] = __float2half_rn(s <= t ? one : 0.0f);
      } else if (s < t) {
        to.gram[j][s * kTokens + t - s] = sum[0][i / 4][i % 4] + rest;
      }
    }
  }

  // Strong: keys and queries of the warp's half of the tokens. A lane has two channels.
  __device__ void decay_keys(Stage<V>& to) const {
    const int j = mixture(), c = lane * 2, first = upper() ? kTokens / 2 : 0;
    const float* const logs = &shared.logs[j][c];
    const float2 last = load_pair(logs + (kTokens - 1) * kLogPitch);
#pragma unroll 1
    for (int t = first; t < first + kTokens / 2; ++t) {
      const int at = t * kKeyPitch + c;
      const float2 L = load_pair(logs + t * kLogPitch);
      const float2 since{exp2_fast(L.x), exp2_fast(L.y)};
      const float2 until{exp2_fast(last.x - L.x), exp2_fast(last.y - L.y)};
      const float2 k = load_halves(&shared.plain_k[at]), q = load_halves(&shared.plain_q[at]);
      store_pair(&to.k[j][at], k.x * since.x, k.y * since.y);
      store_pair(&to.q[j][at], -q.x * since.x, -q.y * since.y);
      store_pair(&to.end[j][at], k.x * until.x, k.y * until.y);
    }
  }
  // Strong: G and H of mixture j for all t > s such that t lies in the upper and s in the lower
  // half of one run of 2 half tokens: both operands are decayed to the lower half's last token,
  // behind it on the left, up to it on the right, so that no exponent is positive. half = 1, 2, 4
  // and 8 have each pair once. Left are keys over queries of the eight t, right the eight s.
  __device__ void level(int half, Stage<V>& to) const {
    const int g = lane / 4, p = lane % 4 * 2, j = mixture();
    const auto run = [half](int i) { return (i & -half) * 2; };
    const int s = run(g) + (g & (half - 1)), t = s + half, middle = run(g) + half - 1;
    const float* logs = shared.logs[j];
    float sum[4] = {};
#pragma unroll 1
    for (int i = 0; i < kDim; i += 16) {
      uint32_t left[4], right[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = i + 8 * h + p;
        const float2 end = load_pair(logs + middle * kLogPitch + c);
        const float2 Lt = load_pair(logs + t * kLogPitch + c);
        const float2 Ls = load_pair(logs + s * kLogPitch + c);
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
      const int n = p + i, from = run(n) + (n & (half - 1));
      if (run(n) != run(g)) continue;
      to.gram[j][from * kTokens + t - from] = sum[i];
      to.asked[j][t * kTokenPitch + from] = __float2half_rn(sum[2 + i]);
      to.asked[j][from * kTokenPitch + t] = __float2half_rn(0.0f);
    }
  }

  __device__ void strong_products(Stage<V>& to) const {
    decay_keys(to);
#pragma unroll 1
    for (int half = upper() ? 2 : 8; half > (upper() ? 0 : 2); half /= 2) level(half, to);
    if (!upper() || lane >= kTokens) return;
    float sum = 0;  // <q_t, k_t>
#pragma unroll 1
    for (int c = 0; c < kDim; c += 2) {
      const float2 q = load_halves(&shared.plain_q[lane * kKeyPitch + c]);
      const float2 k = load_halves(&shared.plain_k[lane * kKeyPitch + c]);
      sum += q.x * k.x + q.y * k.y;
    }
    to.asked[mixture()][lane * kTokenPitch + lane] = __float2half_rn(sum);
  }

  __device__ void products(Stage<V>& to) const {
    const float last = shared.logs[mixture()][(kTokens - 1) * kLogPitch + key_dim()];
    to.decay[mixture()][key_dim()] = exp2_fast(last);
    if (strong()) return strong_products(to);
    Products sum = {};
    half_products(to, sum);
    add_products(to, sum);
  }

  __device__ void run() const {
    constexpr int kAhead = 2;  // chunks that the cache is asked for beforehand
    const int chunks = place.chunks();
    const float shift = op.dt_bias[place.mixed(mixture(), key_dim())];
    const float a = op.decay_a[place.head * kMixtures + mixture()];
    float next[kEight];
    prefetch(kTokens);
    load(0, next);
    Base::start();
#pragma unroll 1
    for (int n = 0; n < chunks; ++n) {
      prefetch((n + kAhead) * kTokens);
      if (warp < 6) Base::turn(n, warp);
      warp_arrive(&shared.v_full);
      decays(n * kTokens, a, shift, next);
      meet_convolvers();  // all keys and L are there
      Base::bring(n + 1);
      await_stage(shared, n);
      products(shared.stage[n % V::kStages]);
      warp_arrive(&shared.full[n % V::kStages]);
      meet_convolvers();  // keys and L have been read
    }
  }
};

}  // namespace weir::cuda::swila_chunk
