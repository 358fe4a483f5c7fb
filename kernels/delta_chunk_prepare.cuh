#pragma once
#include "kernels/chunk_math_cuda.cuh"
#include "kernels/delta_chunk_layout.cuh"

// From raw projections to a chunk's vectors: convolutions, activations, norms and gates.
namespace weir::cuda::chunk {

constexpr int kPreparers = 256;  // threads of a block that prepare
__device__ inline void meet_preparers() { meet(1, kPreparers); }  // 0 is __syncthreads()'s

__device__ inline float4 zero4() { return {0, 0, 0, 0}; }
__device__ inline void store_halves(half* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = packed(x);
}
// To device memory. Written out, as the compiler makes four stores of an assignment.
__device__ inline void store4(float* to, float4 x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
__device__ inline float4 unpacked(uint2 x) {
  const float2 low = unpack(x.x), high = unpack(x.y);
  return {low.x, low.y, high.x, high.y};
}
__device__ inline float4 load_halves(const half* from) {
  return unpacked(*reinterpret_cast<const uint2*>(from));
}
__device__ inline float4 scaled(float4 x, float s) { return {x.x * s, x.y * s, x.z * s, x.w * s}; }
__device__ inline float4 times(float4 a, float4 b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ inline float4 plus(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ inline float4 minus(float4 a, float4 b) {
  return {a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w};
}
template <typename F>
__device__ inline float4 each(float4 x, const F& f) {
  return {f(x.x), f(x.y), f(x.z), f(x.w)};
}

// The activations of queries and keys that the chunk kernels know, on x[0] .. x[kCount - 1].
// kHalved: what goes through a SiLU is half of its argument.
template <int kCount, bool kHalved>
__device__ inline void activate(Activation activation, float4* x) {
  if (activation == Activation::Silu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = each(x[i], kHalved ? silu_of_half : fast_silu);
  } else if (activation != Activation::None) {
    const float rest = activation == Activation::Relu ? 0.0f : 1.0f;  // elu(x) + 1
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = each(x[i], [&](float one) {
        return fmaxf(one, 0.0f) + rest * exp2_fast(kLog2E * fminf(one, 0.0f));
      });
    }
  }
}

// log2(exp(softplus(x))) = max(y, 0) + log2(1 + 2^-|y|), of y = x log2(e). The logarithm is its
// series where 1 + e would lose e. All of it is computed, as the compiler would branch.
__device__ inline float log2_softplus(float y) {
  const float e = exp2_fast(-fabsf(y));
  float series = e * (kLog2E - 0.5f * kLog2E * e), log;
  asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(1.0f + e));
  asm volatile("" : "+f"(series));
  return fmaxf(y, 0.0f) + (e < 0.001953125f ? series : log);
}

// Consecutive tokens of one group of threads, each of them with four neighbouring channels of K.
template <int K>
struct Run {
  static constexpr int kLanes = K / 4;                          // threads of a group
  static constexpr int kCount = kTokens * kLanes / kPreparers;  // its tokens
  static_assert(kCount >= 1 && kLanes <= 32);
  int channel, first;  // first channel; first token of the chunk
  __device__ Run() : channel(threadIdx.x % kLanes * 4), first(threadIdx.x / kLanes * kCount) {}
};

// One of the three convolutions, from the first of the head's channels on.
struct Stream {
  const float* in;      // at the row's first token
  int64_t stride;
  const float *taps, *bias, *past;
};
__device__ inline Stream stream(const DeltaMix& op, const Place& place, int which) {
  const int64_t keys = int64_t(op.key_heads) * op.key_dim;
  const int64_t column = which < 2 ? int64_t(place.key_head) * op.key_dim
                                   : int64_t(place.value_head) * op.value_dim;
  const Acts in = which == 0 ? op.q : which == 1 ? op.k : op.v;
  const float* taps = which == 0 ? op.conv_q : which == 1 ? op.conv_k : op.conv_v;
  const float* bias = which == 0 ? op.conv_q_bias : which == 1 ? op.conv_k_bias : op.conv_v_bias;
  return {at(in, place.begin) + column, in.stride,
          taps == nullptr ? nullptr : taps + column * op.conv_width,
          bias == nullptr ? nullptr : bias + column, place.history + which * keys + column};
}

// A channel's taps, oldest first, as if the width were four.
__device__ inline float4 taps_of(const Stream& s, int width, int channel) {
  if (width == 4) return load4(s.taps + channel * 4);
  if (width == 0) return {0, 0, 0, 1};
  const float* const taps = s.taps + channel * width;
  return {0, width > 2 ? taps[width - 3] : 0.0f, width > 1 ? taps[width - 2] : 0.0f,
          taps[width - 1]};
}

// Four channels' taps of one age each, oldest first.
struct Taps {
  float4 age[4], bias;
};
__device__ inline Taps load_taps(const Stream& s, int width, int channel) {
  const float4 a = taps_of(s, width, channel), b = taps_of(s, width, channel + 1);
  const float4 c = taps_of(s, width, channel + 2), d = taps_of(s, width, channel + 3);
  return {{{a.x, b.x, c.x, d.x}, {a.y, b.y, c.y, d.y}, {a.z, b.z, c.z, d.z}, {a.w, b.w, c.w, d.w}},
          s.bias == nullptr ? zero4() : load4(s.bias + channel)};
}

// The convolution of four channels: x holds three tokens before the first of kCount, and ends with
// its results in front.
template <int kCount>
__device__ inline void apply_taps(const Taps& taps, float4 (&x)[kCount + 3]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float4 sum = taps.bias;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum = plus(sum, times(taps.age[j], x[i + j]));
    x[i] = sum;
  }
}

// The convolution of four channels at kCount tokens from `first` of the row on, to x[0] ..
// x[kCount - 1]. What lies behind the row's end is zero before its convolution and must not be
// kept after it. `inside`: all of the chunk and the tokens before it are the row's.
template <int kCount>
__device__ inline void convolve(const DeltaMix& op, const Place& place, const Stream& s, int first,
                                int channel, bool inside, float4 (&x)[kCount + 3]) {
  const float* const now = s.in + int64_t(first - 3) * s.stride + channel;
  if (inside) {
#pragma unroll
    for (int j = 0; j < kCount + 3; ++j) x[j] = load4(now + j * s.stride);
  } else {
#pragma unroll
    for (int j = 0; j < kCount + 3; ++j) {
      const int t = first + j - 3, kept = t + op.conv_width - 1;
      const bool here = t >= 0;
      const float* from =
          here ? now + j * s.stride : s.past + (place.kept(kept, op.conv_width) + channel);
      const bool known = here ? t < place.count : !place.fresh() && kept >= 0;
      x[j] = known ? load4(from) : zero4();
    }
  }
  apply_taps<kCount>(load_taps(s, op.conv_width, channel), x);
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

// What normalises each of the vectors of a group of K / 4 lanes. A lane gives half of its sums to
// another one for half of the other's until it has one vector's; all of them then ask it.
template <int K, int kCount>
__device__ inline void norm_scales(QkNorm norm, const float4* x, float (&scale)[kCount]) {
  constexpr int kLanes = K / 4;
  const bool sums = norm == QkNorm::Sum;
  float sum[kCount], other[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float4 y = x[i];
    sum[i] = sums ? y.x + y.y + y.z + y.w : y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
  }
  int step = kLanes / 2;
#pragma unroll
  for (int left = kCount / 2; left > 0; left /= 2, step /= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      other[i] = __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[i + left], step);
    }
#pragma unroll
    for (int i = 0; i < left; ++i) sum[i] = (upper ? sum[i + left] : sum[i]) + other[i];
  }
#pragma unroll
  for (; step > 0; step /= 2) sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], step);
  const float least = norm == QkNorm::L2 ? 0.0f : 1e-12f, more = norm == QkNorm::L2 ? 1e-6f : 0;
  const float own = sums ? __fdividef(1.0f, sum[0]) : rsqrt_fast(fmaxf(sum[0], least) + more);
  const int first = threadIdx.x % 32 / kLanes * kLanes;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scale[i] = __shfl_sync(0xffffffffu, own, first + i * (kLanes / kCount));
  }
}

// The logits of a chunk's gates of the whole head, two tokens for each lane of a warp.
struct ScalarLogits {
  float beta[2], decay[2];

  __device__ void load(const DeltaMix& op, const Place& place, int chunk_first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = chunk_first + 2 * int(threadIdx.x % 32) + i;
      const bool known = t < place.count;
      const int64_t token = place.begin + t;
      beta[i] = known && op.beta.data != nullptr ? at(op.beta, token)[place.value_head] : 0.0f;
      decay[i] = known && op.decay == Decay::PerHead
                     ? at(op.decay_in, token)[place.decay_head] + op.dt_bias[place.decay_head]
                     : 0.0f;
    }
  }
};

// What a block prepares a chunk in.
template <int K, bool kChannel>
struct Workshop {
  static constexpr int kLogPitch = K + 16, kDiagonalPitch = kBlock;
  Image<K, kChannel> image;
  float diagonal[4][kBlock * kDiagonalPitch];       // A's diagonal blocks, transposed
  float logs[kChannel ? kTokens * kLogPitch : kTokens];  // L, in powers of two
  float beta[kTokens];
  float run_sums[kChannel ? kPreparers * 4 : 4];    // log decays of each thread's tokens
  int row, chunk;
};

// Raw projections and decays where they are in device memory.
struct DeviceSource {
  static constexpr bool kHalved = false;
  const DeltaMix& op;
  const Place& place;
  int first;  // the chunk's first token in the row

  // Four channels at kCount of the chunk's tokens, convolved.
  template <int kCount>
  __device__ void convolved(int which, int token, int channel, float4 (&x)[kCount + 3]) const {
    const bool inside = first > 0 && first + kTokens <= place.count;
    convolve<kCount>(op, place, stream(op, place, which), first + token, channel, inside, x);
  }
  // Their decays' logits; behind the row's end any.
  template <int kCount>
  __device__ void decays(int token, int channel, float4 (&x)[kCount]) const {
    gather<kCount>(op.decay_in, place, first + token,
                   int64_t(place.decay_head) * op.key_dim + channel, x);
  }
};

// kPass: tokens of a thread at one time; the fewer, the more blocks a multiprocessor has registers
// for.
template <int K, bool kChannel, typename Shop = Workshop<K, kChannel>,
          typename Source = DeviceSource, int kPass = kChannel && K == 128 ? 8 : 4>
struct Preparer {
  const DeltaMix& op;
  const Place& place;
  Shop& shop;
  Source source;
  int first;  // the chunk's first token in the row

  __device__ bool valid(int t) const { return first + t < place.count; }

  // beta of every token, and L with what follows from it where one number decays a head. One warp.
  __device__ void scalar_gates(const ScalarLogits& logits) const {
    const int lane = threadIdx.x % 32, t = 2 * lane;
    float g[2], beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      beta[i] = op.beta_scale * (op.beta.data == nullptr ? 1.0f : fast_sigmoid(logits.beta[i]));
      if (!valid(t + i)) beta[i] = 0;
      g[i] = 0;
      if (!kChannel && valid(t + i) && op.decay == Decay::PerHead) {
        const float a = op.decay_a[place.decay_head], x = logits.decay[i];
        g[i] = op.lower_bound < 0 ? kLog2E * op.lower_bound * fast_sigmoid(a * x)
                                  : -a * log2_softplus(kLog2E * x);
      }
      shop.beta[t + i] = beta[i];
    }
    if constexpr (!kChannel) {
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
        shop.logs[t + i] = L[i];
        shop.image.recalled[t + i] = beta[i] * exp2_fast(L[i]);
        shop.image.asked[t + i] = exp2_fast(L[i]);
        shop.image.kept[t + i] = exp2_fast(last - L[i]);
      }
      if (lane < 4) shop.image.decay[lane] = exp2_fast(last);
    }
  }

  // L within each thread's run of tokens, per channel, in g; the runs' sums for the others.
  using RunLogs = float4[Run<K>::kCount];
  __device__ void channel_logs(RunLogs& g) const {
    constexpr int kCount = Run<K>::kCount;
    const Run<K> run;
    const int head = place.decay_head;
#pragma unroll
    for (int i = 0; i < kCount; ++i) g[i] = zero4();
    if (op.decay != Decay::None) {
      const int64_t column = int64_t(head) * K + run.channel;
      float4 shift;
      if (op.decay == Decay::PerChannel) {
        source.template decays<kCount>(run.first, run.channel, g);
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
      if (valid(run.first + i)) sum = plus(sum, g[i]);
      g[i] = sum;
    }
    *reinterpret_cast<float4*>(&shop.run_sums[4 * threadIdx.x]) = sum;
  }
  __device__ float4* logs_of(int t, int channel) const {
    return reinterpret_cast<float4*>(
        &shop.logs[t * Workshop<K, kChannel>::kLogPitch + channel]);
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
      const float4 moved = scaled(shift, kLog2E);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        g[i] = each(plus(scaled(g[i], kLog2E), moved), [&](float y) {
          return -a * log2_softplus(y);
        });
      }
    }
  }

  // After a barrier: the sums of the runs before are added, and L is kept.
  __device__ void join_logs(const RunLogs& g) const {
    const Run<K> run;
    float4 before = zero4();
    for (int i = threadIdx.x % Run<K>::kLanes; i < int(threadIdx.x); i += Run<K>::kLanes) {
      before = plus(before, load4(&shop.run_sums[4 * i]));
    }
#pragma unroll
    for (int i = 0; i < Run<K>::kCount; ++i) {
      *logs_of(run.first + i, run.channel) = plus(g[i], before);
    }
  }

  // Queries (0) or keys (1): convolved, activated, normalised.
  __device__ void keys(int which) const {
    const Run<K> run;
    const float whole = which == 0 ? rsqrtf(float(K)) : 1.0f;
    half* const kept = which == 0 ? shop.image.q : kChannel ? shop.image.end : shop.image.k;
#pragma unroll 1
    for (int from = run.first; from < run.first + Run<K>::kCount; from += kPass) {
      float4 x[kPass + 3], erased[kPass];
      float scale[kPass];
      const bool erases = kChannel && which == 1 && op.erase.data != nullptr;
      if (kPass == 4 && erases) load_erased(from, erased);  // early, if there is room
      source.template convolved<kPass>(which, from, run.channel, x);
      activate<kPass, Source::kHalved>(op.qk_activation, x);
      norm_scales<K>(op.qk_norm, x, scale);
      const PanelRun at(from, run.channel);
#pragma unroll
      for (int i = 0; i < kPass; ++i) x[i] = scaled(x[i], scale[i] * whole);
      drop_others(from, x);
#pragma unroll
      for (int i = 0; i < kPass; ++i) store_halves(&kept[at[i]], x[i]);
      if (kChannel && which == 1) erase(from, erased, x);
    }
  }

  // Of kCount tokens from `from` on, those behind the row's end become zero.
  template <int kCount>
  __device__ void drop_others(int from, float4 (&x)[kCount]) const {
    if (first + kTokens <= place.count) return;
#pragma unroll
    for (int i = 0; i < kCount - 3; ++i) {
      if (!valid(from + i)) x[i] = zero4();
    }
  }

  // The keys of tokens `from` .. times beta or the erase gate; x is used up.
  __device__ void load_erased(int from, float4 (&logit)[kPass]) const {
    gather<kPass>(op.erase, place, first + from,
                  int64_t(place.key_head) * K + Run<K>().channel, logit);
  }
  __device__ void erase(int from, float4 (&logit)[kPass], float4 (&x)[kPass + 3]) const {
    const Run<K> run;
    if (op.erase.data != nullptr) {
      if (kPass != 4) load_erased(from, logit);
#pragma unroll
      for (int i = 0; i < kPass; ++i) {
        x[i] = scaled(times(x[i], each(logit[i], fast_sigmoid)), op.beta_scale);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPass; ++i) x[i] = scaled(x[i], shop.beta[from + i]);
    }
    const PanelRun at(from, run.channel);
#pragma unroll
    for (int i = 0; i < kPass; ++i) store_halves(&shop.image.k[at[i]], x[i]);
  }

  // Values, convolved, activated and times beta or the write gate, to the tile's slices: 64 values
  // by each half of the block.
  __device__ void values(half* slices) const {
    constexpr int kCount = kChannel ? 8 : kPass;
    const int thread = threadIdx.x % 128, first_value = threadIdx.x / 128 * 64 + thread % 16 * 4;
    constexpr int kPasses = 8 / kCount;  // of a thread's tokens
#pragma unroll 1
    for (int pass = 0; first_value + pass / kPasses * 128 < op.value_dim; ++pass) {
      const int value = first_value + pass / kPasses * 128;
      const int run = thread / 16 * 8 + pass % kPasses * kCount;
      float4 x[kCount + 3];
      source.template convolved<kCount>(2, run, value, x);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = each(x[i], fast_silu);
      if (kChannel && op.write.data != nullptr) {
        float4 logit[kCount];
        gather<kCount>(op.write, place, first + run,
                       int64_t(place.value_head) * op.value_dim + value, logit);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          x[i] = times(x[i], each(logit[i], fast_sigmoid));
          if (!valid(run + i)) x[i] = zero4();
        }
      } else {  // beta is zero behind the row's end, and so is what is read there
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = scaled(x[i], shop.beta[run + i]);
      }
      half* const slice = slices + value / kSliceValues * kTokens * kSliceValues;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        store_halves(&slice[value_at(run + i, value % kSliceValues)], x[i]);
      }
    }
  }
};

}  // namespace weir::cuda::chunk
