#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/delta_stream_cuda.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda {
namespace {

// For rows of one token each, heads of 128 keys and 128 values: a block of 16 warps holds a head's
// whole state, 4 KB a warp, and two blocks share a multiprocessor. Everything that a block reads is
// asked for at once, the raw vectors first; a thread prepares one channel of them while the state
// is on its way. Where there are many blocks the state passes through shared memory, so that
// nothing that waits for a vector waits for the state too; where there are few it comes straight to
// registers, and each block has the copy engine bring what a later one will read to the L2 cache.
//
// A lane has four neighbouring keys of each of its warp's eight rows. What the state recalls and
// what it answers are summed together, before the state is changed: with P = S diag(exp g),
//
//   u = beta (v - P k),   S' = P + u k',   S' q = P q + u (k' q).
//
// Floor: as delta_mix_kernel. A multiprocessor's share of a copy moves a head in 4.3 us; a head's
// instructions, 1,900 cycles if four are issued in each, take 1 us of it, and L2 alone 3.5 us.
constexpr int kDim = 128, kWidth = 4;
constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = kDim / kWarps, kResident = 2;
constexpr int kManyHeads = 1025;  // from so many on the state passes through shared memory

enum Role { kQuery, kKey, kValue, kFinisher };  // of four neighbouring warps

struct Shared {
  alignas(16) float q[kDim], k[kDim], decay[kDim], erase[kDim], v[kDim], answer[kDim];
  alignas(16) float sums[8];  // of q's four warps, then of k's: what normalises them
  alignas(16) float squares[kWarps];
};

// What a thread reads for its channel; of a finisher, the output's gate and its norm's weight.
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
  float* history;
  int64_t channels;  // of a row of the history
};

// The usual one without a call: the others' code would not fit the instruction cache.
__device__ __noinline__ float apply_any(Activation activation, float x) {
  return apply(activation, x);
}
__device__ inline float activated(Activation activation, float x) {
  return activation == Activation::Silu ? x * quick_sigmoid(x) : apply_any(activation, x);
}

// The thread's channel in all heads' q, k or v.
__device__ inline int64_t column_of(const Place& place, Role role) {
  return int64_t(role < kValue ? place.key_head : place.value_head) * kDim + threadIdx.x % kDim;
}
__device__ inline float* past_of(const DeltaMix& op, const Place& place, Role role) {
  const int64_t keys = int64_t(op.key_heads) * kDim;
  return place.history + role * keys + column_of(place, role);
}

// What no kernel of the same program writes before this one.
__device__ inline void load_kept(const DeltaMix& op, const Place& place, Role role, Raw& raw) {
  const int64_t column = column_of(place, role);
  if (role == kFinisher) {
    raw.shift = op.norm_weight[threadIdx.x % kDim];
    return;
  }
  const float* const past = past_of(op, place, role);
#pragma unroll
  for (int j = 0; j + 1 < kWidth; ++j) {
    raw.past[j] = place.fresh ? 0.0f : past[j * place.channels];
  }
  const float* const taps = role == kQuery ? op.conv_q : role == kKey ? op.conv_k : op.conv_v;
  const float* const bias =
      role == kQuery ? op.conv_q_bias : role == kKey ? op.conv_k_bias : op.conv_v_bias;
  raw.taps = *reinterpret_cast<const float4*>(taps + column * kWidth);
  if (bias != nullptr) raw.bias = bias[column];
  if (role != kQuery || op.decay == Decay::None) return;
  raw.a = op.decay_a[place.decay_head];
  raw.shift = op.decay == Decay::PerHead
                  ? op.dt_bias[place.decay_head]
                  : op.dt_bias[int64_t(place.decay_head) * kDim + threadIdx.x];
}

// The token's own.
__device__ inline void load_new(const DeltaMix& op, const Place& place, Role role, Raw& raw) {
  const int64_t column = column_of(place, role);
  if (role == kFinisher) {
    if (op.gate.data != nullptr) raw.gate = __ldcg(at(op.gate, place.token) + column);
    return;
  }
  const Acts& in = role == kQuery ? op.q : role == kKey ? op.k : op.v;
  raw.now = __ldcg(at(in, place.token) + column);
  if (role == kQuery) {
    if (op.decay == Decay::None) return;
    raw.gate = __ldcg(at(op.decay_in, place.token) +
                      (op.decay == Decay::PerHead
                           ? place.decay_head
                           : int64_t(place.decay_head) * kDim + threadIdx.x));
    return;
  }
  const Acts& gate = role == kKey ? op.erase : op.write;
  if (gate.data != nullptr) {
    raw.gate = __ldcg(at(gate, place.token) + column);
  } else if (op.beta.data != nullptr) {
    raw.gate = __ldcg(at(op.beta, place.token) + place.value_head);
  }
}

// The thread's channel becomes part of the head's vectors, and its inputs the history.
__device__ inline void prepare(const DeltaMix& op, const Place& place, Role role, bool last,
                               const Raw& raw, Shared& shared) {
  if (role == kFinisher) return;
  const int i = threadIdx.x % kDim;
  const float x = raw.bias + raw.taps.x * raw.past[0] + raw.taps.y * raw.past[1] +
                  raw.taps.z * raw.past[2] + raw.taps.w * raw.now;
  if (role == kValue || last) {
    float* const past = past_of(op, place, role);
    past[0] = raw.past[1];
    past[place.channels] = raw.past[2];
    past[2 * place.channels] = raw.now;
  }
  const bool gated = op.beta.data != nullptr || op.erase.data != nullptr;
  const float gate = gated ? quick_sigmoid(raw.gate) : 1.0f;
  if (role == kValue) {
    const float scale = op.write.data == nullptr ? op.beta_scale * gate : gate;
    shared.v[i] = x * quick_sigmoid(x) * scale;
    return;
  }
  const float made = activated(op.qk_activation, x);
  const float sum = sum_over_lanes(op.qk_norm == QkNorm::Sum ? made : made * made);
  if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = sum;
  if (role == kQuery) {
    shared.q[i] = made;
    shared.decay[i] = delta::decay_of(op, raw.a, raw.gate + raw.shift);
  } else {
    shared.k[i] = made;
    shared.erase[i] = made * op.beta_scale * gate;
  }
}

__device__ inline float4 four(const float* from) {
  return reinterpret_cast<const float4*>(from)[threadIdx.x % 32];
}
__device__ inline float sum_of(float4 x) { return (x.x + x.y) + (x.z + x.w); }

// What normalises a q or k, from its sum or that of its squares; the usual one quickly.
__device__ inline float scale_of(QkNorm norm, float sum) {
  if (norm == QkNorm::L2) return rsqrtf(sum + 1e-6f);
  return norm == QkNorm::L2Max ? 1.0f / fmaxf(sqrtf(sum), 1e-6f) : 1.0f / sum;
}

// The warp's rows of the state.
template <bool kLanded>
struct Held {
  float4 row[kRows];

  // Where the thread's own part lands in shared memory: no other thread reads it.
  __device__ static float4* landing() {
    extern __shared__ float4 space[];
    return space + threadIdx.x;
  }
  __device__ void load(const float* state, bool fresh) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = {};
    if (fresh) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kLanded) {
        copy_16_bytes(landing() + r * kThreads, state + r * kDim + threadIdx.x % 32 * 4);
      } else {
        row[r] = four(state + r * kDim);
      }
    }
    if constexpr (kLanded) copies_commit();
  }
  // Before step().
  __device__ void arrive(bool fresh) {
    if (!kLanded || fresh) return;
    copies_wait();
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = landing()[r * kThreads];
  }

  // Steps and stores them; lane 8 + r of the warp returns row r's answer.
  __device__ float step(const DeltaMix& op, const Shared& shared, float* state) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRows;
    const float4* const sums = reinterpret_cast<const float4*>(shared.sums);
    const float q_scale = scale_of(op.qk_norm, sum_of(sums[0])) * rsqrtf(float(kDim));
    const float k_scale = scale_of(op.qk_norm, sum_of(sums[1]));
    const float4 decay = four(shared.decay), k = four(shared.k);
    const float v = shared.v[first + lane % kRows];
    float sum[2 * kRows], both;
    {
      const float4 q = four(shared.q), erase = four(shared.erase);
      both = sum_over_lanes(dot(q, k));
      const float4 recalls{decay.x * erase.x, decay.y * erase.y, decay.z * erase.z,
                           decay.w * erase.w};
      const float4 answers = times(decay, q);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[r] = dot(row[r], recalls);
        sum[kRows + r] = dot(row[r], answers);
      }
    }
    // Lane r has what row r recalls, lane 8 + r what it answers.
    float mine = scatter_sums<2 * kRows>(sum);
    mine += __shfl_xor_sync(0xffffffffu, mine, 16);
    float u = (v - mine * k_scale) * k_scale;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float wrote = __shfl_sync(0xffffffffu, u, r);
      store_four(state + r * kDim + 4 * lane, plus(times(row[r], decay), wrote, k));
    }
    u = __shfl_sync(0xffffffffu, u, lane % kRows);
    return (mine + u * both) * q_scale;
  }
};

// out = rms(o) * norm_weight [* gate_act(gate)], by the finishers.
__device__ inline void finish(const DeltaMix& op, const Place& place, const Raw& raw,
                              const Shared& shared, const SplitVectors& split) {
  const auto* squares = reinterpret_cast<const float4*>(shared.squares);
  const float sum = (sum_of(squares[0]) + sum_of(squares[1])) +
                    (sum_of(squares[2]) + sum_of(squares[3]));
  const float scale = 1.0f / sqrtf(sum / float(kDim) + op.norm_eps);
  float out = shared.answer[threadIdx.x % kDim] * scale * raw.shift;
  if (op.gate.data != nullptr) out *= activated(op.gate_activation, raw.gate);
  const int64_t column = column_of(place, kFinisher);
  at(op.out, place.token)[column] = out;
  store_split(split, int64_t(place.token) * op.value_heads * kDim + column, out);
}

// A warp asks for what block number `block` will read to be brought to the L2 cache.
__device__ inline void bring_ahead(const DeltaMix& op, int64_t channels, int block) {
  constexpr int kPieces = 3 * (kWidth - 1);  // of the history; the state follows
  const int piece = threadIdx.x % 32, row = block / gridDim.x, head = block % gridDim.x;
  if (piece > kPieces || row >= int(gridDim.y)) return;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || op.rows.first[row] == 0) return;
  const int group = op.value_heads / op.key_heads, which = piece % 3;
  if (piece == kPieces) {
    bulk_prefetch(at(op.state, slot) + int64_t(head) * group * kDim * kDim,
                  uint32_t(group) * kDim * kDim * sizeof(float));
    return;
  }
  const int heads = which == kValue ? group : 1;
  bulk_prefetch(at(op.history, slot) + piece / 3 * channels +
                    (int64_t(which) * op.key_heads + int64_t(head) * heads) * kDim,
                uint32_t(heads) * kDim * sizeof(float));
}

// The first `early` blocks have their states brought before the predecessor is done. `ahead`, if
// not 0: how many blocks later the one is whose states a block brings to L2.
template <bool kLanded>
__global__ __launch_bounds__(kThreads, kResident) void held_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ SplitVectors split,
    bool fresh_state, int early, int ahead) {
  __shared__ Shared shared;
  let_successor_start();
  const int row = blockIdx.y, group = op.value_heads / op.key_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  const auto role = Role(threadIdx.x / kDim);
  const Slot slot = op.rows.slot[row];
  const int token = op.rows.begin[row];
  Place place{.key_head = int(blockIdx.x), .value_head = int(blockIdx.x) * group,
              .decay_head = 0, .token = token, .fresh = op.rows.first[row] == 0,
              .history = nullptr,
              .channels = 2 * int64_t(op.key_heads) * kDim + int64_t(op.value_heads) * kDim};
  if (slot == kPadding || op.rows.begin[row + 1] - token != 1) {
    wait_for_predecessor();
    return;
  }
  place.history = at(op.history, slot);
  if (!fresh_state) wait_for_predecessor();
  for (int i = 0; i < group; ++i, ++place.value_head) {
    place.decay_head = place.value_head * op.decay_heads / op.value_heads;
    float* const state = at(op.state, slot) +
                         (int64_t(place.value_head) * kDim + warp * kRows) * kDim;
    Raw raw;
    Held<kLanded> held;
    load_kept(op, place, role, raw);
    const bool first = i == 0 && block < early;
    if (first) held.load(state, place.fresh);
    if (i == 0) wait_for_predecessor();
    load_new(op, place, role, raw);
    if (!first) held.load(state, place.fresh);
    if (i == 0 && ahead > 0 && warp == kWarps - 1) {
      bring_ahead(op, place.channels, block + ahead);
    }
    prepare(op, place, role, i + 1 == group, raw, shared);
    __syncthreads();  // the head's vectors are there
    held.arrive(place.fresh);
    const float answer = held.step(op, shared, state);
    const float squares = sum_over_lanes<kRows>(answer * answer);
    if (lane == kRows) shared.squares[warp] = squares;
    if (lane / kRows == 1) shared.answer[warp * kRows + lane % kRows] = answer;
    __syncthreads();  // the head's answer is there, and its vectors may be overwritten
    if (role == kFinisher) finish(op, place, raw, shared, split);
  }
}

template <bool kLanded>
void start(const DeltaMix& op, Context& context) {
  const size_t landing = kLanded ? kDim * kDim * sizeof(float) : 0;
  const SplitVectors split =
      leave_split(op.out, op.value_heads * kDim, op.rows.tokens, context);
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(held_kernel<kLanded>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, int(landing)));
  launch(context,
         {.grid = dim3(op.key_heads, op.rows.count), .block = dim3(kThreads), .shared = landing},
         held_kernel<kLanded>, op, split, context.fresh_state,
         context.fresh_state ? kResident * context.multiprocessors : 0,
         kLanded ? 0 : context.multiprocessors);
}

bool fours(const float* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace

bool holds(const DeltaMix& op, const Context& context) {
  return context.compute >= 80 && op.key_dim == kDim && op.value_dim == kDim &&
         op.conv_width == kWidth && fours(op.conv_q) && fours(op.conv_k) && fours(op.conv_v) &&
         fours(op.state.data) && op.state.stride % 4 == 0 && fours(op.history.data) &&
         op.history.stride % 4 == 0;
}

void run_held(const DeltaMix& op, Context& context) {
  if (op.rows.count * op.value_heads < kManyHeads) return start<false>(op, context);
  start<true>(op, context);
}

}  // namespace weir::cuda
