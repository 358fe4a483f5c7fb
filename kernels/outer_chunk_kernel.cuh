#pragma once
#include "kernels/outer_chunk_prepare.cuh"

namespace weir::cuda::adding {

// Where a block's part of a state lies, or what a segment makes of one.
struct Memory {
  float *state, *sums, *decay;
};
template <class L>
__device__ inline Memory memory_of(float* end) {
  float* const sums = end + L::kValues * L::K;
  return {end, sums, sums + L::K};
}

// A warp's 16 values of the state, [value, key]. They are kept times `range`, a power of two that
// lets none of them outgrow a half: without decay a state grows for as long as its row.
template <class L>
struct Holder {
  static constexpr int K = L::K, kTiles = K / 8;
  const OuterStep& op;
  const Place& place;
  L& shared;
  float S[kTiles][4];
  float range = 1;
  int warp, g, p;     // the lane's row and column of a fragment
  int head;           // of the block's
  bool sums;          // the warp has the running sum of keys, as the state of one value, always 1

  __device__ Holder(const OuterStep& op, const Place& place, L& shared)
      : op(op), place(place), shared(shared), warp(threadIdx.x / 32), g(threadIdx.x % 32 / 4),
        p(threadIdx.x % 4 * 2), head(place.heads == 1 ? 0 : 16 * warp / op.value_dim),
        sums(L::kSum && warp == L::kWarps) {}

  // Rows g and g + 8.
  __device__ float* row(const Memory& memory, int half_row) const {
    return sums ? memory.sums + p : memory.state + (16 * warp + g + 8 * half_row) * K + p;
  }
  __device__ bool has(int half_row) const { return !sums || (g == 0 && half_row == 0); }
  __device__ void load(const Memory& memory) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 pair{0, 0};
        if (!place.fresh && has(h)) pair = *reinterpret_cast<float2*>(row(memory, h) + 8 * n);
        S[n][2 * h] = pair.x;
        S[n][2 * h + 1] = pair.y;
      }
    }
  }
  __device__ void store(const Memory& memory) const {
    const float whole = 1 / range;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!has(h)) continue;
        *reinterpret_cast<float2*>(row(memory, h) + 8 * n) = {whole * S[n][2 * h],
                                                              whole * S[n][2 * h + 1]};
      }
    }
  }

  // Every 128 tokens, at first every 32: a half holds 65,504, so that the state may grow
  // sixteenfold until the next time.
  __device__ void fit_range() {
    constexpr float kLargest = 4096;
    float largest = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(S[n][i]));
    }
    largest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
    if (!(largest > kLargest) || largest > 3e38f) return;
    float by = 1;
    while (largest * by > kLargest) by *= 0.5f;
    range *= by;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) S[n][i] *= by;
    }
  }

  // A token's number for each of this thread's columns of tile n of chunk m.
  __device__ float2 columns(const float* of_token, int m, int n) const {
    return *reinterpret_cast<const float2*>(of_token + m * kBlock + 8 * n + p);
  }
  __device__ static void scale_columns(float (&tile)[4], float2 by) {
    tile[0] *= by.x;
    tile[1] *= by.y;
    tile[2] *= by.x;
    tile[3] *= by.y;
  }

  // Values of chunk m as a left operand, [value, token].
  __device__ void values(int m, uint32_t (&V)[4]) const {
    if (sums) {
      V[0] = V[2] = g == 0 ? pack(1, 1) : 0;
      V[1] = V[3] = 0;
      return;
    }
    load_transposed(V, rows_of_b(shared.v + m * kBlock * L::kValuePitch + 16 * warp,
                                 L::kValuePitch));
  }

  // O of chunk m, [value, token], from the state before it and from its own tokens.
  __device__ void answer(int m, const uint32_t (&V)[4], float (&O)[2][4]) const {
    float odd[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) O[0][i] = O[1][i] = 0;
    const uint32_t queries = rows_of_b(shared.q + m * kBlock * L::kKeyPitch, L::kKeyPitch);
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      uint32_t state[4], q[4];
      narrow(state, S[2 * i], S[2 * i + 1]);
      load_matrices(q, queries + 32 * i);
      multiply(i % 2 == 0 ? O[0] : odd[0], state, q[0], q[1]);
      multiply(i % 2 == 0 ? O[1] : odd[1], state, q[2], q[3]);
    }
    const float whole = 1 / range;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) O[n][i] = (O[n][i] + odd[n][i]) * whole;
      if constexpr (L::kHead) scale_columns(O[n], columns(shared.asked[head], m, n));
    }
    if constexpr (L::kValue) return add_own(m, O);
    uint32_t P[4];
    load_matrices(P, rows_of_b(shared.p[head] + m * kBlock * L::kBlockPitch, L::kBlockPitch));
    multiply(O[0], V, P[0], P[1]);
    multiply(O[1], V, P[2], P[3]);
  }

  // Per value: what the state answers decays on, and what the chunk's own tokens do is there.
  __device__ void add_own(int m, float (&O)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (m * kBlock + 8 * n + p + i % 2) * L::kValues + 16 * warp + g + i / 2 * 8;
        O[n][i] = O[n][i] * shared.since[at] + shared.own[at];
      }
    }
  }

  // O / (z . q + 1e-10), z . q being what the sum's warp has for O.
  __device__ void divide(int m, float (&O)[2][4]) const {
    if (sums && g == 0) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        *reinterpret_cast<float2*>(&shared.divisor[m * kBlock + 8 * n + p]) = {
            1 / (O[n][0] + 1e-10f), 1 / (O[n][1] + 1e-10f)};
      }
    }
    meet(1, 32 * L::kHolders);
#pragma unroll
    for (int n = 0; n < 2; ++n) scale_columns(O[n], columns(shared.divisor, m, n));
  }

  __device__ void write(int first, int m, const uint32_t (&V)[4], float (&O)[2][4]) const {
    const int64_t value = place.value + 16 * warp + g;
    if (op.skip != nullptr) {
      const float skip[2] = {op.skip[value], op.skip[value + 8]};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(V[i]);
        O[i / 2][i % 2 * 2] += skip[i % 2] * pair.x;
        O[i / 2][i % 2 * 2 + 1] += skip[i % 2] * pair.y;
      }
    }
    const int token = first + m * kBlock + p;
    float* const out = at(op.out, place.begin + token) + value;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (token + 8 * n + i >= place.count) continue;
        float* const to = out + (8 * n + i) * op.out.stride;
        to[0] = O[n][i];
        to[8] = O[n][i + 2];
      }
    }
  }

  // S = S diag(whole) + V' K
  __device__ void advance(int m, uint32_t (&V)[4]) {
    if (L::kHead || range != 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(V[i]);
        float2 by{range, range};
        if constexpr (L::kHead) {
          by = columns(shared.kept[head], m, i / 2);
          by = {by.x * range, by.y * range};
        }
        V[i] = pack(pair.x * by.x, pair.y * by.y);
      }
    }
    decay(m);
    const uint32_t keys = rows_of_a(shared.k + m * kBlock * L::kKeyPitch, L::kKeyPitch);
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      uint32_t k[4];
      load_transposed(k, keys + 32 * i);
      multiply(S[2 * i], V, k[0], k[1]);
      multiply(S[2 * i + 1], V, k[2], k[3]);
    }
  }

  __device__ void decay(int m) {
    if (L::kSum || (L::kHead && op.decay == OuterStep::Decay::None)) return;
    float rows[2] = {};
    if constexpr (!L::kKey) {
      const float* const whole = shared.whole + m * L::kValues + 16 * warp + g;
      const float all = shared.whole[head * kBlocks + m];
      rows[0] = L::kValue ? whole[0] : all;
      rows[1] = L::kValue ? whole[8] : all;
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if constexpr (L::kKey) {
        scale_columns(S[n],
                      *reinterpret_cast<const float2*>(&shared.whole[m * K + 8 * n + p]));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) S[n][i] *= rows[i / 2];
      }
    }
  }

  __device__ void pass(int first) {
#pragma unroll 1
    for (int m = 0; m < kBlocks && first + m * kBlock < place.count; ++m) {
      uint32_t V[4];
      float O[2][4];
      values(m, V);
      if constexpr (L::kGather) {
        advance(m, V);
        continue;
      }
      answer(m, V, O);
      if constexpr (L::kSum) divide(m, O);
      if (!sums) write(first, m, V, O);
      advance(m, V);
    }
  }
};

// From a tile as it has come to what the state meets, by all warps; the next one is on its way.
template <class L>
__device__ inline void prepare_tile(const Preparer<L>& prepare, int first, Gates& gates) {
  const Place& place = prepare.place;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, next = first + kTokens;
  const bool has_gates = L::kHead && warp < place.heads;
  if constexpr (!L::kValue) prepare.narrow_values();
  if constexpr (!L::kKey) prepare.narrow_keys();
  if constexpr (L::kKey) prepare.decay_keys();
  if constexpr (L::kValue) prepare.decay_values();
  if (has_gates) prepare.keep_gates(gates, warp);
  __syncthreads();  // the tile as halves is there, and the decays
  if (L::kHead || L::kGather) {
    if (next < place.count) prepare.load_tile(next);
  }
  if (has_gates) gates.load(prepare.op, place, place.head + warp, next + lane);
  if constexpr (L::kGather) {
    prepare.add_to_total();
    return;
  }
  if constexpr (L::kKey) {
    prepare.all_products();
  } else if (warp < kBlocks) {
    prepare.products(warp);
  }
  __syncthreads();  // P is there
  if constexpr (L::kValue) {
    prepare.own_answers();
    __syncthreads();  // what the chunks' own tokens answer is there
  }
  if (!L::kHead && next < place.count) prepare.load_tile(next);
}

// Before the first tile.
template <class L>
__device__ inline void clear_shared(L& shared) {
  for (int i = threadIdx.x; i < L::kHeads * kTokens * L::kBlockPitch; i += L::kThreads) {
    shared.p[0][i] = __ushort_as_half(0);
  }
  if constexpr (L::kGather) {  // each by the thread that multiplies it
    for (int i = threadIdx.x; i < max(L::K, L::kValues); i += L::kThreads) shared.total[i] = 1;
  }
}

template <class L>
__device__ inline Place place_of(const OuterStep& op, const Segments& segments, int row) {
  const int begin = op.rows.begin[row];
  const int value = int(blockIdx.x) * L::kValues, head = value / op.value_dim;
  Place place{.row = row,
              .head = head,
              .key_head = head * op.key_heads / op.heads,
              .query = head * op.query_heads / op.heads,
              .heads = max(1, L::kValues / op.value_dim),
              .value = value,
              .value_column = head * op.value_heads / op.heads * op.value_dim +
                              value % op.value_dim,
              .begin = begin,
              .count = op.rows.begin[row + 1] - begin,
              .segment = int(blockIdx.z),
              .segments = 1,
              .fresh = op.rows.first[row] == 0};
  if (place.count <= kOuterStepsMost) place.count = 0;
  if (segments.tokens > 0) {
    place.segments = (place.count + segments.tokens - 1) / segments.tokens;
    place.begin += place.segment * segments.tokens;
    place.count = min(segments.tokens, place.count - place.segment * segments.tokens);
    if (L::kGather) place.fresh = true;
    if (L::kGather && place.segments == 1) place.count = 0;
  }
  return place;
}

// Where the block's part of a state is kept: in the slot, or at a segment's end. Ends of a row's
// segments lie behind those of all earlier rows.
template <class L>
__device__ inline Memory place_of_state(const OuterStep& op, const Segments& segments,
                                        const Place& place, Slot slot) {
  if (place.segments == 1) {
    return {at(op.state, slot) + int64_t(place.value) * L::K,
            at(op.sums, slot) + int64_t(place.head) * L::K, nullptr};
  }
  const int before = op.rows.begin[place.row] / segments.tokens + place.row;
  const int64_t end = int64_t(before + place.segment) * gridDim.x + blockIdx.x;
  return memory_of<L>(segments.ends + end * end_floats(L::K, L::kValues));
}

template <class L>
__global__ __launch_bounds__(L::kThreads, L::kResident) void outer_chunk_kernel(
    const __grid_constant__ OuterStep op, Segments segments) {
  extern __shared__ __align__(16) unsigned char space[];
  L& shared = *reinterpret_cast<L*>(space);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_successor_start();
  const int row = long_row(op.rows, blockIdx.y, kOuterStepsMost);
  wait_for_predecessor();
  if (row < 0) return;
  const Slot slot = op.rows.slot[row];
  Place place = place_of<L>(op, segments, row);
  if (slot == kPadding || place.count <= 0) return;
  const Memory memory = place_of_state<L>(op, segments, place, slot);
  // A segment starts where the launch before has put it.
  if (!L::kGather && place.segments > 1) place.fresh = false;
  const Preparer<L> prepare{op, place, shared};
  prepare.load_tile(0);
  Gates gates;
  if (L::kHead && warp < place.heads) gates.load(op, place, place.head + warp, lane);
  clear_shared<L>(shared);
  Holder<L> holder(op, place, shared);
  const bool holds = warp < L::kHolders;
  if (holds) holder.load(memory);
#pragma unroll 1
  for (int first = 0; first < place.count; first += kTokens) {
    copies_wait();
    __syncthreads();  // the tile has come, and the one before is done with
    prepare_tile(prepare, first, gates);
    if (!holds) continue;
    if (first < 4 * kTokens || first / kTokens % 4 == 0) holder.fit_range();
    holder.pass(first);
  }
  if (L::kGather) prepare.keep_total(memory.decay);
  if (holds && (L::kGather || place.segments == 1)) holder.store(memory);
}

template <class L>
void launch_chunks(const OuterStep& op, Context& context, const Segments& segments) {
  const auto kernel = outer_chunk_kernel<L>;
  static_assert(sizeof(L) * L::kResident <= (L::kResident > 1 ? 226 : 227) * 1024);
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(sizeof(L))));
  launch(context,
         {.grid = dim3(op.heads * op.value_dim / L::kValues,
                       most_long_rows(op.rows, kOuterStepsMost), segments.most),
          .block = dim3(L::kThreads),
          .shared = sizeof(L)},
         kernel, op, segments);
}

template <int K, By kBy, int kWarps>
void start(const OuterStep& op, Context& context, const Segments& segments) {
  if (segments.tokens > 0) {
    launch_chunks<Layout<K, kBy, kWarps, true>>(op, context, segments);
    pass_segments(op, context, 16 * kWarps, segments);
  }
  launch_chunks<Layout<K, kBy, kWarps, false>>(op, context, segments);
}

template <int K, By kBy>
void start(const OuterStep& op, Context& context, int slice, const Segments& segments) {
  if constexpr (kBy == By::Sum) {  // the sum of keys belongs to all values of a head
    return slice == 128 ? start<K, kBy, 8>(op, context, segments)
                        : start<K, kBy, 4>(op, context, segments);
  } else {
    switch (slice) {
      case 128: return start<K, kBy, 8>(op, context, segments);
      case 64: return start<K, kBy, 4>(op, context, segments);
      case 32: return start<K, kBy, 2>(op, context, segments);
      default: return start<K, kBy, 1>(op, context, segments);
    }
  }
}

template <By kBy>
void start(const OuterStep& op, Context& context, int slice, const Segments& segments) {
  switch (op.key_dim) {
    case 64: return start<64, kBy>(op, context, slice, segments);
    case 128: return start<128, kBy>(op, context, slice, segments);
    default: return start<256, kBy>(op, context, slice, segments);
  }
}

}  // namespace weir::cuda::adding
