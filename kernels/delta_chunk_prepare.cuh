#pragma once
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

__device__ inline float fast_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + exp2_fast(-kLog2E * x));
}
__device__ inline float fast_activation(Activation activation, float x) {
  return activation == Activation::Silu ? x * fast_sigmoid(x) : apply(activation, x);
}

// The log decay in powers of two. log(1 + e) as its series where 1 + e would lose e.
__device__ inline float log2_decay(const DeltaMix& op, float a, float x) {
  if (op.lower_bound < 0) return kLog2E * op.lower_bound * fast_sigmoid(a * x);
  const float e = exp2_fast(fminf(kLog2E * x, 126.0f));
  const float series = kLog2E * e * (1.0f - e * (0.5f - e * (1.0f / 3.0f)));
  const float softplus = x > 30.0f ? kLog2E * x : e < 0.015625f ? series : __log2f(1.0f + e);
  return -a * softplus;
}

// Consecutive tokens of one group of threads, each of them with four neighbouring channels of kDim.
template <int kDim>
struct Run {
  static constexpr int kLanes = kDim / 4;                           // threads of a group
  static constexpr int kCount = kTokens * kLanes / kPreparers;      // its tokens
  static_assert(kCount >= 1 && kLanes <= 32);
  int lane, first;  // channel / 4; token of the chunk
  __device__ Run() : lane(threadIdx.x % kLanes), first(threadIdx.x / kLanes * kCount) {}
  __device__ int channel() const { return 4 * lane; }
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

// The taps of four channels, newest last, as if the width were four.
struct Taps {
  alignas(16) float tap[4][4];  // [channel][tap]
  float4 bias;

  __device__ Taps(const Stream& s, int channel, int width) {
    bias = s.bias == nullptr ? zero4() : load4(s.bias + channel);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float* from = s.taps + (channel + c) * width;
      if (width == 4) {
        *reinterpret_cast<float4*>(tap[c]) = load4(from);
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        tap[c][j] = width == 0 ? float(j == 3) : j >= 4 - width ? from[j - 4 + width] : 0.0f;
      }
    }
  }
  __device__ float4 apply(const float4* x) const {  // x[0] .. x[3], oldest first
    float4 y = bias;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y.x += tap[0][j] * x[j].x;
      y.y += tap[1][j] * x[j].y;
      y.z += tap[2][j] * x[j].z;
      y.w += tap[3][j] * x[j].w;
    }
    return y;
  }
};

// Calls take(token of the chunk, convolved channels) for each token of the thread's run; what lies
// behind the row's end is zero before its convolution and must not be kept after it.
template <int kDim, typename Take>
__device__ inline void convolve(const DeltaMix& op, const Place& place, const Stream& s,
                                int chunk_first, const Take& take) {
  constexpr int kCount = Run<kDim>::kCount;
  const Run<kDim> run;
  const int first = chunk_first + run.first;  // in the row
  const float* const now = s.in + first * s.stride + run.channel();
  float4 x[kCount + 3];
#pragma unroll
  for (int j = 0; j < kCount + 3; ++j) {
    const int t = first + j - 3, kept = t + op.conv_width - 1;
    const bool here = t >= 0;
    const float* from = here ? now + (j - 3) * s.stride
                             : s.past + kept * place.channels + run.channel();
    const bool known = here ? t < place.count : !place.fresh && kept >= 0;
    x[j] = known ? load4(from) : zero4();
  }
  const Taps taps(s, run.channel(), op.conv_width);
#pragma unroll
  for (int i = 0; i < kCount; ++i) take(run.first + i, taps.apply(x + i));
}

// What normalises a head's q or k, from its group's sums.
template <int K>
__device__ inline float norm_scale(QkNorm norm, float4 x) {
  const bool l2 = norm == QkNorm::L2;
  const float own = l2 ? x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w : x.x + x.y + x.z + x.w;
  const float sum = sum_over_lanes<K / 4>(own);
  return l2 ? rsqrtf(sum + 1e-6f) : 1.0f / sum;
}

// Loads of a later chunk's inputs on their way to the L2 cache.
template <int K>
__device__ inline void prefetch(const DeltaMix& op, const Place& place, int chunk_first,
                                int values) {
  const int64_t key = int64_t(place.key_head) * K;
  const int64_t value = int64_t(place.value_head) * op.value_dim + place.value;
  const auto lines = [&](const Acts& acts, int64_t column, int dim) {
    const int of_token = (dim + 31) / 32;  // 128 bytes each
    for (int i = threadIdx.x; i < kTokens * of_token; i += kPreparers) {
      const int t = chunk_first + i / of_token;
      if (acts.data == nullptr || t >= place.count) continue;
      const float* line = at(acts, place.begin + t) + column + i % of_token * 32;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
  };
  lines(op.q, key, K);
  lines(op.k, key, K);
  lines(op.v, value, values);
  lines(op.gate, value, values);
  lines(op.erase, key, K);
  lines(op.write, value, values);
  if (op.decay == Decay::PerChannel) lines(op.decay_in, int64_t(place.decay_head) * K, K);
}

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
  __device__ int64_t token(int t) const { return place.begin + first + t; }

  // beta of every token, with L and what follows from it where one number decays a head. One warp.
  __device__ void scalar_gates() const {
    const int lane = threadIdx.x, t = 2 * lane;
    float g[2], beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool known = valid(t + i);
      const float logit =
          known && op.beta.data != nullptr ? at(op.beta, token(t + i))[place.value_head] : 0.0f;
      beta[i] = op.beta_scale * (op.beta.data == nullptr ? 1.0f : fast_sigmoid(logit));
      if (!known) beta[i] = 0;
      g[i] = 0;
      if (!kChannel && known && op.decay == Decay::PerHead) {
        const int head = place.decay_head;
        g[i] = log2_decay(op, op.decay_a[head],
                          at(op.decay_in, token(t + i))[head] + op.dt_bias[head]);
      }
      shared.beta[t + i] = beta[i];
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
    const Run<K> run;
    const int head = place.decay_head;
    float4 sum = zero4();
    if (op.decay != Decay::None) {
      const bool whole = op.decay == Decay::PerHead;
      const int64_t column = whole ? head : int64_t(head) * K + run.channel();
      const auto read = [&](const float* from) {
        return whole ? float4{from[0], from[0], from[0], from[0]} : load4(from);
      };
      const float a = op.decay_a[head];
      const float4 shift = read(op.dt_bias + column);
      float4 in[Run<K>::kCount];
#pragma unroll
      for (int i = 0; i < Run<K>::kCount; ++i) {
        const int t = run.first + i;
        in[i] = valid(t) ? read(at(op.decay_in, token(t)) + column) : zero4();
      }
#pragma unroll
      for (int i = 0; i < Run<K>::kCount; ++i) {
        const int t = run.first + i;
        const float4 g =
            each(plus(in[i], shift), [&](float x) { return log2_decay(op, a, x); });
        if (valid(t)) sum = plus(sum, g);
        *reinterpret_cast<float4*>(&shared.logs[t * Shared::kLogPitch + run.channel()]) = sum;
      }
    } else {
      for (int i = 0; i < Run<K>::kCount; ++i) {
        *reinterpret_cast<float4*>(
            &shared.logs[(run.first + i) * Shared::kLogPitch + run.channel()]) = sum;
      }
    }
    *reinterpret_cast<float4*>(&shared.run_sums[4 * threadIdx.x]) = sum;
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
          &shared.logs[(run.first + i) * Shared::kLogPitch + run.channel()]);
      *L = plus(*L, before);
    }
  }

  __device__ void queries() const {
    const Run<K> run;
    const float scale = rsqrtf(float(K));
    convolve<K>(op, place, stream(op, place, 0), first, [&](int t, float4 x) {
      x = each(x, [&](float one) { return fast_activation(op.qk_activation, one); });
      x = scaled(x, norm_scale<K>(op.qk_norm, x) * scale);
      store_halves(&to.q[t * Shared::kKeyPitch + run.channel()], valid(t) ? x : zero4());
    });
  }

  __device__ void keys() const {
    const Run<K> run;
    const int64_t column = int64_t(place.key_head) * K + run.channel();
    convolve<K>(op, place, stream(op, place, 1), first, [&](int t, float4 x) {
      x = each(x, [&](float one) { return fast_activation(op.qk_activation, one); });
      x = scaled(x, norm_scale<K>(op.qk_norm, x));
      if (!valid(t)) x = zero4();
      if constexpr (kChannel) {
        store_halves(&to.end[t * Shared::kKeyPitch + run.channel()], x);
        if (op.erase.data == nullptr) {
          x = scaled(x, shared.beta[t]);
        } else if (valid(t)) {
          const float4 logit = load4(at(op.erase, token(t)) + column);
          x = times(x, each(logit, [&](float one) { return op.beta_scale * fast_sigmoid(one); }));
        }
      }
      store_halves(&to.k[t * Shared::kKeyPitch + run.channel()], x);
    });
  }

  __device__ void values() const {
    constexpr int kValues = 16 * kWarps;
    const Run<kValues> run;
    const int64_t column =
        int64_t(place.value_head) * op.value_dim + place.value + run.channel();
    convolve<kValues>(op, place, stream(op, place, 2), first, [&](int t, float4 x) {
      x = each(x, [](float one) { return one * fast_sigmoid(one); });
      if (op.write.data == nullptr) {
        x = scaled(x, shared.beta[t]);
      } else if (valid(t)) {
        x = times(x, each(load4(at(op.write, token(t)) + column), fast_sigmoid));
      }
      store_halves(&to.v[t * Shared::kValuePitch + run.channel()], valid(t) ? x : zero4());
    });
  }
};

}  // namespace weir::cuda::chunk
