#pragma once
#include "kernels/async_cuda.cuh"
#include "kernels/held_row_cuda.cuh"
#include "kernels/swila_held_vectors_cuda.cuh"

// What waits beside a head's state (pending.h), and its products with the token's vectors, which
// are made once a head.
namespace weir::cuda::swila_held {

// In device memory. Without decays all mixtures have the same keys, which stay as they are.
template <bool kGated>
struct Pending {
  static constexpr PendingLayout kLayout{.values = J * D, .key_dim = D,
                                         .groups = kGated ? J : 1};
  static constexpr int kFloats = kLayout.floats(), kUpdate = kLayout.update_floats();
  static constexpr int kKeys = kLayout.key_at(0), kValues = kLayout.value_at(0);
  float* data = nullptr;  // of the head
  int count = 0;          // updates that wait
  bool writes = true;     // the head's state, by this token

  __device__ Pending(const SwilaMix& op, const held::Row& row, int head)
      : data(at(op.pending, row.slot) + head * kFloats),
        count(pending_updates(row.first, row.written, head)),
        writes(writes_state(row.first, head)) {}
  // So many there are, beginning with the decay.
  __device__ int floats() const { return count > 0 ? kKeys + count * kUpdate : 0; }
  __device__ float* decay() const { return data; }
  __device__ float* key(int i) const { return data + (kKeys + i * kUpdate); }
  __device__ float* value(int i) const { return data + (kValues + i * kUpdate); }
};

// The decay of the state in memory, and what the state is multiplied with: k and q, times it. Each
// [mixture, key].
template <bool kGated>
struct Decayed {
  alignas(16) float decay[J * D], k[J * D], q[J * D];
};
template <>
struct Decayed<false> {};

// In shared memory, the keys as this token has decayed them; zeros instead of updates beyond those
// that wait.
template <bool kGated>
struct Waiting {
  static constexpr int kGroups = kGated ? J : 1;
  alignas(16) float key[kPendingMost][kGroups * D];
  alignas(16) float value[kPendingMost][J * D];
  alignas(16) float product[kGroups][2][4];  // of the keys with k, then with q
  float4 scale;                              // of q and of k, and their product
  Decayed<kGated> decayed;
};
static_assert(kPendingMost == 3, "Waiting's products are loaded four at a time");

__device__ inline float4* fours(float* vector) { return reinterpret_cast<float4*>(vector); }
__device__ inline const float4* fours(const float* vector) {
  return reinterpret_cast<const float4*>(vector);
}

// Who makes products: the second half of the threads where each mixture has keys of its own, else
// the last of them. 16 lanes share a key: one of each update, in turn, and then the decay.
static_assert(J * kLanes == D && kThreads == 2 * J * D);
template <bool kGated>
__device__ inline bool multiplies() {
  return kGated ? !mixes() : own_decay() >= 3 * D;
}
template <bool kGated>
__device__ inline int own_update() {
  return kGated ? own_decay() / D : own_decay() % D / kLanes;
}
// Which four numbers of the update's keys, or of the decay.
template <bool kGated>
__device__ inline int own_part() {
  return kGated ? own_decay() % D : own_decay() % kLanes;
}

// What a thread reads of what waits: four values of one update, and its part of a key or a decay.
template <bool kGated>
struct Kept {
  float4 value{}, part{};

  __device__ void load(const Pending<kGated>& pending) {
    const auto four = [](const float* from, int i) { return fours(from)[i]; };
    if (convolves() && own_decay() / D < pending.count) {
      value = four(pending.value(own_decay() / D), own_decay() % D);
    }
    if (!multiplies<kGated>()) return;
    const int update = own_update<kGated>();
    if (update < kPendingMost) {
      if (update < pending.count) part = four(pending.key(update), own_part<kGated>());
    } else if (kGated && pending.count > 0) {
      part = four(pending.decay(), own_part<kGated>());
    } else {
      part = {1, 1, 1, 1};
    }
  }
};

// q, k and the decays are there: said by those that make no products, heard by those that do.
template <bool kGated>
constexpr int kHearing = kGated ? J * D : 3 * D;

// The token's key and decay join what waits.
template <bool kGated>
__device__ inline void leave_key(const Pending<kGated>& pending, float4 k, float4 decay) {
  store_four(pending.key(pending.count) + 4 * own_part<kGated>(), k);
  if (kGated || pending.count == 0) store_four(pending.decay() + 4 * own_part<kGated>(), decay);
}

// By the second half of the threads: what waits, and products of it, become part of the head's
// vectors.
template <bool kGated>
__device__ inline void multiply(const Pending<kGated>& pending, const Kept<kGated>& kept,
                                const Vectors& of, Waiting<kGated>& to) {
  if (convolves()) fours(to.value[own_decay() / D])[own_decay() % D] = kept.value;
  if (!multiplies<kGated>()) {
    if (own_decay() < 2 * D) held::say_made<kHearing<kGated>>();
    return;
  }
  barrier_among<1>(kHearing<kGated>);
  const int update = own_update<kGated>(), part = own_part<kGated>(), lane = threadIdx.x % kLanes;
  const float4 q = fours(of.vectors)[lane], k = fours(of.vectors + D)[lane];
  float4 key = kept.part;
  if constexpr (kGated) key = times(key, fours(of.decay)[part]);
  if (update < kPendingMost) {
    fours(to.key[update])[part] = key;
    if (kGated && !pending.writes && update < pending.count) {
      store_four(pending.key(update) + 4 * part, key);
    }
  } else {
    if constexpr (kGated) {
      fours(to.decayed.decay)[part] = key;
      fours(to.decayed.k)[part] = times(key, k);
      fours(to.decayed.q)[part] = times(key, q);
    }
    if (!pending.writes) leave_key(pending, k, key);
    key = q;
  }
  float sum[2] = {dot(key, k), dot(key, q)};
  float mine = scatter_sums<2>(sum);  // of even lanes with k, of odd ones with q
#pragma unroll
  for (int step = 2; step < kLanes; step *= 2) mine += __shfl_xor_sync(0xffffffffu, mine, step);
  if (lane < 2 && update < kPendingMost) to.product[part / kLanes][lane][update] = mine;
  if (own_decay() < 3 * D) return;
  const float squares = sum_over_lanes<kLanes>(dot(k, k));
  if (update < kPendingMost || part >= 2) return;
  if (part == 0) {
    to.scale.y = rsqrtf(squares + 1e-6f);
    to.scale.z = mine;
  } else {
    to.scale.x = rsqrtf(mine + 1e-6f);
  }
}

}  // namespace weir::cuda::swila_held
