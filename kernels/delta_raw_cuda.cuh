#pragma once
#include "kernels/delta_prepare_cuda.cuh"

// What the kernel of delta_stream_cuda.cu makes of the raw vectors of a row's one token: a warp
// brings a head's to shared memory and makes the head's vectors there.
namespace weir::cuda::delta {

// A key head of a row of one token: its value heads are worked on by the same block.
struct Unit {
  Slot slot;
  int token, key_head;
  bool fresh;
};

// A head's vectors, in floats: q, k, decay, erase, v, the answer, and the scales of q and k.
__host__ __device__ inline int head_floats(const DeltaMix& op) {
  return 4 * op.key_dim + 2 * op.value_dim + 4;
}

// Where a head's raw vectors lie, in floats from the first. Before `taps`: the convolution's
// inputs, [its width, 2 key_dim + value_dim], oldest first; the last are the token's own.
struct RawLayout {
  int taps, bias, decay, shift, erase, write, size;
};

__host__ __device__ inline RawLayout raw_layout(const DeltaMix& op) {
  const int K = op.key_dim, V = op.value_dim, all = 2 * K + V, width = op.conv_width;
  const bool biased = op.conv_q_bias != nullptr || op.conv_k_bias != nullptr ||
                      op.conv_v_bias != nullptr;
  const int channels = op.decay == Decay::PerChannel ? K : 0;
  RawLayout at{};
  at.taps = (width > 1 ? width : 1) * all;
  at.bias = at.taps + width * all;
  at.decay = at.bias + (biased ? all : 0);
  at.shift = at.decay + channels;
  at.erase = at.shift + channels;
  at.write = at.erase + (op.erase.data == nullptr ? 0 : K);
  at.size = at.write + (op.write.data == nullptr ? 0 : V);
  return at;
}

// A warp's copies to and from shared memory, of a multiple of four floats.
__device__ inline void bring_row(float* to, const float* from, int floats) {
#pragma unroll 1
  for (int i = threadIdx.x % 32 * 4; i < floats; i += 128) copy_16_bytes(to + i, from + i);
}
__device__ inline void take_row(float* to, const float* from, int floats) {
#pragma unroll 1
  for (int i = threadIdx.x % 32 * 4; i < floats; i += 128) {
    *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(from + i);
  }
}

// Where a head's convolved channels lie: of q, k and v.
struct Columns {
  int64_t q, k, v;
};

// A head of a unit, and the slot's history.
struct Head {
  int key_head, value_head, decay_head;
  float* history;
  int64_t channels;  // of a row of the history
  Columns past;      // its channels among them

  __device__ Head(const DeltaMix& op, const Unit& unit, int value_head)
      : key_head(unit.key_head), value_head(value_head),
        decay_head(value_head * op.decay_heads / op.value_heads),
        history(op.history.data == nullptr ? nullptr : at(op.history, unit.slot)) {
    const int64_t keys = int64_t(op.key_heads) * op.key_dim,
                  key = int64_t(key_head) * op.key_dim;
    channels = 2 * keys + int64_t(op.value_heads) * op.value_dim;
    past = {key, keys + key, 2 * keys + int64_t(value_head) * op.value_dim};
  }
};

template <int kWidth>
__device__ inline int width_of(const DeltaMix& op) {
  return kWidth > 0 ? kWidth : op.conv_width;
}

// A warp has a head's raw vectors brought that no kernel of the same program writes.
template <int kWidth>
__device__ inline void bring_kept(const DeltaMix& op, const RawLayout& layout, const Head& head,
                                  bool fresh, float* raw) {
  const int K = op.key_dim, V = op.value_dim, all = 2 * K + V, width = width_of<kWidth>(op);
#pragma unroll 1
  for (int r = 0; r + 1 < width; ++r) {
    float* const to = raw + r * all;
    const float* const from = head.history + r * head.channels;
    if (fresh) {
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < all; i += 32) to[i] = 0.0f;
    } else {
      bring_row(to, from + head.past.q, K);
      bring_row(to + K, from + head.past.k, K);
      bring_row(to + 2 * K, from + head.past.v, V);
    }
  }
  if (width == 0) return;
  const int64_t key = int64_t(head.key_head) * K, value = int64_t(head.value_head) * V;
  float* const taps = raw + layout.taps;
  bring_row(taps, op.conv_q + key * width, K * width);
  bring_row(taps + K * width, op.conv_k + key * width, K * width);
  bring_row(taps + 2 * K * width, op.conv_v + value * width, V * width);
  float* const bias = raw + layout.bias;
  if (op.conv_q_bias != nullptr) bring_row(bias, op.conv_q_bias + key, K);
  if (op.conv_k_bias != nullptr) bring_row(bias + K, op.conv_k_bias + key, K);
  if (op.conv_v_bias != nullptr) bring_row(bias + 2 * K, op.conv_v_bias + value, V);
}

// And those that one may write: the token's own.
template <int kWidth>
__device__ inline void bring_new(const DeltaMix& op, const RawLayout& layout, const Head& head,
                                 int token, float* raw) {
  const int K = op.key_dim, V = op.value_dim, width = width_of<kWidth>(op);
  const int64_t key = int64_t(head.key_head) * K, value = int64_t(head.value_head) * V;
  float* const now = raw + (width > 1 ? width - 1 : 0) * (2 * K + V);
  bring_row(now, at(op.q, token) + key, K);
  bring_row(now + K, at(op.k, token) + key, K);
  bring_row(now + 2 * K, at(op.v, token) + value, V);
  if (op.erase.data != nullptr) bring_row(raw + layout.erase, at(op.erase, token) + key, K);
  if (op.write.data != nullptr) bring_row(raw + layout.write, at(op.write, token) + value, V);
  if (op.decay == Decay::PerChannel) {
    const int64_t channel = int64_t(head.decay_head) * K;
    bring_row(raw + layout.decay, at(op.decay_in, token) + channel, K);
    bring_row(raw + layout.shift, op.dt_bias + channel, K);
  }
}

// The raw numbers of a head: beta's and the decay's logits, the latter with dt_bias, and decay_a.
struct Numbers {
  float beta = 0, decay = 0, a = 0;

  __device__ Numbers(const DeltaMix& op, const Head& head, int token) {
    if (op.beta.data != nullptr) beta = at(op.beta, token)[head.value_head];
    if (op.decay == Decay::PerHead) {
      decay = at(op.decay_in, token)[head.decay_head] + op.dt_bias[head.decay_head];
    }
    if (op.decay != Decay::None) a = op.decay_a[head.decay_head];
  }
};

// The last inputs become the history; q's and k's after the last value head that reads them.
template <int kWidth>
__device__ inline void remember(const DeltaMix& op, const Head& head, bool last,
                                const float* raw) {
  const int K = op.key_dim, V = op.value_dim, all = 2 * K + V;
#pragma unroll 1
  for (int r = 0; r + 1 < width_of<kWidth>(op); ++r) {
    const float* const from = raw + (r + 1) * all;
    float* const to = head.history + r * head.channels;
    if (last) take_row(to + head.past.q, from, K);
    if (last) take_row(to + head.past.k, from + K, K);
    take_row(to + head.past.v, from + 2 * K, V);
  }
}

__device__ __noinline__ inline float apply_any(Activation activation, float x) {
  return apply(activation, x);
}
// The usual one without a call: the others' code would not fit the instruction cache.
__device__ inline float activated(Activation activation, float x) {
  return activation == Activation::Silu ? x * sigmoid(x) : apply_any(activation, x);
}

// Channel i's convolution, of q below key_dim, of k below 2 key_dim, then of v.
template <int kWidth>
__device__ inline float convolved(const DeltaMix& op, const RawLayout& layout, const float* raw,
                                  int i, bool biased) {
  const int all = 2 * op.key_dim + op.value_dim;
  float sum = biased ? raw[layout.bias + i] : 0.0f;
  if constexpr (kWidth == 4) {
    const float4 taps = *reinterpret_cast<const float4*>(raw + layout.taps + 4 * i);
    sum += taps.x * raw[i];
    sum += taps.y * raw[all + i];
    sum += taps.z * raw[2 * all + i];
    sum += taps.w * raw[3 * all + i];
  } else {
    if (op.conv_width == 0) return raw[i];
    for (int j = 0; j < op.conv_width; ++j) {
      sum += raw[layout.taps + i * op.conv_width + j] * raw[j * all + i];
    }
  }
  return sum;
}

// What normalises a q or k, from its sum or that of its squares.
__device__ inline float scale_of(QkNorm norm, float sum) {
  if (norm == QkNorm::L2) return 1.0f / sqrtf(sum + 1e-6f);
  return norm == QkNorm::L2Max ? 1.0f / fmaxf(sqrtf(sum), 1e-6f) : 1.0f / sum;
}

// One warp makes a head's vectors, x, of its raw ones.
template <int kParts, int kWidth>
__device__ inline void make_head(const DeltaMix& op, const RawLayout& layout, const float* raw,
                                 const Numbers& numbers, float* x) {
  constexpr int K = 32 * kParts;
  const int lane = threadIdx.x % 32, V = op.value_dim;
  const float a = numbers.a;
  const float beta = op.beta_scale * (op.beta.data == nullptr ? 1.0f : sigmoid(numbers.beta));
  float one_decay = 1.0f;
  if (op.decay == Decay::PerHead) one_decay = decay_of(op, a, numbers.decay);
  const bool squared = op.qk_norm != QkNorm::Sum;
  float q_sum = 0, k_sum = 0;
#pragma unroll(kParts < 4 ? kParts : 4)
  for (int j = 0; j < kParts; ++j) {
    const int i = lane + 32 * j;
    const float q = activated(op.qk_activation,
                              convolved<kWidth>(op, layout, raw, i, op.conv_q_bias != nullptr));
    const float k = activated(op.qk_activation,
                              convolved<kWidth>(op, layout, raw, K + i, op.conv_k_bias != nullptr));
    q_sum += squared ? q * q : q;
    k_sum += squared ? k * k : k;
    x[i] = q;
    x[K + i] = k;
    x[3 * K + i] =
        k * (op.erase.data == nullptr ? beta : op.beta_scale * sigmoid(raw[layout.erase + i]));
  }
#pragma unroll(kParts < 4 ? kParts : 4)
  for (int j = 0; j < kParts; ++j) {
    const int i = lane + 32 * j;
    x[2 * K + i] = op.decay == Decay::PerChannel
                       ? decay_of(op, a, raw[layout.decay + i] + raw[layout.shift + i])
                       : one_decay;
  }
#pragma unroll 4
  for (int i = lane; i < V; i += 32) {
    const float v = convolved<kWidth>(op, layout, raw, 2 * K + i, op.conv_v_bias != nullptr);
    x[4 * K + i] =
        v * sigmoid(v) * (op.write.data == nullptr ? beta : sigmoid(raw[layout.write + i]));
  }
  q_sum = sum_over_lanes(q_sum);
  k_sum = sum_over_lanes(k_sum);
  if (lane == 0) {
    x[4 * K + 2 * V] = scale_of(op.qk_norm, q_sum) / sqrtf(float(K));
    x[4 * K + 2 * V + 1] = scale_of(op.qk_norm, k_sum);
  }
}

}  // namespace weir::cuda::delta
