#pragma once
#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/ring.h"
#include "kernels/vector_cuda.cuh"

// For rows of one token each, a block for a slice of a head: each thread prepares a channel or two
// of the block's vectors, by convolutions of width 4.
namespace weir::cuda::channel {

constexpr int kWidth = 4;

enum Role { kQuery, kKey, kValue, kFinisher };  // of whole warps

// What a thread prepares: a channel of the block's q, k or v, or the factor that one of its normed
// values is multiplied with. column: in all heads' vectors.
struct Own {
  Role role;
  int i, column;
};

// What it reads; of a finisher, the output's gate and its norm's weight.
struct Raw {
  float past[kWidth - 1] = {}, now = 0;
  float4 taps{};
  float bias = 0, gate = 0, shift = 0;
  float a = 0;  // decay_a
};

// Where a block's head is.
struct Place {
  int key_head, value_head, decay_head, token;
  bool fresh;
  bool keeps;  // its block writes the history of q and k
  int oldest;  // the ring's row that the token's input replaces
  float* history;
};

// K: a head's keys. Of a row of the history.
template <int K>
__device__ inline int channels_of(const DeltaMix& op) {
  return 2 * op.key_heads * K + op.value_heads * op.value_dim;
}
template <int K>
__device__ inline float* past_of(const DeltaMix& op, const Place& place, const Own& own) {
  return place.history + int64_t(own.role) * op.key_heads * K + own.column;
}

// A channel's inputs before the token, oldest first; past: in the ring's first row.
__device__ inline void load_past(const float* past, const Place& place, int channels, Raw& raw) {
#pragma unroll
  for (int j = 0; j + 1 < kWidth; ++j) {
    const float* const from = past + ring_row_of_age(place.oldest, j, kWidth - 1) * channels;
    raw.past[j] = place.fresh ? 0.0f : *from;
  }
}
// The token's own replaces the oldest of them. A new sequence has nothing before it.
__device__ inline void keep_input(float* past, const Place& place, int channels, float now) {
  past[place.oldest * channels] = now;
  if (!place.fresh) return;
#pragma unroll
  for (int j = 1; j + 1 < kWidth; ++j) past[j * channels] = 0.0f;
}

__device__ inline float activated(Activation activation, float x) {
  return activation == Activation::Silu ? x * quick_sigmoid(x) : delta::apply_any(activation, x);
}

// What no kernel of the same program writes before this one. value0: the block's first value, of
// the head's.
template <int K>
__device__ inline void load_kept(const DeltaMix& op, const Place& place, const Own& own, int value0,
                                 Raw& raw) {
  if (own.role == kFinisher) {
    raw.shift = op.norm_weight[value0 + own.i];
    return;
  }
  load_past(past_of<K>(op, place, own), place, channels_of<K>(op), raw);
  const float* const taps = own.role == kQuery ? op.conv_q
                            : own.role == kKey ? op.conv_k
                                               : op.conv_v;
  const float* const bias = own.role == kQuery ? op.conv_q_bias
                            : own.role == kKey ? op.conv_k_bias
                                               : op.conv_v_bias;
  raw.taps = *reinterpret_cast<const float4*>(taps + int64_t(own.column) * kWidth);
  if (bias != nullptr) raw.bias = bias[own.column];
  if (own.role != kQuery || op.decay == Decay::None) return;
  raw.a = op.decay_a[place.decay_head];
  raw.shift = op.decay == Decay::PerHead
                  ? op.dt_bias[place.decay_head]
                  : op.dt_bias[int64_t(place.decay_head) * K + own.i];
}

// The token's own.
template <int K>
__device__ inline void load_new(const DeltaMix& op, const Place& place, const Own& own, Raw& raw) {
  if (own.role == kFinisher) {
    if (op.gate.data != nullptr) raw.gate = __ldcg(at(op.gate, place.token) + own.column);
    return;
  }
  const Acts& in = own.role == kQuery ? op.q : own.role == kKey ? op.k : op.v;
  raw.now = __ldcg(at(in, place.token) + own.column);
  if (own.role == kQuery) {
    if (op.decay == Decay::None) return;
    raw.gate = __ldcg(at(op.decay_in, place.token) +
                      (op.decay == Decay::PerHead
                           ? place.decay_head
                           : int64_t(place.decay_head) * K + own.i));
    return;
  }
  const Acts& gate = own.role == kKey ? op.erase : op.write;
  if (gate.data != nullptr) {
    raw.gate = __ldcg(at(gate, place.token) + own.column);
  } else if (op.beta.data != nullptr) {
    raw.gate = __ldcg(at(op.beta, place.token) + place.value_head);
  }
}

// The thread's channel becomes part of the block's vectors, and v's input that of the history; q's
// and k's are kept for remember().
template <int K, typename Shared>
__device__ inline void prepare(const DeltaMix& op, const Place& place, const Own& own,
                               const Raw& raw, Shared& shared) {
  if (own.role == kFinisher) {
    const bool gated = op.gate.data != nullptr;
    shared.factor[own.i] =
        gated ? raw.shift * activated(op.gate_activation, raw.gate) : raw.shift;
    return;
  }
  const float x = raw.bias + raw.taps.x * raw.past[0] + raw.taps.y * raw.past[1] +
                  raw.taps.z * raw.past[2] + raw.taps.w * raw.now;
  if (own.role == kValue) {
    keep_input(past_of<K>(op, place, own), place, channels_of<K>(op), raw.now);
  } else {
    shared.kept[threadIdx.x] = raw.now;
  }
  const bool gated = op.beta.data != nullptr || op.erase.data != nullptr;
  const float gate = gated ? quick_sigmoid(raw.gate) : 1.0f;
  if (own.role == kValue) {
    const float scale = op.write.data == nullptr ? op.beta_scale * gate : gate;
    shared.v[own.i] = x * quick_sigmoid(x) * scale;
    return;
  }
  const float made = activated(op.qk_activation, x);
  const float sum = sum_over_lanes(op.qk_norm == QkNorm::Sum ? made : made * made);
  if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = sum;
  if (own.role == kQuery) {
    shared.q[own.i] = made;
    shared.decay[own.i] = delta::decay_of(op, raw.a, raw.gate + raw.shift);
  } else {
    shared.k[own.i] = made;
    shared.erase[own.i] = made * op.beta_scale * gate;
  }
}

// The history of q and k, once all blocks that read it have done so.
template <int K, typename Shared>
__device__ inline void remember(const DeltaMix& op, const Place& place, const Own& own,
                                const Shared& shared) {
  if (!place.keeps || own.role >= kValue) return;
  keep_input(past_of<K>(op, place, own), place, channels_of<K>(op), shared.kept[threadIdx.x]);
}

__device__ inline float sum_of(float4 x) { return (x.x + x.y) + (x.z + x.w); }

}  // namespace weir::cuda::channel
