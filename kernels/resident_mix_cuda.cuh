#pragma once
#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/resident_walk_cuda.cuh"

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

// The new history of one channel of one row, to be written when all have read the old one.
__device__ inline Late new_history(const DeltaMix& op) {
  const int keys = op.key_heads * op.key_dim, values = op.value_heads * op.value_dim;
  const int channels = 2 * keys + values;
  const int mine = int(blockIdx.x) * kComputing + int(threadIdx.x);
  const int row = mine / channels, c = mine % channels;
  if (row >= op.rows.count || op.rows.slot[row] == kPadding) return {};
  const Acts in = c < keys ? op.q : c < 2 * keys ? op.k : op.v;
  const int column = c < keys ? c : c < 2 * keys ? c - keys : c - 2 * keys;
  const bool starts = op.rows.first[row] == 0;
  float* past = at(op.history, op.rows.slot[row]) + c;
  return {past,
          {starts ? 0.0f : past[channels], starts ? 0.0f : past[2 * channels],
           __ldcg(at(in, op.rows.begin[row]) + column)},
          channels};
}

// The state's rows first, first + kWarps ... of a warp: a lane has four neighbouring keys of each.
struct StateRows {
  static constexpr int kRows = 2;
  float4 held[kRows];

  __device__ static int key() { return threadIdx.x % 32 * 4; }

  // Without a branch; rows beyond the last one read that again.
  __device__ void load(const float* state, int first, int values, int K, bool starts) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int v = min(first + r * kWarps, values - 1);
      held[r] = *reinterpret_cast<const float4*>(state + int64_t(v) * K + min(key(), K - 4));
    }
    if (!starts && key() < K) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) held[r] = {0, 0, 0, 0};
  }

  __device__ void step(const DeltaMix& op, const delta::Vectors& x, float* state, int first,
                       int values, float k_scale, float q_scale, float* out) {
    const int K = op.key_dim;
    const auto own = [&](const float* vector) {
      return key() < K ? *reinterpret_cast<const float4*>(vector + key()) : float4{0, 0, 0, 0};
    };
    const float4 decay = own(x.decay), erase = own(x.erase), k = own(x.k), q = own(x.q);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int v = first + r * kWarps;
      if (v >= values) return;
      held[r] = delta::times(held[r], decay);
      const float recalled = k_scale * sum_over_lanes(delta::dot(held[r], erase));
      held[r] = delta::plus(held[r], (x.v[v] - recalled) * k_scale, k);
      const float answer = sum_over_lanes(delta::dot(held[r], q)) * q_scale;
      if (key() < K) *reinterpret_cast<float4*>(state + int64_t(v) * K + key()) = held[r];
      if (threadIdx.x % 32 == 0) out[v] = answer;
    }
  }
};

// A head's share of values, for one row of the step.
struct Unit {
  int row, head, slice;

  __device__ static Unit of(const DeltaMix& op, int slices, int u) {
    return {u / slices / op.value_heads, u / slices % op.value_heads, u % slices};
  }
};

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

// What this block's first unit reads that no phase writes.
__device__ inline void prefetch_mix(const DeltaMix& op) {
  const int slices = slices_of(op), values = op.value_dim / slices, K = op.key_dim;
  if (int(blockIdx.x) >= op.rows.count * op.value_heads * slices) return;
  const Unit unit = Unit::of(op, slices, blockIdx.x);
  const Slot slot = op.rows.slot[unit.row];
  if (slot == kPadding) return;
  const int64_t value0 = int64_t(unit.head) * op.value_dim + unit.slice * values;
  const int key0 = unit.head / (op.value_heads / op.key_heads) * K;
  prefetch(at(op.state, slot) + value0 * K, values * K);
  prefetch(op.conv_q + int64_t(key0) * 4, K * 4);
  prefetch(op.conv_k + int64_t(key0) * 4, K * 4);
  prefetch(op.conv_v + value0 * 4, values * 4);
  const int64_t keys = int64_t(op.key_heads) * K,
                channels = 2 * keys + int64_t(op.value_heads) * op.value_dim;
#pragma unroll 1
  for (int h = 0; h < 3; ++h) {
    const float* past = at(op.history, slot) + h * channels;
    prefetch(past + key0, K);
    prefetch(past + keys + key0, K);
    prefetch(past + 2 * keys + value0, values);
  }
}

__device__ inline void run_mix(const DeltaMix& op, Walk& walk) {
  const int slices = slices_of(op), values = op.value_dim / slices, K = op.key_dim;
  const int units = op.rows.count * op.value_heads * slices, warp = threadIdx.x / 32;
  const int all = 2 * K + values, group = op.value_heads / op.key_heads;
  const delta::Vectors x = delta::vectors(op, values, walk.shared.vectors);
  Late late;
  for (int u = blockIdx.x; u < units || u < int(gridDim.x); u += gridDim.x) {
    const bool met = u >= int(gridDim.x);  // before an earlier unit
    const Unit unit = Unit::of(op, slices, u);
    const Slot slot = u < units ? op.rows.slot[unit.row] : kPadding;
    if (slot == kPadding) {
      if (met) continue;
      meet(walk);
      late = new_history(op);
      continue;
    }
    const int begin = op.rows.begin[unit.row];
    const delta::Place place{
        .key_head = unit.head / group,
        .value_head = unit.head,
        .decay_head = unit.head * op.decay_heads / op.value_heads,
        .value0 = unit.slice * values,
        .values = values,
        .token = 0,
        .begin = begin,
        .fresh = op.rows.first[unit.row] == 0,
        .history = op.history.data == nullptr ? nullptr : at(op.history, slot),
        .channels = 2 * int64_t(op.key_heads) * K + int64_t(op.value_heads) * op.value_dim};
    float* state =
        at(op.state, slot) + (int64_t(unit.head) * op.value_dim + place.value0) * K;
    StateRows rows, next;
    rows.load(state, warp, values, K, place.fresh);
#pragma unroll 1
    for (int first = threadIdx.x; first - int(threadIdx.x) < all; first += kComputing) {
      delta::Pass<4, kComputing, 1> pass;
      pass.load_kept(op, place, first);
      const bool meets = !met && first < kComputing;
      if (meets) meet(walk);
      pass.load_new(op, place, first);
      if (meets) late = new_history(op);
      pass.make(op, place, first, x, false);
    }
    barrier_among<kAll>(kComputing);  // the vectors are there
    const float k_scale = delta::head_scale(op.qk_norm, x.k, K);
    const float q_scale = delta::head_scale(op.qk_norm, x.q, K) / sqrtf(float(K));
    float* out = at(op.out, begin) + int64_t(unit.head) * op.value_dim + place.value0;
#pragma unroll 1
    for (int v = warp; v < values; v += kWarps * StateRows::kRows) {
      next.load(state, v + kWarps * StateRows::kRows, values, K, place.fresh);
      rows.step(op, x, state, v, values, k_scale, q_scale, out);
      rows = next;
    }
    barrier_among<kAll>(kComputing);  // the vectors may be overwritten
  }
  walk.shared.late[threadIdx.x] = late;
  walk.late = true;
}

}  // namespace weir::cuda::resident
