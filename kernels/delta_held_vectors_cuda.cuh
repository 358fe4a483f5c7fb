#pragma once
#include "kernels/delta_held_block_cuda.cuh"
#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/vector_cuda.cuh"

// A head's vectors for held_kernel, made from the raw projections by four warps, a lane four
// neighbouring channels: of q, of k, of v, and the factors that the normed answer is multiplied
// with. Other warps have what waits of the head, and make the products that need several of them.
namespace weir::cuda::held {

enum Role { kQuery, kKey, kValue, kFinisher };  // of the first four warps

// Products of vectors: of the keys that wait with what recalls, at kRecalled, and with q, at
// kAnswered; q k; and what normalises q and k.
enum Product { kRecalled = 0, kBoth = 3, kAnswered = 4, kOfQuery = 7, kOfKey = 8, kProducts = 9 };
static_assert(kPendingMost == 3, "as many as Product has places for");

// What waits of a head; none of updates beyond those that do. decay: since the state was written.
template <bool kDefers>
struct Waiting {
  alignas(16) float key[kPendingMost][kDim];
  alignas(16) float value[kPendingMost][kDim];
  alignas(16) float decay[kDim];
};
template <>
struct Waiting<false> {};

// `decay` is the token's own. `recalls` and `answers` are what the state is multiplied with: erase
// and q, times the state's decay.
template <bool kDefers>
struct Vectors {
  alignas(16) float q[kDim], k[kDim], v[kDim], decay[kDim], erase[kDim];
  alignas(16) float recalls[kDim], answers[kDim];
  alignas(16) float kept[2][kDim];  // of q and k, what joins the history
  float product[kProducts];
  Waiting<kDefers> waiting;

  // That of the state in memory.
  __device__ const float* state_decay() const {
    if constexpr (kDefers) return waiting.decay;
    return decay;
  }
};

// Where a head is.
struct Place {
  int key_head = 0, value_head = 0, decay_head = 0;
  Slot slot = 0;
  int token = 0;
  bool fresh = false;
  bool keeps = false;  // its block writes the history of q and k
  int oldest = 0;      // the ring's row that the token's input replaces

  // The lane's channels in all heads' vectors, and in the first row of the history.
  __device__ int column(Role role) const {
    return (role < kValue ? key_head : value_head) * kDim + threadIdx.x % 32 * 4;
  }
  __device__ float* past(const DeltaMix& op, Role role) const {
    return at(op.history, slot) + (role * op.key_heads * kDim + column(role));
  }
  __device__ float* state(const DeltaMix& op) const {
    return at(op.state, slot) + value_head * (kDim * kDim);
  }
};

__device__ inline float4& lane_of(float* vector) {
  return reinterpret_cast<float4*>(vector)[threadIdx.x % 32];
}
__device__ inline float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ inline float4 splat(float x) { return {x, x, x, x}; }
template <typename F>
__device__ inline float4 each(float4 x, const F& f) {
  return {f(x.x), f(x.y), f(x.z), f(x.w)};
}
__device__ inline float4 sum_of(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ inline float4 silu(float4 x) {
  return each(x, [](float one) { return one * quick_sigmoid(one); });
}
__device__ inline float4 activated(Activation activation, float4 x) {
  if (activation == Activation::Silu) return silu(x);
  return each(x, [&](float one) { return delta::apply_any(activation, one); });
}

// What waits of a head, in device memory; the lane's parts of it.
struct Pending {
  static constexpr int kFloats = kLayout.floats(), kUpdate = kLayout.update_floats();
  static constexpr int kKeys = kLayout.key_at(0), kValues = kLayout.value_at(0);
  int count = 0;        // updates that wait
  bool writes = true;   // the head's state, by this token

  __device__ void open(const Row& row, int value_head) {
    count = pending_updates(row.first, row.written, value_head);
    writes = writes_state(row.first, value_head);
  }
  __device__ static float* of(const DeltaMix& op, const Place& place) {
    return at(op.pending, place.slot) + place.value_head * kFloats;
  }
  __device__ static float* decay(const DeltaMix& op, const Place& place) {
    return of(op, place) + threadIdx.x % 32 * 4;
  }
  __device__ static float* key(const DeltaMix& op, const Place& place, int i) {
    return of(op, place) + (kKeys + i * kUpdate + int(threadIdx.x) % 32 * 4);
  }
  __device__ static float* values(const DeltaMix& op, const Place& place, int i) {
    return of(op, place) + (kValues + i * kUpdate);
  }
};

// What a lane reads; of a finisher, the output's gate and its norm's weight as `shift`.
struct Raw {
  float4 past[kWidth - 1] = {}, now{};
  float4 taps[4];  // of each channel
  float4 bias{}, gate{}, shift{};
  float a = 0;  // decay_a

  // What no kernel of the same program writes before this one.
  __device__ void load_kept(const DeltaMix& op, const Place& place, Role role) {
    const int column = place.column(role);
    if (role == kFinisher) {
      shift = load_four(op.norm_weight + threadIdx.x % 32 * 4);
      return;
    }
    const float* const from = place.past(op, role);
    const int channels = channels_of(op);
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) {
      if (place.fresh) continue;
      past[j] = load_four(from + ring_row_of_age(place.oldest, j, kWidth - 1) * channels);
    }
    const float* const all = role == kQuery ? op.conv_q : role == kKey ? op.conv_k : op.conv_v;
    const float* const biases =
        role == kQuery ? op.conv_q_bias : role == kKey ? op.conv_k_bias : op.conv_v_bias;
#pragma unroll
    for (int c = 0; c < 4; ++c) taps[c] = load_four(all + (column + c) * kWidth);
    if (biases != nullptr) bias = load_four(biases + column);
    if (role != kQuery || op.decay == Decay::None) return;
    a = op.decay_a[place.decay_head];
    shift = op.decay == Decay::PerHead
                ? splat(op.dt_bias[place.decay_head])
                : load_four(op.dt_bias + place.decay_head * kDim + threadIdx.x % 32 * 4);
  }
  // The token's own.
  __device__ void load_new(const DeltaMix& op, const Place& place, Role role) {
    const auto from = [&](const Acts& acts) { return at(acts, place.token); };
    const auto fours = [&](const Acts& acts, int column) {
      return load_four_as<Stay::Usual>(from(acts) + column);
    };
    const int column = place.column(role);
    if (role == kFinisher) {
      if (op.gate.data != nullptr) gate = fours(op.gate, column);
      return;
    }
    now = fours(role == kQuery ? op.q : role == kKey ? op.k : op.v, column);
    if (role == kQuery) {
      if (op.decay == Decay::None) return;
      gate = op.decay == Decay::PerHead
                 ? splat(load_as<Stay::Usual>(from(op.decay_in) + place.decay_head))
                 : fours(op.decay_in, place.decay_head * kDim + int(threadIdx.x % 32) * 4);
      return;
    }
    const Acts& own = role == kKey ? op.erase : op.write;
    if (own.data != nullptr) {
      gate = fours(own, column);
    } else if (op.beta.data != nullptr) {
      gate = splat(load_as<Stay::Usual>(from(op.beta) + place.value_head));
    }
  }

  __device__ float4 convolved() const {
    const auto one = [&](float b, const float4& t, float x0, float x1, float x2, float x3) {
      return b + t.x * x0 + t.y * x1 + t.z * x2 + t.w * x3;
    };
    return {one(bias.x, taps[0], past[0].x, past[1].x, past[2].x, now.x),
            one(bias.y, taps[1], past[0].y, past[1].y, past[2].y, now.y),
            one(bias.z, taps[2], past[0].z, past[1].z, past[2].z, now.z),
            one(bias.w, taps[3], past[0].w, past[1].w, past[2].w, now.w)};
  }
  // The erase or write gate, or beta without its scale.
  __device__ float4 opened(const DeltaMix& op, const Acts& own) const {
    if (own.data != nullptr) return each(gate, [](float x) { return quick_sigmoid(x); });
    return splat(op.beta.data != nullptr ? quick_sigmoid(gate.x) : 1.0f);
  }
  __device__ float4 decays(const DeltaMix& op) const {
    const float4 x = sum_of(gate, shift);
    if (op.decay != Decay::PerChannel) return splat(delta::decay_of(op, a, x.x));
    return each(x, [&](float one) { return delta::decay_of(op, a, one); });
  }
};

// The token's input replaces the oldest one. A new sequence has nothing before it.
__device__ inline void keep_input(const DeltaMix& op, const Place& place, Role role, float4 now) {
  float* const past = place.past(op, role);
  const int channels = channels_of(op);
  store_four(past + place.oldest * channels, now);
  if (!place.fresh) return;
#pragma unroll
  for (int j = 1; j + 1 < kWidth; ++j) store_four(past + j * channels, splat(0.0f));
}

// The lane's channels become part of the head's vectors, and their inputs that of the history.
// Returns a finisher's factors.
template <Sharing kSharing, bool kDefers>
__device__ inline float4 prepare(const DeltaMix& op, const Place& place, Role role, const Raw& raw,
                                 const Pending& pending, Vectors<kDefers>& to) {
  if (role == kFinisher) {
    if (op.gate.data == nullptr) return raw.shift;
    return times(raw.shift, activated(op.gate_activation, raw.gate));
  }
  if (role == kValue || (kSharing != Sharing::Cluster && place.keeps)) {
    keep_input(op, place, role, raw.now);
  } else if (kSharing == Sharing::Cluster) {
    lane_of(to.kept[role]) = raw.now;
  }
  const float4 x = raw.convolved();
  if (role == kValue) {
    const float4 gate = raw.opened(op, op.write);
    const float scale = op.write.data == nullptr ? op.beta_scale : 1.0f;
    lane_of(to.v) = times(silu(x), scaled(gate, scale));
    return {};
  }
  const float4 made = activated(op.qk_activation, x);
  if (role == kKey) {
    lane_of(to.k) = made;
    lane_of(to.erase) = times(made, scaled(raw.opened(op, op.erase), op.beta_scale));
    if constexpr (kDefers) {
      if (!pending.writes) store_four(pending.key(op, place, pending.count), made);
    }
    return {};
  }
  lane_of(to.q) = made;
  lane_of(to.decay) = raw.decays(op);
  return {};
}

// The warps that make products, each one of them, or the last what the state is multiplied with:
// from this warp on.
constexpr int kFirstProduct = 4;
constexpr int kProductWarps = kProducts + 1;
template <bool kDefers>
__device__ inline bool multiplies(int product) {
  const bool one = product >= 0 && product < kProductWarps;
  return one && (kDefers || product == kBoth || product >= kOfQuery);
}
// q, k and the decay are there: said by their warps, heard by those that make products.
template <bool kDefers>
constexpr int kHearing = 32 * (2 + (kDefers ? kProductWarps : 4));

// What the warp of a product has of what waits: a key, of those with q a value too; of the last
// warp, the decay as `key`.
struct Kept {
  int update = 0;
  bool waits = false;
  float4 key{}, value{};

  __device__ void load(const DeltaMix& op, const Place& place, const Pending& pending,
                       int product) {
    update = product - (product >= kAnswered ? kAnswered : kRecalled);
    if (product == kProducts) {
      key = pending.count > 0 ? load_four(pending.decay(op, place)) : splat(1.0f);
      return;
    }
    waits = update < kPendingMost && update < pending.count;
    if (!waits) return;
    key = load_four(pending.key(op, place, update));
    if (product >= kAnswered) value = lane_of(pending.values(op, place, update));
  }
};

// The keys that wait are decayed, and join the head's vectors.
__device__ inline float product_with_key(const DeltaMix& op, const Place& place,
                                         const Pending& pending, const Kept& kept, bool answers,
                                         Vectors<true>& of) {
  const float4 key = times(kept.key, lane_of(of.decay));
  if (answers) {
    lane_of(of.waiting.value[kept.update]) = kept.value;
    return dot(key, lane_of(of.q));
  }
  lane_of(of.waiting.key[kept.update]) = key;
  if (kept.waits && !pending.writes) store_four(pending.key(op, place, kept.update), key);
  return dot(key, lane_of(of.erase));
}

template <bool kDefers>
__device__ inline void multiply(const DeltaMix& op, const Place& place, int product,
                                const Pending& pending, const Kept& kept,
                                Vectors<kDefers>& of) {
  barrier_among<1>(kHearing<kDefers>);
  if (product == kProducts) {
    float4 decay = lane_of(of.decay);
    if constexpr (kDefers) {
      decay = times(decay, kept.key);
      lane_of(of.waiting.decay) = decay;
      if (!pending.writes) store_four(pending.decay(op, place), decay);
    }
    lane_of(of.recalls) = times(decay, lane_of(of.erase));
    lane_of(of.answers) = times(decay, lane_of(of.q));
    return;
  }
  float sum = 0;
  if (product >= kOfQuery) {
    const float4 x = lane_of(product == kOfQuery ? of.q : of.k);
    sum = dot(x, op.qk_norm == QkNorm::Sum ? splat(1.0f) : x);
  } else if (product == kBoth) {
    sum = dot(lane_of(of.q), lane_of(of.k));
  } else if constexpr (kDefers) {
    sum = product_with_key(op, place, pending, kept, product >= kAnswered, of);
  }
  sum = sum_over_lanes(sum);
  if (threadIdx.x % 32 == 0) of.product[product] = sum;
}

}  // namespace weir::cuda::held
