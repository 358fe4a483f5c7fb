#pragma once
#include <type_traits>

#include "kernels/delta_chunk_layout.cuh"

// The preparing warps of the chunk kernel: from raw projections to what the state needs of a chunk.
namespace weir::cuda::chunk {

constexpr float kLog2E = 1.4426950408889634f;

__device__ inline void meet_preparers() { meet(kPrepareBarrier, kPreparers); }

__device__ inline float4 zero4() { return {0, 0, 0, 0}; }
__device__ inline float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ inline void store_halves(half* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = {pack(x.x, x.y), pack(x.z, x.w)};
}
__device__ inline float4 load_halves(const half* from) {
  const uint2 packed = *reinterpret_cast<const uint2*>(from);
  const float2 low = unpack(packed.x), high = unpack(packed.y);
  return {low.x, low.y, high.x, high.y};
}
__device__ inline float4 scaled(float4 x, float s) { return {x.x * s, x.y * s, x.z * s, x.w * s}; }
__device__ inline float4 times(float4 a, float4 b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ inline float4 plus(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
template <typename F>
__device__ inline float4 each(float4 x, const F& f) {
  return {f(x.x), f(x.y), f(x.z), f(x.w)};
}

// 1 / (1 + exp(-x)) within 2.5e-4, half of a half's rounding: one instruction for the exponential.
__device__ inline float fast_sigmoid(float x) {
  float tanh;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(0.5f * x));
  return 0.5f + 0.5f * tanh;
}
__device__ inline float fast_silu(float x) { return x * fast_sigmoid(x); }

// The activations of queries and keys that the chunk kernel knows.
__device__ inline float4 activated(Activation activation, float4 x) {
  if (activation == Activation::Silu) return each(x, fast_silu);
  if (activation == Activation::None) return x;
  return each(x, [&](float one) {
    const float above = fmaxf(one, 0.0f);
    if (activation == Activation::Relu) return above;
    return above + exp2_fast(kLog2E * fminf(one, 0.0f));  // elu(x) + 1
  });
}

// log2(exp(softplus(x))). log(1 + e) is its series where 1 + e would lose e.
__device__ inline float log2_softplus(float x) {
  const float e = exp2_fast(fminf(kLog2E * x, 126.0f));
  const float series = kLog2E * e * (1.0f - e * (0.5f - e * (1.0f / 3.0f)));
  return x > 30.0f ? kLog2E * x : e < 0.015625f ? series : __log2f(1.0f + e);
}

// Consecutive tokens of one group of threads, each of them with four neighbouring channels of kDim.
template <int kDim>
struct Run {
  static constexpr int kLanes = kDim / 4;                           // threads of a group
  static constexpr int kCount = kTokens * kLanes / kPreparers;      // its tokens
  static_assert(kCount >= 1 && kLanes <= 32);
  int channel, first;  // first channel; first token of the chunk
  __device__ Run()
      : channel(threadIdx.x % kLanes * 4), first(threadIdx.x / kLanes * kCount) {}
};

// One of the three convolutions, from the first of the block's channels on.
struct Stream {
  const float* in;      // at the row's first token
  int64_t stride;
  const float *taps, *bias, *past;
};
__device__ inline Stream stream(const DeltaMix& op, const Place& place, int which) {
  const int64_t keys = int64_t(op.key_heads) * op.key_dim;
  const int64_t column = which < 2 ? int64_t(place.key_head) * op.key_dim
                                   : int64_t(place.value_head) * op.value_dim + place.value;
  const Acts in = which == 0 ? op.q : which == 1 ? op.k : op.v;
  const float* taps = which == 0 ? op.conv_q : which == 1 ? op.conv_k : op.conv_v;
  const float* bias = which == 0 ? op.conv_q_bias : which == 1 ? op.conv_k_bias : op.conv_v_bias;
  return {at(in, place.begin) + column, in.stride,
          taps == nullptr ? nullptr : taps + column * op.conv_width,
          bias == nullptr ? nullptr : bias + column, place.history + which * keys + column};
}

// Taps of dim channels to shared memory, as if the width were four.
__device__ inline void keep_taps(const Stream& s, int width, int dim, float* to) {
  for (int i = threadIdx.x; i < kTaps * dim; i += blockDim.x) {
    const int j = i / dim, channel = i % dim, tap = j - 4 + width;
    float x = 0;
    if (j == 4) {
      x = s.bias == nullptr ? 0.0f : s.bias[channel];
    } else if (width == 0) {
      x = j == 3 ? 1.0f : 0.0f;
    } else if (tap >= 0) {
      x = s.taps[channel * width + tap];
    }
    to[i] = x;
  }
}

// The convolution of four channels at kCount tokens from `first` of the row on, to x[0] ..
// x[kCount - 1]. What lies behind the row's end is zero before its convolution and must not be
// kept after it. `inside`: all of the chunk and the tokens before it are the row's.
template <int kCount>
__device__ inline void convolve(const DeltaMix& op, const Place& place, const Stream& s,
                                const float* taps, int dim, int first, int channel, bool inside,
                                float4 (&x)[kCount + 3]) {
  const float* const now = s.in + int64_t(first - 3) * s.stride + channel;
  if (inside) {
#pragma unroll
    for (int j = 0; j < kCount + 3; ++j) x[j] = load4(now + j * s.stride);
  } else {
#pragma unroll
    for (int j = 0; j < kCount + 3; ++j) {
      const int t = first + j - 3, kept = t + op.conv_width - 1;
      const bool here = t >= 0;
      const float* from = here ? now + j * s.stride : s.past + kept * place.channels + channel;
      const bool known = here ? t < place.count : !place.fresh && kept >= 0;
      x[j] = known ? load4(from) : zero4();
    }
  }
  float4 tap[kTaps];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) tap[j] = load4(taps + j * dim + channel);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float4 y = tap[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y = plus(y, times(tap[j], x[i + j]));
    x[i] = y;
  }
}

// kCount tokens' four columns of acts from the row's token `first` on; those behind the row's end
// read as its last.
template <int kCount>
__device__ inline void gather(const Acts& acts, const Place& place, int first, int64_t column,
                              float4 (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = load4(at(acts, place.begin + min(first + i, place.count - 1)) + column);
  }
}

// What normalises each of a group's vectors: their sums over lanes side by side.
template <int K>
__device__ inline void norm_scales(QkNorm norm, const float4* x, float (&scale)[Run<K>::kCount]) {
  const bool l2 = norm == QkNorm::L2;
#pragma unroll
  for (int i = 0; i < Run<K>::kCount; ++i) {
    const float4 y = x[i];
    scale[i] = l2 ? y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w : y.x + y.y + y.z + y.w;
  }
#pragma unroll
  for (int step = K / 8; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < Run<K>::kCount; ++i) {
      scale[i] += __shfl_xor_sync(0xffffffffu, scale[i], step);
    }
  }
#pragma unroll
  for (int i = 0; i < Run<K>::kCount; ++i) {
    scale[i] = l2 ? rsqrtf(scale[i] + 1e-6f) : __fdividef(1.0f, scale[i]);
  }
}

// Loads of a later chunk's inputs on their way to the L2 cache.
template <int K, int kValues>
__device__ inline void prefetch(const DeltaMix& op, const Place& place, int chunk_first) {
  const int64_t key = int64_t(place.key_head) * K;
  const int64_t value = int64_t(place.value_head) * op.value_dim + place.value;
  const auto lines = [&](const Acts& acts, int64_t column, auto dim) {
    constexpr int kOfToken = (dim.value + 31) / 32;  // 128 bytes each
    const int t = chunk_first + int(threadIdx.x) / kOfToken;
    if (acts.data == nullptr || threadIdx.x >= kTokens * kOfToken || t >= place.count) return;
    const float* line = at(acts, place.begin + t) + column + threadIdx.x % kOfToken * 32;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  };
  const std::integral_constant<int, K> keys;
  const std::integral_constant<int, kValues> values;
  lines(op.q, key, keys);
  lines(op.k, key, keys);
  lines(op.v, value, values);
  lines(op.gate, value, values);
  lines(op.erase, key, keys);
  lines(op.write, value, values);
  if (op.decay == Decay::PerChannel) {
    lines(op.decay_in, int64_t(place.decay_head) * K, keys);
  }
}

// The logits of a chunk's gates of the whole head, two tokens for each lane of the first warp.
struct ScalarLogits {
  float beta[2], decay[2];

  __device__ void load(const DeltaMix& op, const Place& place, int chunk_first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = chunk_first + 2 * int(threadIdx.x) + i;
      const bool known = t < place.count;
      const int64_t token = place.begin + t;
      beta[i] = known && op.beta.data != nullptr ? at(op.beta, token)[place.value_head] : 0.0f;
      decay[i] = known && op.decay == Decay::PerHead
                     ? at(op.decay_in, token)[place.decay_head] + op.dt_bias[place.decay_head]
                     : 0.0f;
    }
  }
};

// One chunk into one stage.
template <int K, bool kChannel, int kWarps>
struct Preparer {
  using Shared = Layout<K, kChannel, kWarps>;
  const DeltaMix& op;
  const Place& place;
  Shared& shared;
  typename Shared::Stage& to;
  int first;  // the chunk's first token in the row

  __device__ bool valid(int t) const { return first + t < place.count; }
  __device__ bool inside() const { return first > 0 && first + kTokens <= place.count; }
  __device__ int64_t token(int t) const { return place.begin + first + t; }

  // beta of every token, with L and what follows from it where one number decays a head. One warp.
  __device__ void scalar_gates(const ScalarLogits& logits) const {
    const int lane = threadIdx.x, t = 2 * lane;
    float g[2], beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      beta[i] = op.beta_scale * (op.beta.data == nullptr ? 1.0f : fast_sigmoid(logits.beta[i]));
      if (!valid(t + i)) beta[i] = 0;
      g[i] = 0;
      if (!kChannel && valid(t + i) && op.decay == Decay::PerHead) {
        const float a = op.decay_a[place.decay_head], x = logits.decay[i];
        g[i] = op.lower_bound < 0 ? kLog2E * op.lower_bound * fast_sigmoid(a * x)
                                  : -a * log2_softplus(x);
      }
      shared.beta[t + i] = beta[i];
      to.written[t + i] = op.write.data == nullptr ? beta[i] : 1.0f;
    }
    if (kChannel) return;
    float sum = g[0] + g[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += before;
    }
    const float last = __shfl_sync(0xffffffffu, sum, 31);
    const float L[2] = {sum - g[1], sum};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.logs[t + i] = L[i];
      to.recalled[t + i] = beta[i] * exp2_fast(L[i]);
      to.asked[t + i] = exp2_fast(L[i]);
      to.kept[t + i] = exp2_fast(last - L[i]);
    }
    if (lane == 0) to.decay[0] = exp2_fast(last);
  }

  // L within each thread's run of tokens, per channel; the runs' sums beside it.
  __device__ void channel_logs() const {
    constexpr int kCount = Run<K>::kCount;
    const Run<K> run;
    const int head = place.decay_head;
    float4 g[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) g[i] = zero4();
    if (op.decay != Decay::None) {
      const int64_t column = int64_t(head) * K + run.channel;
      float4 shift;
      if (op.decay == Decay::PerChannel) {
        gather<kCount>(op.decay_in, place, first + run.first, column, g);
        shift = load4(op.dt_bias + column);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int t = min(first + run.first + i, place.count - 1);
          g[i].x = g[i].y = g[i].z = g[i].w = at(op.decay_in, place.begin + t)[head];
        }
        shift.x = shift.y = shift.z = shift.w = op.dt_bias[head];
      }
      log2_decays<kCount>(op.decay_a[head], shift, g);
    }
    float4 sum = zero4();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int t = run.first + i;
      if (valid(t)) sum = plus(sum, g[i]);
      *reinterpret_cast<float4*>(&shared.logs[t * Shared::kLogPitch + run.channel]) = sum;
    }
    *reinterpret_cast<float4*>(&shared.run_sums[4 * threadIdx.x]) = sum;
  }

  template <int kCount>
  __device__ void log2_decays(float a, float4 shift, float4 (&g)[kCount]) const {
    if (op.lower_bound < 0) {
      const float bound = kLog2E * op.lower_bound;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        g[i] = each(plus(g[i], shift), [&](float x) { return bound * fast_sigmoid(a * x); });
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        g[i] = each(plus(g[i], shift), [&](float x) { return -a * log2_softplus(x); });
      }
    }
  }

  // After a barrier: the sums of the runs before are added.
  __device__ void join_logs() const {
    const Run<K> run;
    float4 before = zero4();
    for (int i = threadIdx.x % Run<K>::kLanes; i < int(threadIdx.x); i += Run<K>::kLanes) {
      before = plus(before, load4(&shared.run_sums[4 * i]));
    }
#pragma unroll
    for (int i = 0; i < Run<K>::kCount; ++i) {
      float4* const L = reinterpret_cast<float4*>(
          &shared.logs[(run.first + i) * Shared::kLogPitch + run.channel]);
      *L = plus(*L, before);
    }
  }

  // Queries and keys: convolved, activated, normalised.
  __device__ void keys() const {
    constexpr int kCount = Run<K>::kCount;
    const Run<K> run;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      float4 x[kCount + 3];
      float scale[kCount];
      convolve<kCount>(op, place, stream(op, place, which), shared.key_taps[which][0], K,
                       first + run.first, run.channel, inside(), x);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = activated(op.qk_activation, x[i]);
      norm_scales<K>(op.qk_norm, x, scale);
      const float whole = which == 0 ? rsqrtf(float(K)) : 1.0f;
      half* const kept = which == 0 ? to.q : kChannel ? to.end : to.k;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int t = run.first + i, place_of = t * Shared::kKeyPitch + run.channel;
        x[i] = valid(t) ? scaled(x[i], scale[i] * whole) : zero4();
        store_halves(&kept[place_of], x[i]);
      }
      if (kChannel && which == 1) erase(x);
    }
  }

  // The keys times beta or the erase gate; x is used up.
  __device__ void erase(float4 (&x)[Run<K>::kCount + 3]) const {
    constexpr int kCount = Run<K>::kCount;
    const Run<K> run;
    if (op.erase.data != nullptr) {
      float4 logit[kCount];
      gather<kCount>(op.erase, place, first + run.first,
                     int64_t(place.key_head) * K + run.channel, logit);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = scaled(times(x[i], each(logit[i], fast_sigmoid)), op.beta_scale);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = scaled(x[i], shared.beta[run.first + i]);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      store_halves(&to.k[(run.first + i) * Shared::kKeyPitch + run.channel], x[i]);
    }
  }
};

}  // namespace weir::cuda::chunk
