#include "kernels/cuda_util.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda {
namespace {

// Rows of a head's state (a value each) have nothing to do with each other: a block is one warp
// that takes a few of them into registers, passes the row's tokens by and puts them back. A thread
// holds up to 32 numbers of the state. Keys that are no multiple of four, or too long, are read and
// written one number at a time, with the row in shared memory.
//
// Floor, one token a row: the state read once and written once, 8 * key_dim * value_dim bytes per
// head and row.
constexpr int kMost = 2048;  // keys of a row in shared memory

// Where the warp is.
struct Place {
  int head, begin, tokens;
  bool fresh;
};

// This head's vector of one update of one token.
__device__ inline const float* vector(const EraseStep& op, const Acts& acts, const Place& place,
                                      int t, int update, int dim) {
  return at(acts, place.begin + t) + (update * op.heads + place.head) * dim;
}
__device__ inline const Acts& read_along(const EraseStep& op) {
  return op.p.data != nullptr ? op.p : op.k;
}
__device__ inline const Acts& erase_along(const EraseStep& op) {
  return op.e.data != nullptr ? op.e : op.k;
}
__device__ inline float beta_of(const EraseStep& op, const Place& place, int t, int update) {
  if (op.beta.data == nullptr) return op.beta_scale;
  return op.beta_scale *
         sigmoid(at(op.beta, place.begin + t)[update * op.heads + place.head]);
}
// exp(log_decay) of key i, in a token's first update.
__device__ inline float decay_of(const EraseStep& op, const Place& place, int t, int update,
                                 int i) {
  if (op.decay == Decay::None || update > 0) return 1.0f;
  const float* g = at(op.log_decay, place.begin + t);
  return expf(op.decay == Decay::PerHead ? g[place.head] : g[place.head * op.key_dim + i]);
}

template <int kLanes_, int kParts_>
struct Layout {
  static constexpr int kLanes = kLanes_;         // threads of a row
  static constexpr int kParts = kParts_;         // of 16 bytes, of a row, in a thread
  static constexpr int kRows = 8 / kParts;       // of a thread
  static constexpr int kKeys = 4 * kLanes * kParts;
  static constexpr int kApart = 32 / kLanes;     // rows between two of a thread
  static constexpr int kTile = kApart * kRows;   // rows of a warp
};

template <class L>
struct State {
  float4 row[L::kRows][L::kParts];

  // One update; v: the rows' values.
  __device__ void update(const EraseStep& op, const Place& place, int t, int u,
                         const float (&v)[L::kRows]) {
    const int lane = threadIdx.x % L::kLanes;
    const auto part = [&](const Acts& acts, int c) {
      const float* from = vector(op, acts, place, t, u, L::kKeys);
      return reinterpret_cast<const float4*>(from)[c * L::kLanes + lane];
    };
    float read[L::kRows] = {};
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      const int i = 4 * (c * L::kLanes + lane);
      const auto decay = [&](int j) { return decay_of(op, place, t, u, i + j); };
      const float4 decays{decay(0), decay(1), decay(2), decay(3)};
      float4 p = part(read_along(op), c);
      if (op.decayed_read) p = times(p, decays);
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        read[r] += dot(row[r][c], p);
        row[r][c] = times(row[r][c], decays);
      }
    }
    const float beta = beta_of(op, place, t, u);
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) read[r] = beta * sum_over_lanes<L::kLanes>(read[r]);
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      const float4 k = part(op.k, c), e = part(erase_along(op), c);
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        row[r][c] = plus(plus(row[r][c], beta * v[r], k), -read[r], e);
      }
    }
  }

  __device__ void answer(const EraseStep& op, const Place& place, int t, int value,
                         const float (&v)[L::kRows]) const {
    const int lane = threadIdx.x % L::kLanes;
    const auto part = [&](const float* from, int c) {
      return reinterpret_cast<const float4*>(from)[c * L::kLanes + lane];
    };
    const float* const q = vector(op, op.q, place, t, 0, L::kKeys);
    const float* const k = vector(op, op.k, place, t, op.updates - 1, L::kKeys);
    float sum[L::kRows] = {}, weight = 0;
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      const float4 query = part(q, c);
      if (op.bonus != nullptr) {
        weight += dot(times(query, part(k, c)), part(op.bonus + place.head * L::kKeys, c));
      }
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) sum[r] += dot(row[r][c], query);
    }
    weight = sum_over_lanes<L::kLanes>(weight);
    const int64_t token = place.begin + t, first = place.head * op.value_dim + value;
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      const float out = op.scale * sum_over_lanes<L::kLanes>(sum[r]);
      if (lane != 0 || value + r * L::kApart >= op.value_dim) continue;
      at(op.out, token)[first + r * L::kApart] = out;
      if (op.bonus != nullptr) at(op.bonus_out, token)[first + r * L::kApart] = weight * v[r];
    }
  }
};

template <class L>
__global__ __launch_bounds__(32, 16) void erase_step_kernel(const __grid_constant__ EraseStep op,
                                                            bool fresh_state, int tiles) {
  let_successor_start();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const Place place{.head = int(blockIdx.x) / tiles, .begin = begin,
                    .tokens = op.rows.begin[row + 1] - begin, .fresh = op.rows.first[row] == 0};
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || place.tokens == 0) {
    wait_for_predecessor();
    return;
  }
  if (!fresh_state) wait_for_predecessor();
  const int lane = threadIdx.x % L::kLanes;
  const int value = int(blockIdx.x) % tiles * L::kTile + threadIdx.x / L::kLanes;
  float4* const mine = reinterpret_cast<float4*>(
                           at(op.state, slot) +
                           (int64_t(place.head) * op.value_dim + value) * L::kKeys) + lane;
  const auto part = [&](int r, int c) {
    return mine + (r * L::kApart * L::kKeys / 4 + c * L::kLanes);
  };
  const auto valid = [&](int r) { return value + r * L::kApart < op.value_dim; };
  State<L> state;
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      state.row[r][c] = place.fresh || !valid(r) ? float4{0, 0, 0, 0} : *part(r, c);
    }
  }
  if (fresh_state) wait_for_predecessor();
#pragma unroll 1
  for (int t = 0; t < place.tokens; ++t) {
    float v[L::kRows];
#pragma unroll 1
    for (int u = 0; u < op.updates; ++u) {
      const float* const values = vector(op, op.v, place, t, u, op.value_dim) + value;
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) v[r] = valid(r) ? values[r * L::kApart] : 0.0f;
      state.update(op, place, t, u, v);
    }
    state.answer(op, place, t, value, v);
  }
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      if (valid(r)) *part(r, c) = state.row[r][c];
    }
  }
}

// Any sizes: one warp a row of the state.
__global__ __launch_bounds__(32) void erase_step_any_kernel(const __grid_constant__ EraseStep op) {
  __shared__ float s[kMost];
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, begin = op.rows.begin[row], K = op.key_dim, lane = threadIdx.x;
  const Place place{.head = int(blockIdx.x) / op.value_dim, .begin = begin,
                    .tokens = op.rows.begin[row + 1] - begin, .fresh = op.rows.first[row] == 0};
  const int value = int(blockIdx.x) % op.value_dim;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || place.tokens == 0) return;
  float* const state =
      at(op.state, slot) + (int64_t(place.head) * op.value_dim + value) * K;
  for (int i = lane; i < K; i += 32) s[i] = place.fresh ? 0.0f : state[i];
  for (int t = 0; t < place.tokens; ++t) {
    const float *k = nullptr, *q = vector(op, op.q, place, t, 0, K);
    float v = 0;
    for (int u = 0; u < op.updates; ++u) {
      k = vector(op, op.k, place, t, u, K);
      v = vector(op, op.v, place, t, u, op.value_dim)[value];
      const float* const p = vector(op, read_along(op), place, t, u, K);
      const float* const e = vector(op, erase_along(op), place, t, u, K);
      const float beta = beta_of(op, place, t, u);
      float read = 0;
      for (int i = lane; i < K; i += 32) {
        const float decay = decay_of(op, place, t, u, i);
        read += s[i] * p[i] * (op.decayed_read ? decay : 1.0f);
        s[i] *= decay;
      }
      read = sum_over_lanes(read);
      for (int i = lane; i < K; i += 32) s[i] += beta * (v * k[i] - read * e[i]);
    }
    float sum = 0, weight = 0;
    for (int i = lane; i < K; i += 32) {
      sum += s[i] * q[i];
      if (op.bonus != nullptr) weight += q[i] * k[i] * op.bonus[place.head * K + i];
    }
    sum = sum_over_lanes(sum);
    weight = sum_over_lanes(weight);
    if (lane > 0) continue;
    const int out = place.head * op.value_dim + value;
    at(op.out, begin + t)[out] = op.scale * sum;
    if (op.bonus != nullptr) at(op.bonus_out, begin + t)[out] = weight * v;
  }
  for (int i = lane; i < K; i += 32) state[i] = s[i];
}

template <class L>
void start(const EraseStep& op, Context& context) {
  const int tiles = (op.value_dim + L::kTile - 1) / L::kTile;
  launch(context, {.grid = dim3(op.heads * tiles, op.rows.count), .block = dim3(32)},
         erase_step_kernel<L>, op, context.fresh_state, tiles);
}

bool aligned(const EraseStep& op) {
  bool all = op.state.stride % 4 == 0 && reinterpret_cast<uintptr_t>(op.state.data) % 16 == 0 &&
             reinterpret_cast<uintptr_t>(op.bonus) % 16 == 0;
  for (const Acts& acts : {op.q, op.k, op.p, op.e}) {
    all = all && acts.stride % 4 == 0 && reinterpret_cast<uintptr_t>(acts.data) % 16 == 0;
  }
  return all;
}

}  // namespace

void run(const EraseStep& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.rows.count <= 65535 && op.key_dim <= kMost);
  switch (aligned(op) ? op.key_dim : 0) {
    case 32: return start<Layout<8, 1>>(op, context);
    case 64: return start<Layout<16, 1>>(op, context);
    case 128: return start<Layout<32, 1>>(op, context);
    case 256: return start<Layout<32, 2>>(op, context);
    default: break;
  }
  launch(context, {.grid = dim3(op.heads * op.value_dim, op.rows.count), .block = dim3(32)},
         erase_step_any_kernel, op);
}

}  // namespace weir::cuda
