#pragma once
#include "kernels/async_cuda.cuh"
#include "kernels/ring.h"

// What the decode kernels of DeltaMix share: a token's vectors from its raw projections, and the
// history of the short convolution.
namespace weir::cuda::delta {

// A token's vectors, in shared memory. Keys and queries are not normalised: the scale is a number.
struct Vectors {
  float *q, *k;    // [key_dim]
  float* decay;    // [key_dim], exp(g)
  float* erase;    // [key_dim], k times beta or the erase gate
  float* v;        // [values of the slice], times beta or the write gate
  float* out;      // the same
  float* kept;     // [conv_width - 1, 2 key_dim + values of the slice], the last inputs by age
};

// Where the block is.
struct Place {
  int key_head, value_head, decay_head;
  int value0, values;    // the slice's values of a head
  int token, begin;      // in the row; the row's first token in the step
  bool fresh;            // the row starts from a zero state
  int oldest;            // the ring's row that the row's first input replaces
  float* history;        // the row's, [conv_width - 1, channels]
  int channels;          // of a row of the history
};

// Floats that a block's vectors take.
__host__ __device__ inline int vector_floats(const DeltaMix& op, int values) {
  const int kept = op.conv_width > 1 ? op.conv_width - 1 : 0;
  return 4 * op.key_dim + 2 * values + kept * (2 * op.key_dim + values);
}

__device__ inline Vectors vectors(const DeltaMix& op, int values, float* shared) {
  const int K = op.key_dim;
  return {shared,         shared + K,          shared + 2 * K,
          shared + 3 * K, shared + 4 * K,      shared + 4 * K + values,
          shared + 4 * K + 2 * values};
}

// One of the block's channels: of q below key_dim, of k below 2 key_dim, then of v.
struct Channel {
  const float* now;            // at the block's token
  int64_t stride;
  const float *taps, *bias;    // the channel's own; bias may be null
  float* past;                 // in the first row of the history
  const float *gate, *shift;   // the decay's, erase's or write's logit; dt_bias. May be null
};

__device__ inline Channel channel(const DeltaMix& op, const Place& place, int i) {
  const int K = op.key_dim;
  const int which = i < K ? 0 : i < 2 * K ? 1 : 2;
  const int64_t all_keys = int64_t(op.key_heads) * K, token = place.begin + place.token;
  const int64_t column =
      which < 2 ? int64_t(place.key_head) * K + (which == 0 ? i : i - K)
                : int64_t(place.value_head) * op.value_dim + place.value0 + i - 2 * K;
  const Acts in = which == 0 ? op.q : which == 1 ? op.k : op.v;
  const float* taps = which == 0 ? op.conv_q : which == 1 ? op.conv_k : op.conv_v;
  const float* bias = which == 0 ? op.conv_q_bias : which == 1 ? op.conv_k_bias : op.conv_v_bias;
  const Acts gate = which == 0 ? op.decay_in : which == 1 ? op.erase : op.write;
  const int64_t decay_at = op.decay == Decay::PerHead
                               ? place.decay_head
                               : int64_t(place.decay_head) * K + (which == 0 ? i : 0);
  const bool gated = gate.data != nullptr && (which > 0 || op.decay != Decay::None);
  const int64_t past = which * all_keys + column;
  return {.now = in.data + token * in.stride + column,
          .stride = in.stride,
          .taps = taps + column * op.conv_width,
          .bias = bias == nullptr ? nullptr : bias + column,
          .past = place.history + past,
          .gate = gated ? gate.data + token * gate.stride + (which == 0 ? decay_at : column)
                        : nullptr,
          .shift = gated && which == 0 ? op.dt_bias + decay_at : nullptr};
}

__device__ inline float read(const float* from) { return from != nullptr ? *from : 0.0f; }
// What an earlier op of the step wrote, perhaps while this kernel was running: past L1.
__device__ inline float read_new(const float* from) {
  return from != nullptr ? __ldcg(from) : 0.0f;
}

// What a channel reads from memory for one token, all of it without a branch, so that every load
// is on its way before the first is waited for. load_kept() reads what no kernel of the same
// program writes before this one (weights and history); load_new() the activations.
template <int kWidth>
struct Raw {
  float x[kWidth], tap[kWidth];  // oldest first
  float bias, gate, shift;

  __device__ inline void load_kept(const Channel& c, const Place& place) {
    const float4 taps = *reinterpret_cast<const float4*>(c.taps);
    tap[0] = taps.x, tap[1] = taps.y, tap[2] = taps.z, tap[3] = taps.w;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const bool kept = kWidth - 1 - j > place.token && !place.fresh;
      const int row = ring_row_of_age(place.oldest, place.token + j, kWidth - 1);
      x[j] = kept ? c.past[row * place.channels] : 0.0f;
    }
    bias = read(c.bias);
    shift = read(c.shift);
  }
  __device__ inline void load_new(const Channel& c, const Place& place) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int back = kWidth - 1 - j;  // tokens ago
      if (back <= place.token) x[j] = __ldcg(c.now - back * c.stride);
    }
    gate = read_new(c.gate);
  }
  // `kept`, unless null, receives the inputs that the next token will look back at, oldest first.
  __device__ inline float convolved(const DeltaMix&, const Place&, int, float* kept,
                                    int kept_stride) const {
    float sum = bias;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sum += tap[j] * x[j];
      if (kept != nullptr && j > 0) kept[(j - 1) * kept_stride] = x[j];
    }
    return sum;
  }
};

// Any width, also none; slower.
template <>
struct Raw<0> {
  float gate, shift;

  __device__ inline void load_kept(const Channel& c, const Place&) { shift = read(c.shift); }
  __device__ inline void load_new(const Channel& c, const Place&) { gate = read_new(c.gate); }
  __device__ inline float convolved(const DeltaMix& op, const Place& place, int i, float* kept,
                                    int kept_stride) const {
    const Channel c = channel(op, place, i);
    const int width = op.conv_width;
    if (width == 0 || (op.values_ready && i >= 2 * op.key_dim)) return __ldcg(c.now);
    float sum = read(c.bias);
    for (int j = 0; j < width; ++j) {
      const int back = width - 1 - j;
      float x = 0;
      if (back <= place.token) {
        x = __ldcg(c.now - back * c.stride);
      } else if (!place.fresh) {
        x = c.past[ring_row_of_age(place.oldest, place.token + j, width - 1) * place.channels];
      }
      sum += c.taps[j] * x;
      if (kept != nullptr && j > 0) kept[(j - 1) * kept_stride] = x;
    }
    return sum;
  }
};

// An unusual activation, by a call: their code would not fit the instruction cache.
__device__ __noinline__ inline float apply_any(Activation activation, float x) {
  return apply(activation, x);
}

// What normalises a q or k, from its sum or that of its squares; the usual one quickly.
__device__ inline float scale_of(QkNorm norm, float sum) {
  if (norm == QkNorm::L2) return rsqrtf(sum + 1e-6f);
  return norm == QkNorm::L2Max ? 1.0f / fmaxf(sqrtf(sum), 1e-6f) : 1.0f / sum;
}

// exp(g) from its logit with dt_bias added.
__device__ inline float decay_of(const DeltaMix& op, float a, float x) {
  if (op.decay == Decay::None) return 1.0f;
  if (op.lower_bound < 0) return expf(op.lower_bound * sigmoid(a * x));
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  return expf(-a * softplus);
}

// kAtOnce of a thread's channels, `first`, `first` + kThreads ... below 2 key_dim + values: loaded,
// and some time later made into q, k, decay, erase and v. Only with kRouted may values be ready,
// and may nothing be erased.
template <int kWidth, int kThreads, int kAtOnce, bool kRouted = false>
struct Pass {
  static_assert(!kRouted || kWidth == 0, "Raw of a width would convolve values that are ready");
  Raw<kWidth> raw[kAtOnce];
  float decay_a, beta_in;

  // With `waits` set, what this op's predecessors wrote is read only after they are done.
  __device__ inline void load(const DeltaMix& op, const Place& place, int first, bool waits) {
    load_kept(op, place, first);
    if (waits) wait_for_predecessor();
    load_new(op, place, first);
  }
  __device__ inline void load_kept(const DeltaMix& op, const Place& place, int first) {
    const int all = 2 * op.key_dim + place.values;
    decay_a = op.decay == Decay::None ? 0.0f : op.decay_a[place.decay_head];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      raw[u].load_kept(channel(op, place, min(first + u * kThreads, all - 1)), place);
    }
  }
  __device__ inline void load_new(const DeltaMix& op, const Place& place, int first) {
    const int all = 2 * op.key_dim + place.values;
    beta_in = read_new(op.beta.data == nullptr
                           ? nullptr
                           : at(op.beta, place.begin + place.token) + place.value_head);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      raw[u].load_new(channel(op, place, min(first + u * kThreads, all - 1)), place);
    }
  }

  // With `keeps` set, s.kept receives what becomes the history.
  __device__ inline void make(const DeltaMix& op, const Place& place, int first, const Vectors& s,
                              bool keeps) const {
    const int K = op.key_dim, all = 2 * K + place.values;
    const float beta = op.beta_scale * (op.beta.data == nullptr ? 1.0f : sigmoid(beta_in));
    const bool erases = !kRouted || op.erases;
    const Activation of_values =
        kRouted && op.values_ready ? Activation::None : Activation::Silu;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = first + u * kThreads;
      if (i >= all) continue;
      const float x = apply(i < 2 * K ? op.qk_activation : of_values,
                            raw[u].convolved(op, place, i, keeps ? s.kept + i : nullptr, all));
      const float gate = sigmoid(raw[u].gate);
      if (i < K) {
        s.q[i] = x;
        s.decay[i] = decay_of(op, decay_a, raw[u].gate + raw[u].shift);
      } else if (i < 2 * K) {
        s.k[i - K] = x;
        s.erase[i - K] =
            erases ? x * (op.erase.data == nullptr ? beta : op.beta_scale * gate) : 0.0f;
      } else {
        s.v[i - 2 * K] = erases ? x * (op.write.data == nullptr ? beta : gate) : x;
      }
    }
  }
};

// What normalises a head's q or k: every warp finds it for itself.
__device__ inline float head_scale(QkNorm norm, const float* x, int K) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < K; i += 32) sum += norm == QkNorm::Sum ? x[i] : x[i] * x[i];
  sum = sum_over_lanes(sum);
  if (norm == QkNorm::L2Max) return 1.0f / fmaxf(sqrtf(sum), 1e-6f);
  return norm == QkNorm::L2 ? 1.0f / sqrtf(sum + 1e-6f) : 1.0f / sum;
}

// What make() kept of the row's `tokens` joins the history, once every block of the cluster has
// read it. q's and k's channels are divided among the blocks, and wait for the last value head that
// reads them. Values that are ready have none.
template <int kThreads>
__device__ inline void remember(const DeltaMix& op, const Place& place, const Vectors& s,
                                int thread, int tokens, bool last_head, int slice, int slices) {
  const int K = op.key_dim, all = 2 * K + place.values, kept = op.conv_width - 1;
  const int from = place.fresh ? 0 : max(0, kept - tokens);  // what is older is there
  const int oldest = ring_row(place.oldest + tokens, kept);
  for (int i = thread; i < all; i += kThreads) {
    if (i < 2 * K ? !last_head || i / 32 % slices != slice : op.values_ready) continue;
    float* past = channel(op, place, i).past;
    for (int h = from; h < kept; ++h) {
      past[ring_row_of_age(oldest, h, kept) * place.channels] = s.kept[h * all + i];
    }
  }
}

__device__ inline float dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
__device__ inline float4 times(float4 a, float4 b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ inline float4 plus(float4 a, float scale, float4 b) {
  return {a.x + scale * b.x, a.y + scale * b.y, a.z + scale * b.z, a.w + scale * b.w};
}

}  // namespace weir::cuda::delta
