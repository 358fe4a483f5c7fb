#pragma once
#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/resident_walk_cuda.cuh"
#include "kernels/ring.h"

// The delta rule's phases of the resident kernel.
namespace weir::cuda::resident {

// How many blocks share a head: as many as there are, and a warp has one row at least.
__device__ inline int slices_of(const DeltaMix& op) {
  int slices = 1;
  while (op.rows.count * op.value_heads * slices * 2 <= int(gridDim.x) &&
         op.value_dim % (slices * 2 * kWarps) == 0) {
    slices *= 2;
  }
  return slices;
}

__device__ inline int keys_of(const DeltaMix& op) { return op.key_heads * op.key_dim; }
__device__ inline int keys_of(const SwilaMix& op) { return op.heads * op.dim; }

// What joins the history of one channel of one row, to be written when all have read that: runs of
// 32 go round the blocks, so that each has one or two warps' worth. Nobody reads a new sequence's,
// in which nothing else is yet.
template <typename Op>
__device__ inline Late new_input(const Op& op, const RowPlace* rows, int channels, Me me) {
  const int keys = keys_of(op);
  const int mine = (me.warp() * int(gridDim.x) + int(blockIdx.x)) * 32 + me.lane();
  if (mine >= op.rows.count * channels) return {};
  const int row = mine / channels, c = mine % channels;
  if (rows[row].slot == kPadding) return {};
  const int which = int(c >= keys) + int(c >= 2 * keys);
  const Acts& in = *(which == 0 ? &op.q : which == 1 ? &op.k : &op.v);
  float* const past = at(op.history, rows[row].slot) + c;
  if (rows[row].fresh) past[channels] = past[2 * channels] = 0.0f;
  return {past + rows[row].oldest * channels,
          await(at(in, rows[row].begin) + c - which * keys)};
}

// A channel's inputs before the token, oldest first, from its first one in the history on.
struct Past {
  float value[3];
  __device__ Past(const UnitPlace& place, const float* past, int channels) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      value[i] = place.fresh ? 0.0f : past[ring_row_of_age(place.oldest, i, 3) * channels];
    }
  }
};

// A head's vectors, of one token, in shared memory; keys and queries without their norm.
struct Head {
  float q[kKeysMost], k[kKeysMost], decay[kKeysMost], erase[kKeysMost], v[kValuesMost];
  float sums[2][kKeysMost / 32];  // of q's and k's numbers or their squares, each of 32 channels
};
static_assert(sizeof(Head) <= sizeof(Shared::head));

// A head's norm of q or k.
__device__ inline float scale_of(QkNorm norm, const float* sums, int K) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kKeysMost / 32; ++i) sum += i < K / 32 ? sums[i] : 0.0f;
  if (norm == QkNorm::L2Max) return 1.0f / fmaxf(sqrtf(sum), 1e-6f);
  return norm == QkNorm::L2 ? rsqrtf(sum + 1e-6f) : 1.0f / sum;
}

// The state's rows first, first + kWarps ... of a warp: a lane has four neighbouring keys of each.
struct StateRows {
  static constexpr int kRows = 2;
  float4 held[kRows];

  // Without a branch; rows beyond the last one read that again.
  __device__ void load(const float* state, int first, int values, int K, int key, bool starts) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int v = min(first + r * kWarps, values - 1);
      held[r] = *reinterpret_cast<const float4*>(state + v * K + min(key, K - 4));
      if (starts || key >= K) held[r] = {0, 0, 0, 0};
    }
  }

  // With S the decayed state, o = q (S + u k) = q S + u (q k): no sum waits for another one.
  __device__ void step(const Head& head, float* state, int first, int values, int K, int key,
                       float k_scale, float q_scale, float* out) {
    const auto own = [&](const float* vector) {
      return key < K ? *reinterpret_cast<const float4*>(vector + key) : float4{0, 0, 0, 0};
    };
    const float4 decay = own(head.decay), erase = own(head.erase), k = own(head.k),
                 q = own(head.q);
    const float qk = sum_over_lanes(delta::dot(q, k));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int v = first + r * kWarps;
      if (v >= values) return;
      held[r] = delta::times(held[r], decay);
      const float recalled = k_scale * sum_over_lanes(delta::dot(held[r], erase));
      const float answer = sum_over_lanes(delta::dot(held[r], q));
      const float u = (head.v[v] - recalled) * k_scale;
      if (key == 0) leave(out + v, (answer + u * qk) * q_scale);
      held[r] = delta::plus(held[r], u, k);
      if (key < K) *reinterpret_cast<float4*>(state + v * K + key) = held[r];
    }
  }
};

// A head's share of values, for one row of the step.
__device__ inline UnitPlace place_of(const DeltaMix& op, const RowPlace* rows, int slices, int u) {
  const int row = u / slices / op.value_heads, head = u / slices % op.value_heads;
  const int values = op.value_dim / slices, first_value = head * op.value_dim + u % slices * values;
  const RowPlace& place = rows[row];
  const bool padding = place.slot == kPadding;
  return {.key = head / (op.value_heads / op.key_heads) * op.key_dim,
          .value_head = head,
          .decay_head = head * op.decay_heads / op.value_heads,
          .first_value = first_value,
          .begin = place.begin,
          .slot = place.slot,
          .padding = padding,
          .fresh = place.fresh,
          .oldest = place.oldest,
          .state = padding ? nullptr
                           : at(op.state, place.slot) + int64_t(first_value) * op.key_dim,
          .history = padding ? nullptr : at(op.history, place.slot),
          .out = at(op.out, place.begin) + first_value};
}

// By one warp: asks for `count` floats to be brought into L2.
__device__ inline void prefetch(const float* from, int count) {
  constexpr int kLine = 32;
#pragma unroll 1
  for (int i = threadIdx.x % 32 * kLine; i < count; i += 32 * kLine) {
#if __CUDA_ARCH__ >= 800
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
#endif
  }
}

// By the describing warp: how the heads are shared out, and where the block's first unit is.
__device__ inline void share_out(const DeltaMix& op, const RowPlace* rows, Sharing& sharing) {
  const int slices = slices_of(op);
  sharing.slices = slices;
  sharing.values = op.value_dim / slices;
  sharing.units = op.rows.count * op.value_heads * slices;
  sharing.channels = 2 * op.key_heads * op.key_dim + op.value_heads * op.value_dim;
  if (int(blockIdx.x) < sharing.units) sharing.first = place_of(op, rows, slices, blockIdx.x);
}

// By the describing warp: what this block's first unit reads that no phase writes.
__device__ inline void prefetch_mix(const DeltaMix& op, const Sharing& sharing) {
  const UnitPlace& unit = sharing.first;
  const int values = sharing.values, K = op.key_dim;
  if (int(blockIdx.x) >= sharing.units || unit.padding) return;
  prefetch(unit.state, values * K);
  prefetch(op.conv_q + int64_t(unit.key) * 4, K * 4);
  prefetch(op.conv_k + int64_t(unit.key) * 4, K * 4);
  prefetch(op.conv_v + int64_t(unit.first_value) * 4, values * 4);
  const int keys = op.key_heads * K;
#pragma unroll 1
  for (int h = 0; h < 3; ++h) {
    const float* past = unit.history + int64_t(h) * sharing.channels;
    prefetch(past + unit.key, K);
    prefetch(past + keys + unit.key, K);
    prefetch(past + 2 * keys + unit.first_value, values);
  }
}

// One of a unit's channels: of q below key_dim, of k below 2 key_dim, then of v. What it reads is
// asked for at once; what other phases leave is waited for last.
struct Input {
  float x;                      // convolved
  float gate, beta, shift, a;   // the decay's, erase's or write's logit; beta's; the decay's more

  __device__ Input(const DeltaMix& op, const UnitPlace& place, int channels, int i) {
    const int K = op.key_dim, which = int(i >= K) + int(i >= 2 * K);
    const int column = which < 2 ? place.key + i - which * K
                                 : place.first_value + i - 2 * K;
    const Acts& from = *(which == 0 ? &op.q : which == 1 ? &op.k : &op.v);
    const float* const now = from.data + place.begin * from.stride + column;
    const float* const taps = *(which == 0 ? &op.conv_q : which == 1 ? &op.conv_k : &op.conv_v);
    const float* const biases =
        *(which == 0 ? &op.conv_q_bias : which == 1 ? &op.conv_k_bias : &op.conv_v_bias);
    const float* const past = place.history + which * op.key_heads * K + column;
    const float4 tap = *reinterpret_cast<const float4*>(taps + column * 4);
    const Past before(place, past, channels);
    const bool decays = which == 0 && op.decay != Decay::None;
    const Acts& gates = *(which == 0 ? &op.decay_in : which == 1 ? &op.erase : &op.write);
    int gate_column = column;
    shift = a = 0;
    if (decays) {
      gate_column = op.decay == Decay::PerHead ? place.decay_head : place.decay_head * K + i;
      shift = op.dt_bias[gate_column];
      a = op.decay_a[place.decay_head];
    }
    const bool gated = gates.data != nullptr && (which > 0 || decays);
    const float* const gate_at = gates.data + place.begin * gates.stride + gate_column;
    const float* const beta_at = op.beta.data + place.begin * op.beta.stride + place.value_head;
    const float bias = biases == nullptr ? 0.0f : biases[column];
    float newest;
    gate = beta = 0;
#pragma unroll 1
    for (int turn = 0;; count_turn(turn)) {
      newest = look(now);
      if (gated) gate = look(gate_at);
      if (op.beta.data != nullptr) beta = look(beta_at);
      if (written(newest) && written(gate) && written(beta)) break;
    }
    x = bias + tap.x * before.value[0] + tap.y * before.value[1] + tap.z * before.value[2] +
        tap.w * newest;
  }
};

// exp(g) from its logit. What a head forgets slowly needs log(1 + y) of small y to all digits.
__device__ inline float decay_of(const DeltaMix& op, float a, float x) {
  if (op.decay == Decay::None) return 1.0f;
  if (op.lower_bound < 0) return expf(op.lower_bound * quick_sigmoid(a * x));
  const float y = __expf(fminf(x, 20.0f));
  const float series = y * (1.0f - y * (0.5f - y * (1.0f / 3.0f - y * 0.25f)));
  const float softplus = x > 20.0f ? x : y < 0.02f ? series : __logf(1.0f + y);
  return expf(-a * softplus);
}

__device__ inline void make_channel(const DeltaMix& op, const UnitPlace& place, int channels,
                                    int i, Head& head) {
  const int K = op.key_dim;
  const Input in(op, place, channels, i);
  const Activation activation = i < 2 * K ? op.qk_activation : Activation::Silu;
  const float x = activation == Activation::Silu ? in.x * quick_sigmoid(in.x)
                                                 : apply(activation, in.x);
  const float gate = quick_sigmoid(in.gate);
  const float beta = op.beta_scale * (op.beta.data == nullptr ? 1.0f : quick_sigmoid(in.beta));
  if (i >= 2 * K) {
    head.v[i - 2 * K] = x * (op.write.data == nullptr ? beta : gate);
    return;
  }
  __syncwarp();
  const bool is_k = i >= K;
  const float sum = sum_over_lanes(op.qk_norm == QkNorm::Sum ? x : x * x);
  if (i % 32 == 0) head.sums[is_k][(is_k ? i - K : i) / 32] = sum;
  if (is_k) {
    head.k[i - K] = x;
    head.erase[i - K] = x * (op.erase.data == nullptr ? beta : op.beta_scale * gate);
  } else {
    head.q[i] = x;
    head.decay[i] = decay_of(op, in.a, in.gate + in.shift);
  }
}

// One unit: its vectors, its part of the state, its answers.
__device__ inline void run_unit(const DeltaMix& op, const Sharing& sharing, const UnitPlace& place,
                                Me me) {
  auto& head = *reinterpret_cast<Head*>(shared_memory().head);
  const int K = op.key_dim, warp = me.warp(), values = sharing.values, all = 2 * K + values;
  const int key = me.lane() * 4;
  StateRows rows, next;
  rows.load(place.state, warp, values, K, key, place.fresh);
#pragma unroll 1
  for (int i = me.thread; i < all; i += kComputing) {
    make_channel(op, place, sharing.channels, i, head);
  }
  barrier_among<kAll>(kComputing);  // the vectors are there
  const float k_scale = scale_of(op.qk_norm, head.sums[1], K);
  const float q_scale = scale_of(op.qk_norm, head.sums[0], K) * rsqrtf(float(K));
#pragma unroll 1
  for (int v = warp; v < values; v += kWarps * StateRows::kRows) {
    const int after = v + kWarps * StateRows::kRows;
    if (after < values) next.load(place.state, after, values, K, key, place.fresh);
    rows.step(head, place.state, v, values, K, key, k_scale, q_scale, place.out);
    rows = next;
  }
}

template <typename Op>
__device__ inline void run_mix(const Op& op, const RowPlace* rows, const Sharing& sharing) {
  const Me me = find_me();
#pragma unroll 1
  for (int u = blockIdx.x; u < sharing.units; u += gridDim.x) {
    UnitPlace place = sharing.first;
    if (u >= int(gridDim.x)) place = place_of(op, rows, sharing.slices, u);
    if (place.padding) {  // nobody needs its answers, but they are waited for
      for (int v = me.thread; v < sharing.values; v += kComputing) leave(place.out + v, 0);
      continue;
    }
    run_unit(op, sharing, place, me);
    barrier_among<kAll>(kComputing);  // the vectors may be overwritten
  }
  shared_memory().late[me.thread] = new_input(op, rows, sharing.channels, me);
}

}  // namespace weir::cuda::resident
