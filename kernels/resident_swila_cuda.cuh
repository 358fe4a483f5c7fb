#pragma once
#include "kernels/resident_mix_cuda.cuh"
#include "kernels/swila_mix.h"
#include "kernels/vector_cuda.cuh"

// Switching Linear Attention's phases of the resident kernel. A warp has one value dim d of a head
// with all its mixtures: 32 / J neighbouring lanes share a row S[j][d].
namespace weir::cuda::resident {

// A head's vectors, of one token, in shared memory; keys and queries without their norm.
struct SwilaHead {
  float q[kKeysMost], k[kKeysMost], v[kKeysMost];
  float decay[kSwilaMost];        // [mixture, key dim], exp(g)
  float sums[2][kKeysMost / 32];  // of q's and k's squares, each of 32 channels
};
static_assert(sizeof(SwilaHead) <= sizeof(Shared::head));

__device__ inline UnitPlace place_of(const SwilaMix& op, const RowPlace* rows, int slices, int u) {
  const int row = u / slices / op.heads, head = u / slices % op.heads, D = op.dim;
  const int values = D / slices, first = u % slices * values;
  const RowPlace& place = rows[row];
  const bool padding = place.slot == kPadding;
  return {.key = head * D,
          .value_head = head,
          .decay_head = head,
          .first_value = head * D + first,
          .begin = place.begin,
          .slot = place.slot,
          .padding = padding,
          .fresh = place.fresh,
          .oldest = place.oldest,
          .state = padding ? nullptr
                           : at(op.state, place.slot) +
                                 (int64_t(head) * op.mixtures * D + first) * D,
          .history = padding ? nullptr : at(op.history, place.slot),
          .out = at(op.out, place.begin) + head * D + first};
}

__device__ inline void share_out(const SwilaMix& op, const RowPlace* rows, Sharing& sharing) {
  int slices = 1;
  while (op.rows.count * op.heads * slices * 2 <= int(gridDim.x) && op.dim % (slices * 2) == 0) {
    slices *= 2;
  }
  sharing.slices = slices;
  sharing.values = op.dim / slices;
  sharing.units = op.rows.count * op.heads * slices;
  sharing.channels = 3 * op.heads * op.dim;
  if (int(blockIdx.x) < sharing.units) sharing.first = place_of(op, rows, slices, blockIdx.x);
}

__device__ inline void prefetch_mix(const SwilaMix& op, const Sharing& sharing) {
  const UnitPlace& unit = sharing.first;
  const int values = sharing.values, D = op.dim, keys = op.heads * D;
  if (int(blockIdx.x) >= sharing.units || unit.padding) return;
#pragma unroll 1
  for (int j = 0; j < op.mixtures; ++j) prefetch(unit.state + j * D * D, values * D);
  prefetch(op.conv_q + unit.key * 4, D * 4);
  prefetch(op.conv_k + unit.key * 4, D * 4);
  prefetch(op.conv_v + unit.first_value * 4, values * 4);
#pragma unroll 1
  for (int h = 0; h < 3; ++h) {
    const float* past = unit.history + int64_t(h) * sharing.channels;
    prefetch(past + unit.key, D);
    prefetch(past + keys + unit.key, D);
    prefetch(past + 2 * keys + unit.first_value, values);
  }
}

// Over the lanes that are `first`, 2 `first` ... below `end` apart.
__device__ inline float sum_apart(float value, int first, int end) {
#pragma unroll 1
  for (int step = first; step < end; step *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}
__device__ inline float softmax_apart(float x, int first) {
  float largest = x;
#pragma unroll 1
  for (int step = first; step < 32; step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  x = expf(x - largest);
  return x / sum_apart(x, first, 32);
}

// One of a unit's channels: of q, of k, of v; then, gated, of the decays of all mixtures.
__device__ inline void make_channel(const SwilaMix& op, const UnitPlace& place,
                                    const Sharing& sharing, int i, SwilaHead& head) {
  const int D = op.dim, which = int(i >= D) + int(i >= 2 * D);
  if (i >= 2 * D + sharing.values) {
    const int e = i - 2 * D - sharing.values, column = place.key * op.mixtures + e;
    const float a = op.decay_a[place.value_head * op.mixtures + e / D];
    const float shift = op.dt_bias[column];
    head.decay[e] = expf(-a * softplus(await(at(op.decay_in, place.begin) + column) + shift));
    return;
  }
  const int column = which < 2 ? place.key + i - which * D : place.first_value + i - 2 * D;
  const Acts& from = *(which == 0 ? &op.q : which == 1 ? &op.k : &op.v);
  const float* const taps = *(which == 0 ? &op.conv_q : which == 1 ? &op.conv_k : &op.conv_v);
  const float* const past = place.history + which * op.heads * D + column;
  const float4 tap = *reinterpret_cast<const float4*>(taps + column * 4);
  const Past before(place, past, sharing.channels);
  const float newest = await(at(from, place.begin) + column);
  float x = tap.x * before.value[0] + tap.y * before.value[1] + tap.z * before.value[2] +
            tap.w * newest;
  x *= quick_sigmoid(x);
  if (which == 2) {
    head.v[i - 2 * D] = x;
    return;
  }
  __syncwarp();
  const float sum = sum_over_lanes(x * x);
  if (i % 32 == 0) head.sums[which][i % D / 32] = sum;
  (which == 0 ? head.q : head.k)[i % D] = x;
}

// A lane's part of a value dim's rows, and the factors of its own mixture.
struct SwilaRow {
  static constexpr int kParts = kSwilaMost / 128;
  float4 held[kParts];
  float posterior, prior;  // r and rho
  float log_prior, write;  // of the key; sigmoid(beta)
  int mixture, lanes, lane, parts;
  float* first;            // of `held`, in the state
  int64_t mixed;           // the mixture's and the dim's place in the vectors of all mixtures

  __device__ SwilaRow(const SwilaMix& op, const UnitPlace& place, Me me, int v) {
    const int D = op.dim, J = op.mixtures;
    lanes = 32 / J;
    mixture = me.lane() / lanes;
    lane = me.lane() % lanes;
    parts = J * D / 128;
    first = place.state + (mixture * D + v) * D + lane * 4;
    const int dim = place.first_value - place.key + v;
    mixed = int64_t(place.key) * J + mixture * D + dim;
    posterior = prior = 1.0f / float(J);
    const bool temporal = op.key_mix.data != nullptr;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      held[c] = {0, 0, 0, 0};
      if (!place.fresh && c < parts) {
        held[c] = *reinterpret_cast<const float4*>(first + c * lanes * 4);
      }
    }
    if (temporal && !place.fresh) {
      posterior = at(op.posterior, place.slot)[mixed];
      prior = at(op.prior, place.slot)[mixed];
    }
    mix(op, place, place.key + dim, temporal);
  }

  __device__ void mix(const SwilaMix& op, const UnitPlace& place, int column, bool temporal) {
    float key, query, beta, key_mix = 0, query_mix = 0;
#pragma unroll 1
    for (int turn = 0;; count_turn(turn)) {
      key = look(at(op.key_router, place.begin) + mixed);
      query = look(at(op.query_router, place.begin) + mixed);
      beta = look(at(op.beta, place.begin) + mixed);
      if (temporal) {
        key_mix = look(at(op.key_mix, place.begin) + column);
        query_mix = look(at(op.query_mix, place.begin) + column);
      }
      const bool there = written(key) && written(query) && written(beta) && written(key_mix) &&
                         written(query_mix);
      if (__all_sync(0xffffffffu, there)) break;
    }
    key = softmax_apart(key, lanes);
    query = softmax_apart(query, lanes);
    if (temporal) {
      const float from_key = sigmoid(key_mix), from_query = sigmoid(query_mix);
      key = (1.0f - from_key) * posterior + from_key * key;
      query = (1.0f - from_query) * prior + from_query * query;
    }
    log_prior = logf(key);
    prior = query;
    write = sigmoid(beta);
  }

  __device__ void step(const SwilaMix& op, const UnitPlace& place, const SwilaHead& head, int v,
                       float k_scale, float q_scale) {
    const auto own = [&](const float* vector, int c) {
      return *reinterpret_cast<const float4*>(vector + (c * lanes + lane) * 4);
    };
    float recalled = 0;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      if (c >= parts) break;
      if (op.gated) {
        held[c] = times(held[c], own(head.decay + mixture * op.dim, c));
      }
      recalled += dot(held[c], own(head.k, c));
    }
    const float delta = head.v[v] - k_scale * sum_apart(recalled, 1, lanes);
    posterior = softmax_apart(log_prior - delta * delta / 2, lanes);
    const float u = write * posterior * delta * k_scale;
    float answer = 0;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      if (c >= parts) break;
      held[c] = plus(held[c], u, own(head.k, c));
      answer += dot(held[c], own(head.q, c));
    }
    answer = sum_apart(sum_apart(answer, 1, lanes) * prior, lanes, 32) * q_scale;
    if (mixture == 0 && lane == 0) leave(place.out + v, answer);
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      if (c < parts) *reinterpret_cast<float4*>(first + c * lanes * 4) = held[c];
    }
    if (op.key_mix.data == nullptr || lane > 0) return;
    at(op.posterior, place.slot)[mixed] = posterior;
    at(op.prior, place.slot)[mixed] = prior;
  }
};

__device__ inline void run_unit(const SwilaMix& op, const Sharing& sharing, const UnitPlace& place,
                                Me me) {
  auto& head = *reinterpret_cast<SwilaHead*>(shared_memory().head);
  const int D = op.dim, values = sharing.values;
  const int all = 2 * D + values + (op.gated ? op.mixtures * D : 0);
#pragma unroll 1
  for (int i = me.thread; i < all; i += kComputing) make_channel(op, place, sharing, i, head);
  bool made = false;  // the vectors
#pragma unroll 1
  for (int v = me.warp(); v < values || !made; v += kWarps) {
    __syncwarp();
    SwilaRow row(op, place, me, min(v, values - 1));
    if (!made) barrier_among<kAll>(kComputing);  // the vectors are there
    made = true;
    if (v >= values) break;
    const float k_scale = scale_of(QkNorm::L2, head.sums[1], D);
    const float q_scale = scale_of(QkNorm::L2, head.sums[0], D);
    row.step(op, place, head, v, k_scale, q_scale);
  }
}

}  // namespace weir::cuda::resident
