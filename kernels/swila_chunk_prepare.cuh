#pragma once
#include "kernels/swila_chunk_layout.cuh"

// The preparing warps: from raw projections to what the state needs of a chunk.
namespace weir::cuda::swila_chunk {

__device__ inline float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ inline void store_halves(half* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = {pack(x.x, x.y), pack(x.z, x.w)};
}
__device__ inline float2 load_pair(const float* from) {
  return *reinterpret_cast<const float2*>(from);
}
__device__ inline float2 load_halves(const half* from) {
  return unpack(*reinterpret_cast<const uint32_t*>(from));
}

// log2(exp(softplus(x))). log(1 + e) is its series where 1 + e would lose e.
__device__ inline float log2_softplus(float x) {
  const float e = exp2_fast(fminf(kLog2E * x, 126.0f));
  const float series = kLog2E * e * (1.0f - e * (0.5f - e * (1.0f / 3.0f)));
  return x > 30.0f ? kLog2E * x : e < 0.015625f ? series : __log2f(1.0f + e);
}

template <class V>
struct Preparer {
  static constexpr int kThreads = V::kPreparers, kWarps = kThreads / 32;
  const SwilaMix& op;
  const Place& place;
  Shared<V>& shared;
  int thread = int(threadIdx.x) - V::kStates - 128;

  __device__ static void meet_preparers() { meet(kPrepareBarrier, kThreads); }

  // Taps of all channels of the block, by all its threads.
  __device__ static void keep_taps(const SwilaMix& op, const Place& place, Shared<V>& shared) {
    for (int i = threadIdx.x; i < kWidth * kDim; i += V::kThreads) {
      const int tap = i / kDim, c = i % kDim;
      const int64_t from = place.channel(c) * kWidth + tap;
      shared.key_taps[0][tap][c] = op.conv_q[from];
      shared.key_taps[1][tap][c] = op.conv_k[from];
      if (c >= V::kValues) continue;
      shared.value_taps[tap][c] = op.conv_v[place.channel(place.value + c) * kWidth + tap];
    }
  }

  // Sixteen neighbouring threads have four channels each of one token; the queries of the chunk,
  // its keys and its values are kTurns turns each of all threads.
  static constexpr int kTurns = kTokens * 16 / kThreads;
  __device__ int channel() const { return thread % 16 * 4; }
  __device__ int token_of(int turn) const {
    return thread / 16 + turn % kTurns * (kThreads / 16);
  }
  struct Inputs {
    float4 x[kWidth];
  };

  // What a turn convolves, in the chunk that begins at `first`; zeros behind the row's end.
  __device__ void load(int first, int turn, Inputs& to) const {
    const int which = turn / kTurns, t = first + token_of(turn);
    const Acts in = which == 0 ? op.q : which == 1 ? op.k : op.v;
    const int c = channel() + (which == 2 ? place.value : 0);
    const int64_t column = place.channel(c), all = int64_t(op.heads) * kDim;
    const bool inside = t < place.count && (which < 2 || channel() < V::kValues);
    const float* const past = op.history.data + int64_t(place.slot) * op.history.stride +
                              which * all + column;
    const float* const now = in.data + column;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int source = t - (kWidth - 1) + j;
      const bool here = source >= 0, known = inside && (here || !place.fresh);
      const float* from = here ? now + (place.begin + source) * in.stride
                               : past + (source + kWidth - 1) * 3 * all;
      to.x[j] = known ? load4(from) : float4{0, 0, 0, 0};
    }
  }

  // silu(conv(x)), taps [kWidth][pitch].
  __device__ static float4 convolve(const Inputs& in, const float* taps, int pitch) {
    float4 y{0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float4 tap = load4(taps + j * pitch);
      y.x += tap.x * in.x[j].x;
      y.y += tap.y * in.x[j].y;
      y.z += tap.z * in.x[j].z;
      y.w += tap.w * in.x[j].w;
    }
    return {y.x * fast_sigmoid(y.x), y.y * fast_sigmoid(y.y), y.z * fast_sigmoid(y.z),
            y.w * fast_sigmoid(y.w)};
  }

  __device__ static float dot(float4 a, float4 b) {
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
  }
  __device__ static float sum_of_token(float x) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }
  __device__ static float4 scaled(float4 a, float by) {
    return {a.x * by, a.y * by, a.z * by, a.w * by};
  }

  // Queries, keys and values of the chunk that begins at `first`. `next` has the first turn's
  // inputs, and in the end those of the next chunk.
  __device__ void vectors(int first, Stage<V>& to, Inputs& next) const {
    float4 query{0, 0, 0, 0};
#pragma unroll 1
    for (int turn = 0; turn < 3 * kTurns; ++turn) {
      const Inputs in = next;
      const bool last = turn + 1 == 3 * kTurns;
      load(last ? first + kTokens : first, last ? 0 : turn + 1, next);
      const int which = turn / kTurns, t = token_of(turn);
      if (which == 2) {
        if (channel() >= V::kValues) continue;
        *reinterpret_cast<float4*>(&to.v[t * V::kValuePitch + channel()]) =
            convolve(in, &shared.value_taps[0][channel()], V::kValues);
        continue;
      }
      float4 x = convolve(in, &shared.key_taps[which][0][channel()], kDim);
      x = scaled(x, rsqrtf(sum_of_token(dot(x, x)) + 1e-6f));
      const int at = t * kKeyPitch + channel();
      if constexpr (V::kGated) {
        static_assert(kTurns == 1);
        store_halves(&(which == 0 ? shared.plain_q : shared.plain_k)[at], x);
        const float both = sum_of_token(dot(query, x));
        if (which == 1 && channel() == 0) shared.diagonal[t] = both;
        query = x;
      } else {
        store_halves(&(which == 0 ? to.q : to.k)[0][at], which == 0 ? scaled(x, -1) : x);
      }
    }
  }

  // Not gated: G by the first warp, H by the second.
  __device__ void products(Stage<V>& to) const {
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, p = lane % 4 * 2;
    if (warp > 1) return;
    const uint32_t left = rows_of_a(warp == 0 ? to.k[0] : to.q[0], kKeyPitch);
    const uint32_t right = rows_of_b(to.k[0], kKeyPitch);
    float sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < kDim; i += 16) {
      uint32_t a[4], b[4];
      load_matrices(a, left + 2 * i);
      load_matrices(b, right + 2 * i);
      multiply(sum[0], a, b[0], b[1]);
      multiply(sum[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int t = g + 8 * h, s = 8 * n + p;
        if (warp == 0) {
          *reinterpret_cast<float2*>(&to.gram[0][t * kTokens + s]) = {sum[n][2 * h],
                                                                      sum[n][2 * h + 1]};
        } else {
          *reinterpret_cast<uint32_t*>(&to.asked[0][t * kTokenPitch + s]) =
              pack(s <= t ? -sum[n][2 * h] : 0.0f, s + 1 <= t ? -sum[n][2 * h + 1] : 0.0f);
        }
      }
    }
  }

  // Gated: warps j and j + 4 have mixture j, each 32 of its key dims, one a lane.
  __device__ int mixture() const { return thread / 32 % kMixtures; }
  __device__ int key_dim() const { return thread / (32 * kMixtures) * 32 + thread % 32; }

  // The log decays' sums L from the chunk's start.
  __device__ void decays(int first) const {
    const int64_t column = place.mixed(mixture(), key_dim());
    const float shift = op.dt_bias[column];
    const float a = op.decay_a[place.head * kMixtures + mixture()];
    const float* const in = op.decay_in.data + column;
    const auto load = [&](int t) {
      return in[(place.begin + min(first + t, place.count - 1)) * op.decay_in.stride];
    };
    constexpr int kFour = 4;
    float sum = 0, next[kFour];
#pragma unroll
    for (int i = 0; i < kFour; ++i) next[i] = load(i);
#pragma unroll 1
    for (int t = 0; t < kTokens; t += kFour) {
      float x[kFour];
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        x[i] = a * log2_softplus(next[i] + shift);
        next[i] = load(t + kFour + i);
      }
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        if (first + t + i < place.count) sum -= x[i];
        shared.logs[mixture()][(t + i) * kLogPitch + key_dim()] = sum;
      }
    }
  }

  // Keys and queries as the state meets them: decayed since the chunk's start, or until its end.
  __device__ void decay_keys(Stage<V>& to) const {
    const int j = mixture(), c = key_dim();
    const float* const logs = &shared.logs[j][c];
    const float last = logs[(kTokens - 1) * kLogPitch];
#pragma unroll 4
    for (int t = 0; t < kTokens; ++t) {
      const int at = t * kKeyPitch + c;
      const float k = __half2float(shared.plain_k[at]), q = __half2float(shared.plain_q[at]);
      const float L = logs[t * kLogPitch];
      const float since = exp2_fast(L), until = exp2_fast(last - L);
      to.k[j][at] = __float2half_rn(k * since);
      to.q[j][at] = __float2half_rn(-q * since);
      to.end[j][at] = __float2half_rn(k * until);
    }
    to.decay[j][c] = exp2_fast(last);
  }

  // Gated: G and H of mixture j for all t > s such that t lies in the upper and s in the lower half
  // of one run of 2 half tokens: both operands are decayed to the lower half's last token, behind
  // it on the left, up to it on the right, so that no exponent is positive. half = 1, 2, 4, 8 have
  // each pair once. Left are the keys over the queries of the eight t, right are the eight s.
  __device__ void level(int half, Stage<V>& to) const {
    const int lane = thread % 32, g = lane / 4, p = lane % 4 * 2, j = mixture();
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
      to.gram[j][t * kTokens + from] = sum[i];
      to.asked[j][t * kTokenPitch + from] = __float2half_rn(sum[2 + i]);
      to.asked[j][from * kTokenPitch + t] = __float2half_rn(0.0f);
    }
  }

  __device__ void gated_products(Stage<V>& to) const {
    const bool upper = thread >= kThreads / 2;
#pragma unroll 1
    for (int half = upper ? 2 : 8; half > (upper ? 0 : 2); half /= 2) level(half, to);
    const int t = thread % 32;
    if (upper && t < kTokens) {
      to.asked[mixture()][t * kTokenPitch + t] = __float2half_rn(shared.diagonal[t]);
    }
  }

  // Has a later chunk's inputs brought to the L2 cache, but for those that are fetched early, by
  // the blocks of a head's first slice.
  __device__ void prefetch(int first) const {
    constexpr int kLine = 32, kOfVector = kDim / kLine, kOfMixed = kMixtures * kOfVector;
    constexpr int kDecays = 3 * kOfVector + kOfMixed;  // the first of their lines
    constexpr int kLines = kDecays + (V::kGated ? kOfMixed : 0);
    if (place.value != 0) return;
#pragma unroll 1
    for (int i = thread; i < kTokens * kLines; i += kThreads) {
      const int t = first + i / kLines, line = i % kLines;
      if (t >= place.count) return;
      Acts in = op.query_router;
      int64_t column = place.mixed(0, 0) + (line - 3 * kOfVector) * kLine;
      if (line < 3 * kOfVector) {
        in = line < kOfVector ? op.q : line < 2 * kOfVector ? op.k : op.v;
        column = place.channel(line % kOfVector * kLine);
      } else if (line >= kDecays) {
        in = op.decay_in;
        column -= kOfMixed * kLine;
      }
      prefetch_line(at(in, place.begin + t) + column);
    }
  }

  __device__ void run() const {
    constexpr int kAhead = 3;  // chunks that the cache is asked for beforehand
    const int chunks = place.chunks();
    Inputs next;
    load(0, 0, next);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      Stage<V>& to = shared.stage[c % 2];
      const int first = c * kTokens;
      if (c >= 2) {
        meet(kEmpty + c % 2, V::kStates + kThreads);
      } else {
        meet_preparers();
      }
      prefetch(first + kAhead * kTokens);
      if constexpr (V::kGated) decays(first);
      vectors(first, to, next);
      meet_preparers();
      if constexpr (V::kGated) {
        decay_keys(to);
        gated_products(to);
      } else {
        products(to);
      }
      arrive(kFull + c % 2, V::kStates + kThreads);
    }
  }
};

}  // namespace weir::cuda::swila_chunk
