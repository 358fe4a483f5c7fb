#include "kernels/async_cuda.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda {
namespace {

// Rows of a head's state (a value each) have nothing to do with each other: each warp takes a few
// of them into registers, passes the row's tokens by and puts them back. A thread holds up to 32
// numbers of the state. Keys that are no multiple of four, or too long, are read and written one
// number at a time, with the row in shared memory.
//
// Rows of one token: a block is one warp. Longer ones: the warps of a block share what they read of
// a token, which comes to shared memory some updates ahead.
//
// Floor, one token a row: the state read once and written once, 8 * key_dim * value_dim bytes per
// head and row. Longer rows: about 5 operations for each number of the state and update, 160
// instructions of a warp with 8 rows a thread, and some 100 more for its sums over lanes.
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

template <int kLanes_, int kParts_, int kRows_, int kWarps_>
struct Layout {
  static constexpr int kLanes = kLanes_;         // threads of a row
  static constexpr int kParts = kParts_;         // of 16 bytes, of a row, in a thread
  static constexpr int kRows = kRows_;           // of a thread
  static constexpr int kWarps = kWarps_;         // of a block
  static constexpr int kKeys = 4 * kLanes * kParts;
  static constexpr int kTile = 32 / kLanes * kRows * kWarps;  // rows of a block

  // The thread's first row in the tile.
  __device__ static int row() { return int(threadIdx.x) / kLanes * kRows; }
};

// What a thread reads of one update of a token: its pieces of the vectors, its rows' values.
template <class L>
struct Inputs {
  float4 p[L::kParts], k[L::kParts], e[L::kParts], q[L::kParts], decay[L::kParts];
  float v[L::kRows], beta;

  // From device memory; value: the thread's first row.
  __device__ void load(const EraseStep& op, const Place& place, int t, int u, int value) {
    const int lane = threadIdx.x % L::kLanes;
    const auto part = [&](const Acts& acts, int update, int c) {
      const float* from = vector(op, acts, place, t, update, L::kKeys);
      return reinterpret_cast<const float4*>(from)[c * L::kLanes + lane];
    };
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      p[c] = part(read_along(op), u, c);
      k[c] = part(op.k, u, c);
      e[c] = part(erase_along(op), u, c);
      q[c] = part(op.q, 0, c);
      const int i = 4 * (c * L::kLanes + lane);
      const auto of = [&](int j) { return decay_of(op, place, t, u, i + j); };
      decay[c] = {of(0), of(1), of(2), of(3)};
    }
    const float* const values = vector(op, op.v, place, t, u, op.value_dim) + value;
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) v[r] = value + r < op.value_dim ? values[r] : 0.0f;
    beta = beta_of(op, place, t, u);
  }
};

__device__ inline float plus_dot(float sum, float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

template <class L>
struct State {
  float4 row[L::kRows][L::kParts];

  // Where the thread's part of row r of those from `value` on lies.
  __device__ static float4* part(const EraseStep& op, const Place& place, Slot slot, int value,
                                 int r, int c) {
    float* const head = at(op.state, slot) + int64_t(place.head) * op.value_dim * L::kKeys;
    return reinterpret_cast<float4*>(head + int64_t(value + r) * L::kKeys) + c * L::kLanes +
           threadIdx.x % L::kLanes;
  }
  __device__ void load(const EraseStep& op, const Place& place, Slot slot, int value) {
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < L::kParts; ++c) {
        const bool kept = !place.fresh && value + r < op.value_dim;
        row[r][c] = kept ? *part(op, place, slot, value, r, c) : float4{0, 0, 0, 0};
      }
    }
  }
  __device__ void store(const EraseStep& op, const Place& place, Slot slot, int value) const {
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < L::kParts; ++c) {
        if (value + r < op.value_dim) *part(op, place, slot, value, r, c) = row[r][c];
      }
    }
  }

  // Of the sums over the threads of each row, the r-th in thread r of the row's and every
  // kRows-th after it.
  __device__ static float sum_rows(float (&sums)[L::kRows]) {
    float sum = scatter_sums(sums);
#pragma unroll
    for (int step = L::kRows; step < L::kLanes; step *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    return sum;
  }

  __device__ void update(bool decayed_read, const Inputs<L>& in) {
    float read[L::kRows] = {};
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      const float4 p = decayed_read ? times(in.p[c], in.decay[c]) : in.p[c];
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        read[r] = plus_dot(read[r], row[r][c], p);
        row[r][c] = times(row[r][c], in.decay[c]);
      }
    }
    const float mine = in.beta * sum_rows(read);
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) read[r] = __shfl_sync(0xffffffffu, mine, r, L::kLanes);
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        row[r][c] = plus(plus(row[r][c], in.beta * in.v[r], in.k[c]), -read[r], in.e[c]);
      }
    }
  }

  // The answer of row r, in thread r of the row's.
  __device__ float answer(const Inputs<L>& in) const {
    float sums[L::kRows] = {};
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) sums[r] = plus_dot(sums[r], row[r][c], in.q[c]);
    }
    return sum_rows(sums);
  }
};

// The block's place; false: there is nothing to do.
__device__ inline bool find_place(const EraseStep& op, int tiles, Place& place) {
  const int row = blockIdx.y, begin = op.rows.begin[row];
  place = {.head = int(blockIdx.x) / tiles, .begin = begin,
           .tokens = op.rows.begin[row + 1] - begin, .fresh = op.rows.first[row] == 0};
  return op.rows.slot[row] != kPadding && place.tokens > 0;
}

// One warp a block.
template <class L>
__global__ __launch_bounds__(32, 16) void erase_step_kernel(const __grid_constant__ EraseStep op,
                                                            bool fresh_state, int tiles) {
  let_successor_start();
  Place place;
  if (!find_place(op, tiles, place)) {
    wait_for_predecessor();
    return;
  }
  if (!fresh_state) wait_for_predecessor();
  const Slot slot = op.rows.slot[blockIdx.y];
  const int lane = threadIdx.x % L::kLanes;
  const int value = int(blockIdx.x) % tiles * L::kTile + L::row();
  State<L> state;
  state.load(op, place, slot, value);
  if (fresh_state) wait_for_predecessor();
  Inputs<L> in;
#pragma unroll 1
  for (int t = 0; t < place.tokens; ++t) {
#pragma unroll 1
    for (int u = 0; u < op.updates; ++u) {
      in.load(op, place, t, u, value);
      state.update(op.decayed_read, in);
    }
    const float answer = op.scale * state.answer(in);
    float weight = 0, v = 0;
#pragma unroll
    for (int c = 0; c < L::kParts && op.bonus != nullptr; ++c) {
      const float* const bonus = op.bonus + place.head * L::kKeys;
      weight += dot(times(in.q[c], in.k[c]),
                    reinterpret_cast<const float4*>(bonus)[c * L::kLanes + lane]);
    }
    if (op.bonus != nullptr) weight = sum_over_lanes<L::kLanes>(weight);
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) v = lane == r ? in.v[r] : v;
    if (lane >= L::kRows || value + lane >= op.value_dim) continue;
    const int64_t column = int64_t(place.head) * op.value_dim + value + lane;
    at(op.out, place.begin + t)[column] = answer;
    if (op.bonus != nullptr) at(op.bonus_out, place.begin + t)[column] = weight * v;
  }
  state.store(op, place, slot, value);
}

// Rows of several tokens. The updates of a row, `updates` a token, come in batches to shared
// memory, the next one while this one is computed. Each thread brings and prepares a piece of 16
// bytes of each vector of one update.
template <class L>
struct alignas(16) Batch {
  static constexpr int kPieces = L::kKeys / 4;
  static constexpr int kUpdates = kPieces <= 16 ? 8 : 32 * L::kWarps / kPieces;
  static constexpr int kParts = kPieces > 32 ? kPieces / 32 : 1;  // warps that share an update
  float p[kUpdates][L::kKeys], k[kUpdates][L::kKeys], e[kUpdates][L::kKeys],
      q[kUpdates][L::kKeys];
  float decay[kUpdates][L::kKeys];             // its logarithm as it comes
  float v[kUpdates][L::kTile];
  float beta[kUpdates], head_decay[kUpdates];  // its logit, and the logarithm, as they come
  float weight[kUpdates][kParts];              // parts of q . (k * bonus)
};

template <class L>
struct Batches {
  using B = Batch<L>;
  static_assert(B::kUpdates * B::kPieces <= 32 * L::kWarps);
  static_assert(B::kUpdates * L::kTile / 4 <= 32 * L::kWarps);
  const EraseStep& op;
  const Place& place;
  B (&space)[2];
  int first_value;  // of the block
  float4 bonus;     // this thread's piece

  __device__ Batches(const EraseStep& op, const Place& place, B (&space)[2], int first_value)
      : op(op), place(place), space(space), first_value(first_value), bonus{0, 0, 0, 0} {
    if (op.bonus == nullptr) return;
    bonus = reinterpret_cast<const float4*>(op.bonus + int64_t(place.head) * L::kKeys)[piece()];
  }
  __device__ static int update() { return int(threadIdx.x) / B::kPieces; }
  __device__ static int piece() { return int(threadIdx.x) % B::kPieces; }
  __device__ int count() const { return place.tokens * op.updates; }
  // Which of its token's updates the n-th of the row is; n becomes the token.
  __device__ int split(int& n) const {
    if (op.updates == 1) return 0;
    const int t = n / op.updates, u = n - t * op.updates;
    n = t;
    return u;
  }

  __device__ void fetch(int b) const {
    B& to = space[b % 2];
    const int updates = min(B::kUpdates, count() - b * B::kUpdates);
    if (update() < updates) {
      int t = b * B::kUpdates + update();
      const int u = split(t), at_piece = 4 * piece(), n = update();
      copy_16_bytes(&to.p[n][at_piece],
                    vector(op, read_along(op), place, t, u, L::kKeys) + at_piece);
      copy_16_bytes(&to.k[n][at_piece], vector(op, op.k, place, t, u, L::kKeys) + at_piece);
      copy_16_bytes(&to.e[n][at_piece],
                    vector(op, erase_along(op), place, t, u, L::kKeys) + at_piece);
      copy_16_bytes(&to.q[n][at_piece], vector(op, op.q, place, t, 0, L::kKeys) + at_piece);
      if (op.decay == Decay::PerChannel) {
        copy_16_bytes(&to.decay[n][at_piece],
                      vector(op, op.log_decay, place, t, 0, L::kKeys) + at_piece);
      }
    }
    const int n = int(threadIdx.x) / (L::kTile / 4), j = int(threadIdx.x) % (L::kTile / 4) * 4;
    if (n < updates && first_value + j < op.value_dim) {
      int t = b * B::kUpdates + n;
      const int u = split(t);
      copy_16_bytes(&to.v[n][j], vector(op, op.v, place, t, u, op.value_dim) + first_value + j);
    }
    fetch_numbers(b, updates, to);
    copies_commit();
  }

  __device__ void fetch_numbers(int b, int updates, B& to) const {
    const int n = threadIdx.x;
    if (n >= updates || (op.beta.data == nullptr && op.decay != Decay::PerHead)) return;
    int t = b * B::kUpdates + n;
    const int u = split(t);
    if (op.beta.data != nullptr) {
      copy_one(&to.beta[n], at(op.beta, place.begin + t) + u * op.heads + place.head);
    }
    if (op.decay == Decay::PerHead) {
      copy_one(&to.head_decay[n], at(op.log_decay, place.begin + t) + place.head);
    }
  }

  // What all warps need of the batch, once.
  __device__ void prepare(int b) const {
    B& batch = space[b % 2];
    const int updates = min(B::kUpdates, count() - b * B::kUpdates), n = update();
    const auto part = [&](float (*vectors)[L::kKeys]) -> float4& {
      return reinterpret_cast<float4*>(vectors[n])[piece()];
    };
    if (n < updates) {
      int t = b * B::kUpdates + n;
      float4 g{0, 0, 0, 0};
      if (op.decay != Decay::None && split(t) == 0) {
        if (op.decay == Decay::PerChannel) g = part(batch.decay);
        if (op.decay == Decay::PerHead) g.x = g.y = g.z = g.w = batch.head_decay[n];
      }
      const float4 decay{expf(g.x), expf(g.y), expf(g.z), expf(g.w)};
      part(batch.decay) = decay;
      if (op.decayed_read) part(batch.p) = times(part(batch.p), decay);
    }
    if (op.bonus != nullptr) {
      constexpr int kLanes = B::kPieces < 32 ? B::kPieces : 32;
      float weight = n < updates ? dot(times(part(batch.q), part(batch.k)), bonus) : 0.0f;
      weight = sum_over_lanes<kLanes>(weight);
      if (n < updates && piece() % 32 == 0) batch.weight[n][piece() / 32] = weight;
    }
    if (int(threadIdx.x) < updates) {
      float& beta = batch.beta[threadIdx.x];
      beta = op.beta.data == nullptr ? op.beta_scale : op.beta_scale * sigmoid(beta);
    }
  }

  __device__ static void take(const B& batch, int i, Inputs<L>& in) {
    const auto part = [&](const float* from, int c) {
      return reinterpret_cast<const float4*>(from)[c * L::kLanes + threadIdx.x % L::kLanes];
    };
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      in.p[c] = part(batch.p[i], c);
      in.k[c] = part(batch.k[i], c);
      in.e[c] = part(batch.e[i], c);
      in.q[c] = part(batch.q[i], c);
      in.decay[c] = part(batch.decay[i], c);
    }
    const float* const v = &batch.v[i][L::row()];
    if constexpr (L::kRows == 4) {
      const float4 four = *reinterpret_cast<const float4*>(v);
      in.v[0] = four.x, in.v[1] = four.y, in.v[2] = four.z, in.v[3] = four.w;
    } else {
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) in.v[r] = v[r];
    }
    in.beta = batch.beta[i];
  }
};

// Where a thread writes its answers: one row's, token after token.
template <class L>
struct Answers {
  float *out = nullptr, *bonus_out = nullptr;
  bool writes = false;

  __device__ Answers(const EraseStep& op, const Place& place, int value) {
    const int mine = value + int(threadIdx.x) % L::kLanes;
    writes = int(threadIdx.x) % L::kLanes < L::kRows && mine < op.value_dim;
    const int64_t column = int64_t(place.head) * op.value_dim + mine;
    out = at(op.out, place.begin) + column;
    if (op.bonus != nullptr) bonus_out = at(op.bonus_out, place.begin) + column;
  }
  __device__ void write(const EraseStep& op, const Batch<L>& batch, int i, float answer) {
    if (writes) *out = op.scale * answer;
    out += op.out.stride;
    if (bonus_out == nullptr) return;
    float weight = 0;
#pragma unroll
    for (const float part : batch.weight[i]) weight += part;
    if (writes) *bonus_out = weight * batch.v[i][L::row() + threadIdx.x % L::kLanes];
    bonus_out += op.bonus_out.stride;
  }
};

template <class L>
__global__ __launch_bounds__(32 * L::kWarps, 4) void erase_rows_kernel(
    const __grid_constant__ EraseStep op, bool fresh_state, int tiles) {
  __shared__ Batch<L> space[2];
  let_successor_start();
  Place place;
  if (!find_place(op, tiles, place)) {
    wait_for_predecessor();
    return;
  }
  if (!fresh_state) wait_for_predecessor();
  const Slot slot = op.rows.slot[blockIdx.y];
  const int first_value = int(blockIdx.x) % tiles * L::kTile, value = first_value + L::row();
  State<L> state;
  state.load(op, place, slot, value);
  if (fresh_state) wait_for_predecessor();
  const Batches<L> batches(op, place, space, first_value);
  Answers<L> answers(op, place, value);
  constexpr int kUpdates = Batch<L>::kUpdates;
  batches.fetch(0);
  int u = 0;
#pragma unroll 1
  for (int b = 0; b * kUpdates < batches.count(); ++b) {
    copies_wait();
    __syncthreads();  // the batch has come, and the one before is done with
    batches.fetch(b + 1);
    batches.prepare(b);
    __syncthreads();  // all is there
    const Batch<L>& batch = space[b % 2];
    const int updates = min(kUpdates, batches.count() - b * kUpdates);
    Inputs<L> in;
#pragma unroll 1
    for (int i = 0; i < updates; ++i) {
      Batches<L>::take(batch, i, in);
      state.update(false, in);
      if (++u < op.updates) continue;
      u = 0;
      answers.write(op, batch, i, state.answer(in));
    }
  }
  state.store(op, place, slot, value);
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

template <int kLanes, int kParts>
void start_steps(const EraseStep& op, Context& context) {
  using L = Layout<kLanes, kParts, 8 / kParts, 1>;
  const int tiles = (op.value_dim + L::kTile - 1) / L::kTile;
  launch(context, {.grid = dim3(op.heads * tiles, op.rows.count), .block = dim3(32)},
         erase_step_kernel<L>, op, context.fresh_state, tiles);
}

// The fewer rows and heads, the fewer values a thread: a block for each multiprocessor.
template <int kLanes, int kParts, int kRows = 4>
void start_rows(const EraseStep& op, Context& context) {
  using L = Layout<kLanes, kParts, kRows, 4>;
  const int tiles = (op.value_dim + L::kTile - 1) / L::kTile;
  if constexpr (kRows > 1) {
    const int64_t blocks = int64_t(op.rows.count) * op.heads * tiles;
    if (blocks < context.multiprocessors * 3 / 4) {
      return start_rows<kLanes, kParts, kRows / 2>(op, context);
    }
  }
  launch(context, {.grid = dim3(op.heads * tiles, op.rows.count), .block = dim3(32 * L::kWarps)},
         erase_rows_kernel<L>, op, context.fresh_state, tiles);
}

bool aligned(const EraseStep& op) {
  const bool per_channel = op.decay == Decay::PerChannel;
  bool all = op.value_dim % 4 == 0 && op.state.stride % 4 == 0 &&
             reinterpret_cast<uintptr_t>(op.state.data) % 16 == 0 &&
             reinterpret_cast<uintptr_t>(op.bonus) % 16 == 0;
  for (const Acts& acts : {op.q, op.k, op.p, op.e, op.v, per_channel ? op.log_decay : op.k}) {
    all = all && acts.stride % 4 == 0 && reinterpret_cast<uintptr_t>(acts.data) % 16 == 0;
  }
  return all;
}

}  // namespace

void run(const EraseStep& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.rows.count <= 65535 && op.key_dim <= kMost);
  const bool steps = op.rows.tokens == op.rows.count;
  switch (aligned(op) ? op.key_dim : 0) {
    case 32: return steps ? start_steps<8, 1>(op, context) : start_rows<8, 1>(op, context);
    case 64: return steps ? start_steps<16, 1>(op, context) : start_rows<8, 2>(op, context);
    case 128: return steps ? start_steps<32, 1>(op, context) : start_rows<16, 2>(op, context);
    case 256: return steps ? start_steps<32, 2>(op, context) : start_rows<32, 2>(op, context);
    default: break;
  }
  launch(context, {.grid = dim3(op.heads * op.value_dim, op.rows.count), .block = dim3(32)},
         erase_step_any_kernel, op);
}

}  // namespace weir::cuda
