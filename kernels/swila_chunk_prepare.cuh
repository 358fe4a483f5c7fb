#pragma once
#include "kernels/ring.h"
#include "kernels/swila_chunk_layout.cuh"

// The warps that make queries, keys and values of raw projections.
namespace weir::cuda::swila_chunk {

__device__ inline void store_halves(half* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = packed(x);
}

template <class V>
struct Convolver {
  static constexpr int kThreads = 32 * V::kConvolvers;
  const SwilaMix& op;
  const Maps& maps;
  const Place& place;
  Shared<V>& shared;
  int warp = int(threadIdx.x) / 32 - V::kFirstConvolver, lane = int(threadIdx.x) % 32;

  // The warp that has the least to do brings what is raw.
  static constexpr int kBringer = V::kGated ? V::kConvolvers - 1 : 0;

  __device__ static void meet_convolvers() { meet(kConvolved, kThreads); }

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

  // Asks for the raw projections of chunk n, queries, keys and values, from three tokens before it
  // on. What is not the row's own is some other row's, or zero: see add_past(), and it is not kept
  // behind the row's end.
  __device__ void bring(int n) const {
    if (n >= place.chunks()) return;
    if (threadIdx.x == 32 * (V::kFirstConvolver + kBringer)) {
#pragma unroll
      for (int of = 0; of < 3; ++of) {
        const uint32_t full = shared_address(&shared.raw_full[of]);
        const int channel = place.head * kDim + (of == 2 ? place.value : 0);
        barrier_expect(full, kRawTokens * (of == 2 ? V::kValues : kDim) * sizeof(float));
        bring_box(raw_of(of), maps.raw[of], full, channel,
                  place.begin + n * kTokens - (kWidth - 1));
      }
    }
    __syncwarp();
  }
  __device__ float* raw_of(int of) const { return of == 2 ? shared.raw_v : shared.raw[of]; }
  // By one warp: the row's past before its first token; zeros where there is none.
  __device__ void add_past(int of) const {
    const int width = of == 2 ? V::kValues : kDim;
    const int64_t all = int64_t(op.heads) * kDim;
    const float* const past = at(op.history, place.slot) + of * all +
                              place.channel(of == 2 ? place.value : 0);
    float* const to = raw_of(of);
    for (int i = lane; i < (kWidth - 1) * width; i += 32) {
      const int row = ring_row_of_age(place.oldest, i / width, kWidth - 1);
      to[i] = place.fresh ? 0.0f : past[row * 3 * all + i % width];
    }
    publish_to_copy_engine();
  }

  // Four channels of kRun neighbouring tokens, and of the three before them.
  template <int kRun>
  using Run = float4[kRun + kWidth - 1];

  // silu(conv(x)) of kRun tokens from the kRun + 3 at `raw` on, in place of the first of x; zeros
  // from token `count` on.
  template <int kRun>
  __device__ static void convolve(const float* raw, int pitch, const float* taps, int count,
                                  Run<kRun>& x) {
#pragma unroll
    for (int i = 0; i < kRun + kWidth - 1; ++i) x[i] = load4(raw + i * pitch);
    float4 tap[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) tap[j] = load4(taps + j * pitch);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      float4 y{0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        y.x = fmaf(tap[j].x, x[i + j].x, y.x);
        y.y = fmaf(tap[j].y, x[i + j].y, y.y);
        y.z = fmaf(tap[j].z, x[i + j].z, y.z);
        y.w = fmaf(tap[j].w, x[i + j].w, y.w);
      }
      x[i] = {fast_silu(y.x), fast_silu(y.y), fast_silu(y.z), fast_silu(y.w)};
    }
    if (count >= kRun) return;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i >= count) x[i] = {0, 0, 0, 0};
    }
  }

  // sum[i] of sixteen neighbouring lanes, of which each then has the sum of one i, see
  // lane_of_token().
  __device__ float sum_of_tokens(const float (&sum)[4]) const {
    float two[2];
    const bool one = lane & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      two[i] = (one ? sum[i + 2] : sum[i]) +
               __shfl_xor_sync(0xffffffffu, one ? sum[i] : sum[i + 2], 1);
    }
    return sum_of_tokens(two, 2);
  }
  __device__ float sum_of_tokens(const float (&sum)[2], int bit = 1) const {
    const bool second = lane & bit;
    float all = (second ? sum[1] : sum[0]) +
                __shfl_xor_sync(0xffffffffu, second ? sum[0] : sum[1], bit);
#pragma unroll
    for (int step = 2 * bit; step < 16; step *= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
    return all;
  }
  template <int kRun>
  __device__ int lane_of_token(int i) const {
    return (lane & 16) + (kRun == 2 ? i : i / 2 + i % 2 * 2);
  }

  // x becomes neighbouring queries (which = 0), their sign changed, or keys, at `to`.
  template <int kRun>
  __device__ void store_keys(int which, const Run<kRun>& x, half* to) const {
    float squares[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      squares[i] = x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
    }
    float scale = rsqrt_fast(sum_of_tokens(squares) + 1e-6f);
    if (which == 0) scale = -scale;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float by = __shfl_sync(0xffffffffu, scale, lane_of_token<kRun>(i));
      store_halves(&to[i * kKeyPitch], {x[i].x * by, x[i].y * by, x[i].z * by, x[i].w * by});
    }
  }
  __device__ half* keys_of(int which, int n) const {
    Stage<V>& stage = shared.stage[n % V::kStages];
    return which == 0 ? stage.q[0] : stage.k[0];
  }

  // One of six turns of chunk n: eight tokens' queries, keys or values. Sixteen lanes have four
  // channels each of four tokens.
  __device__ void turn(int n, int number) const {
    constexpr int kRun = 4;
    const int which = number / 2, channel = lane % 16 * 4;
    const bool value = which == 2;
    const int first = number % 2 * 8 + lane / 16 * kRun, pitch = value ? V::kValues : kDim;
    sleep_for(&shared.raw_full[which], n);
    if (channel >= pitch) return;
    Run<kRun> x;
    convolve<kRun>(raw_of(which) + first * pitch + channel, pitch,
                   (value ? shared.value_taps[0] : shared.key_taps[which][0]) + channel,
                   place.count - n * kTokens - first, x);
    if (!value) {
      store_keys<kRun>(which, x, &keys_of(which, n)[first * kKeyPitch + channel]);
      return;
    }
    if (n > 0) sleep_for(&shared.v_empty, n - 1);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      *reinterpret_cast<float4*>(&shared.v[(first + i) * V::kValuePitch + channel]) = x[i];
    }
  }

  // -H, or G.
  __device__ void products(bool asked, Stage<V>& stage) const {
    const int g = lane / 4, p = lane % 4 * 2;
    float sum[2][4] = {};
    product(asked ? stage.q[0] : stage.k[0], stage.k[0], sum);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int t = g + 8 * h, s = 8 * n + p;
        const float one = sum[n][2 * h], two = sum[n][2 * h + 1];
        if (!asked) {
          if (t > s) stage.gram[0][s * kTokens + t - s] = one;
          if (t > s + 1) stage.gram[0][(s + 1) * kTokens + t - s - 1] = two;
        } else {
          *reinterpret_cast<uint32_t*>(&stage.asked[0][t * kTokenPitch + s]) =
              pack(s <= t ? one : 0.0f, s + 1 <= t ? two : 0.0f);
        }
      }
    }
  }

  // Brings the first chunk, with the row's past.
  __device__ void start() const {
    bring(0);
    if (warp < 3) {
      sleep_for(&shared.raw_full[warp], 0);
      add_past(warp);
    }
    meet_convolvers();
  }
  // Four warps: two have queries and values, two keys and products.
  __device__ void run() const {
    const int chunks = place.chunks();
    start();
#pragma unroll 1
    for (int n = 0; n < chunks; ++n) {
      await_stage(shared, n);
      turn(n, warp);
      meet_convolvers();  // all keys are there
      if (warp < 2) {
        turn(n, 4 + warp);
      } else {
        products(warp == 2, shared.stage[n % V::kStages]);
      }
      warp_arrive(&shared.full[n % V::kStages]);
      meet_convolvers();  // what was raw has been read
      bring(n + 1);
    }
  }
};

}  // namespace weir::cuda::swila_chunk
