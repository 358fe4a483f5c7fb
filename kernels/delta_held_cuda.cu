#include "kernels/cached_cuda.cuh"
#include "kernels/delta_channel_cuda.cuh"
#include "kernels/delta_stream_cuda.cuh"
#include "kernels/long_rows_cuda.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda {
namespace {

using namespace channel;

// For rows of one token each, heads of 128 keys and 128 values: a block of 16 warps holds a head's
// whole state, 4 KB a warp, and two blocks share a multiprocessor. Everything that a block reads is
// asked for at once, the raw vectors first; a thread prepares one channel of them while the state
// is on its way; and the copy engine brings what a later block will read to the L2 cache. Where
// there are many blocks the state passes through shared memory, so that nothing that waits for a
// vector waits for the state too; where there are few it comes straight to registers. There the
// first blocks bring ahead while they wait for the predecessor, and their own states make room for
// it: they need no more to be in the L2 cache.
//
// A lane has four neighbouring keys of each of its warp's eight rows. What the state recalls and
// what it answers are summed together, before the state is changed: with P = S diag(exp g),
//
//   u = beta (v - P k),   S' = P + u k',   S' q = P q + u (k' q).
//
// Floor: as delta_mix_kernel. A multiprocessor's share of a copy moves a head in 4.3 us; a head's
// instructions, 1,900 cycles if four are issued in each, take 1 us of it, and L2 alone 3.5 us.
constexpr int kDim = 128;
constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = kDim / kWarps, kResident = 2;
constexpr int kManyHeads = 1024;         // from so many on the state passes through shared memory
constexpr int kPieces = 4;               // of a state, each of four warps' rows
constexpr int kBringer = kThreads - 32;  // the thread that asks for them

// Value heads that share a key head are those of one block, in turn, or of a cluster's blocks: each
// prepares q and k then, and the last one writes their history.
enum class Sharing { Turns, Cluster };

struct Shared {
  uint64_t barrier[kPieces];
  alignas(16) float q[kDim], k[kDim], decay[kDim], erase[kDim], v[kDim], answer[kDim];
  float factor[kDim];         // what the normed answer is multiplied with
  alignas(16) float sums[8];  // of q's four warps, then of k's: what normalises them
  alignas(16) float squares[kWarps];
  float kept[2 * kDim];       // what joins the history of q and k
};

// Of a row of the history.
__device__ inline int channels_of(const DeltaMix& op) {
  return (2 * op.key_heads + op.value_heads) * kDim;
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
  load_past(past_of(op, place, role), place, channels_of(op), raw);
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
    if (op.gate.data != nullptr) raw.gate = load_as<Stay::Usual>(at(op.gate, place.token) + column);
    return;
  }
  const Acts& in = role == kQuery ? op.q : role == kKey ? op.k : op.v;
  raw.now = load_as<Stay::Usual>(at(in, place.token) + column);
  if (role == kQuery) {
    if (op.decay == Decay::None) return;
    raw.gate = load_as<Stay::Usual>(
        at(op.decay_in, place.token) +
        (op.decay == Decay::PerHead ? place.decay_head
                                    : int64_t(place.decay_head) * kDim + threadIdx.x));
    return;
  }
  const Acts& gate = role == kKey ? op.erase : op.write;
  if (gate.data != nullptr) {
    raw.gate = load_as<Stay::Usual>(at(gate, place.token) + column);
  } else if (op.beta.data != nullptr) {
    raw.gate = load_as<Stay::Usual>(at(op.beta, place.token) + place.value_head);
  }
}

// The thread's channel becomes part of the head's vectors, and its input that of the history.
template <Sharing kSharing>
__device__ inline void prepare(const DeltaMix& op, const Place& place, Role role, const Raw& raw,
                               Shared& shared) {
  const int i = threadIdx.x % kDim;
  if (role == kFinisher) {
    const bool gated = op.gate.data != nullptr;
    shared.factor[i] = gated ? raw.shift * activated(op.gate_activation, raw.gate) : raw.shift;
    return;
  }
  const float x = raw.bias + raw.taps.x * raw.past[0] + raw.taps.y * raw.past[1] +
                  raw.taps.z * raw.past[2] + raw.taps.w * raw.now;
  if (role == kValue || (kSharing != Sharing::Cluster && place.keeps)) {
    keep_input(past_of(op, place, role), place, channels_of(op), raw.now);
  } else if (kSharing == Sharing::Cluster) {
    shared.kept[threadIdx.x] = raw.now;
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
// The warp's rows of the state: in registers, or in shared memory, where they lie as in device
// memory. There from sm_90 on one thread of the block asks for them, kPieces times for four warps.
template <bool kLanded>
struct Held {
  float4 row[kLanded ? 1 : kRows];

  // The thread's part of its warp's first row; row r's is 32 r further.
  __device__ static float4* landing() {
    extern __shared__ float4 space[];
    return space + threadIdx.x / 32 * kRows * 32 + threadIdx.x % 32;
  }
  __device__ float4 at(int r) const {
    if constexpr (kLanded) return landing()[r * 32];
    return row[r];
  }
  __device__ void open(Shared& shared) const {
    if constexpr (kLanded) {
      if (threadIdx.x != kBringer) return;
      for (uint64_t& barrier : shared.barrier) barrier_init(shared_address(&barrier), 1);
      barrier_init_done();
    }
  }
  // state: the warp's first row. `early`: of one of the first blocks.
  __device__ void load(const float* state, bool fresh, bool early, Shared& shared) {
    if (fresh) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) (kLanded ? landing()[r * 32] : row[r]) = {};
    } else if constexpr (!kLanded) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float* const from = state + r * kDim + threadIdx.x % 32 * 4;
        row[r] = early ? load_four_as<Stay::Passing>(from) : load_four_as<Stay::Usual>(from);
      }
    } else {
#if __CUDA_ARCH__ >= 900
      if (threadIdx.x == kBringer) bring(state - threadIdx.x / 32 * kRows * kDim, shared);
#else
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        copy_16_bytes(landing() + r * 32, state + r * kDim + threadIdx.x % 32 * 4);
      }
      copies_commit();
#endif
    }
  }
  __device__ static void bring(const float* head, Shared& shared) {
    extern __shared__ float4 space[];
    constexpr int kPiece = kDim * kDim / kPieces;
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t barrier = shared_address(shared.barrier + i);
      barrier_expect(barrier, kPiece * sizeof(float));
      bulk_load(space + i * kPiece / 4, head + i * kPiece, kPiece * sizeof(float), barrier);
    }
  }
  // Before step(), for the block's head number `turn`.
  __device__ void arrive(bool fresh, int turn, Shared& shared) const {
    if (!kLanded || fresh) return;
#if __CUDA_ARCH__ >= 900
    barrier_wait(shared_address(shared.barrier + threadIdx.x / (kThreads / kPieces)), turn % 2);
#else
    copies_wait();
#endif
  }

  // Steps and stores them; leaves their answers and the sum of those's squares.
  __device__ void step(const DeltaMix& op, Shared& shared, float* state) {
    constexpr int kHalf = kRows / 2;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRows;
    float mine[2], both;
    {
      const float4 q = four(shared.q), erase = four(shared.erase), decay = four(shared.decay);
      both = sum_over_lanes(dot(q, four(shared.k)));
      const float4 recalls = times(decay, erase), answers = times(decay, q);
      // Of each half of the rows, lane r has what row r recalls, lane 4 + r what it answers.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum[kRows];
#pragma unroll
        for (int r = 0; r < kHalf; ++r) {
          const float4 part = at(h * kHalf + r);
          sum[r] = dot(part, recalls);
          sum[kHalf + r] = dot(part, answers);
        }
        mine[h] = scatter_sums<kRows>(sum);
        mine[h] += __shfl_xor_sync(0xffffffffu, mine[h], 8);
        mine[h] += __shfl_xor_sync(0xffffffffu, mine[h], 16);
      }
    }
    asm volatile("" ::: "memory");  // vectors are read again: kept, they would be spilled
    const float4* const sums = reinterpret_cast<const float4*>(shared.sums);
    const float q_scale = scale_of(op.qk_norm, sum_of(sums[0])) * rsqrtf(float(kDim));
    const float k_scale = scale_of(op.qk_norm, sum_of(sums[1]));
    const float4 decay = four(shared.decay), k = four(shared.k);
    float squares = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float v = shared.v[first + h * kHalf + lane % kHalf];
      const float u = (v - mine[h] * k_scale) * k_scale;
#pragma unroll
      for (int r = 0; r < kHalf; ++r) {
        const int i = h * kHalf + r;
        const float wrote = __shfl_sync(0xffffffffu, u, r);
        store_four_as<Stay::Usual>(state + i * kDim + 4 * lane,
                                   plus(times(at(i), decay), wrote, k));
      }
      const float wrote = __shfl_sync(0xffffffffu, u, lane % kHalf);
      const float answer = (mine[h] + wrote * both) * q_scale;
      squares += answer * answer;
      if (lane / kHalf == 1) shared.answer[first + h * kHalf + lane % kHalf] = answer;
    }
    squares = sum_over_lanes<kHalf>(squares);
    if (lane == kHalf) shared.squares[threadIdx.x / 32] = squares;
  }
};

// out = rms(o) * norm_weight [* gate_act(gate)], by the finishers.
__device__ inline void finish(const DeltaMix& op, const Place& place, const Shared& shared,
                              const SplitVectors& split) {
  const auto* squares = reinterpret_cast<const float4*>(shared.squares);
  const float sum = (sum_of(squares[0]) + sum_of(squares[1])) +
                    (sum_of(squares[2]) + sum_of(squares[3]));
  const float scale = rsqrtf(sum / float(kDim) + op.norm_eps);
  const int i = threadIdx.x % kDim;
  const float out = shared.answer[i] * scale * shared.factor[i];
  const int64_t column = column_of(place, kFinisher);
  at(op.out, place.token)[column] = out;
  store_split(split, int64_t(place.token) * op.value_heads * kDim + column, out);
}

// Once all blocks that read the history of q and k have done so.
__device__ inline void remember(const DeltaMix& op, const Place& place, Role role,
                                const Shared& shared) {
  if (!place.keeps || role >= kValue) return;
  keep_input(past_of(op, place, role), place, channels_of(op), shared.kept[threadIdx.x]);
}

// Whether a row's blocks have a token to step.
__device__ inline bool steps(const DeltaMix& op, int row) {
  return op.rows.slot[row] != kPadding && op.rows.begin[row + 1] - op.rows.begin[row] == 1;
}

// A warp asks for the states that block number `block` will read, and for its share of its row's
// history, to be brought to the L2 cache: the states, which are written as usual, to be kept.
__device__ inline void bring_ahead(const DeltaMix& op, int block) {
  const int lane = threadIdx.x % 32, row = block / gridDim.x;
  if (lane > 1 || row >= int(gridDim.y) || !steps(op, row) || op.rows.first[row] == 0) return;
  const int floats =
      lane == 0 ? op.value_heads * kDim * kDim : (kWidth - 1) * channels_of(op);
  const int each = floats / int(gridDim.x);
  const float* const from =
      at(lane == 0 ? op.state : op.history, op.rows.slot[row]) + int64_t(block % gridDim.x) * each;
  const uint32_t bytes = uint32_t(each) * sizeof(float);
  lane == 0 ? bulk_prefetch_kept(from, bytes) : bulk_prefetch(from, bytes);
}

// A warp asks for the raw vectors of block number `block`'s first head, 32 floats a lane: where so
// many states pass through the L2 cache, they are there no longer. Kept until they are read.
__device__ inline void bring_vectors_ahead(const DeltaMix& op, int heads, int block) {
  constexpr int kLines = kDim / 32;  // of a vector
  const int lane = threadIdx.x % 32, row = block / gridDim.x;
  if (row >= int(gridDim.y) || !steps(op, row)) return;
  const int value_head = int(block % gridDim.x) * heads;
  const int key_head = value_head / (op.value_heads / op.key_heads);
  const float* from = nullptr;
  int64_t stride = 0;
  int head = value_head;
  switch (lane / kLines) {
    case 0: from = op.q.data, stride = op.q.stride, head = key_head; break;
    case 1: from = op.k.data, stride = op.k.stride, head = key_head; break;
    case 2: from = op.v.data, stride = op.v.stride; break;
    case 3: from = op.gate.data, stride = op.gate.stride; break;
    case 4: from = op.write.data, stride = op.write.stride; break;
    case 5: from = op.erase.data, stride = op.erase.stride, head = key_head; break;
    case 6:
      if (op.decay != Decay::PerChannel) return;
      from = op.decay_in.data, stride = op.decay_in.stride;
      head = value_head * op.decay_heads / op.value_heads;
  }
  if (from == nullptr) return;
  prefetch_line_kept(from + op.rows.begin[row] * stride + (head * kLines + lane % kLines) * 32);
}

// The first `early` blocks have their states brought before the predecessor is done. `ahead`: how
// many blocks later the one is whose states a block brings to L2.
template <bool kLanded, Sharing kSharing>
__global__ __launch_bounds__(kThreads, kResident) void held_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ SplitVectors split,
    bool fresh_state, int early, int ahead) {
  __shared__ Shared shared;
  let_successor_start();
  const int row = blockIdx.y, group = op.value_heads / op.key_heads;
  const int heads = kSharing == Sharing::Turns ? group : 1;  // of the block
  const int warp = threadIdx.x / 32;
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  const auto role = Role(threadIdx.x / kDim);
  const Slot slot = op.rows.slot[row];
  const int token = op.rows.begin[row];
  Place place{.key_head = int(blockIdx.x) * heads / group, .value_head = int(blockIdx.x) * heads,
              .decay_head = 0, .token = token, .fresh = op.rows.first[row] == 0,
              .keeps = false, .oldest = ring_row(op.rows.first[row], kWidth - 1),
              .history = nullptr};
  if (!steps(op, row)) {
    wait_for_predecessor();
    return;
  }
  place.history = at(op.history, slot);
  if (!fresh_state) wait_for_predecessor();
  Held<kLanded> held;
  held.open(shared);
  for (int i = 0; i < heads; ++i, ++place.value_head) {
    place.decay_head = place.value_head * op.decay_heads / op.value_heads;
    place.keeps = kSharing == Sharing::Turns ? i + 1 == heads : (place.value_head + 1) % group == 0;
    float* const state = at(op.state, slot) +
                         (int64_t(place.value_head) * kDim + warp * kRows) * kDim;
    Raw raw;
    load_kept(op, place, role, raw);
    const bool first = i == 0 && block < early;
    const bool brings = i == 0 && warp == kWarps - 1 && block + ahead >= early;
    if (first) held.load(state, place.fresh, true, shared);
    if (!kLanded && first && brings) bring_ahead(op, block + ahead);
    if (i == 0) wait_for_predecessor();
    load_new(op, place, role, raw);
    if (!first) held.load(state, place.fresh, false, shared);
    if ((kLanded || !first) && brings) bring_ahead(op, block + ahead);
    if (kLanded && i == 0 && warp == kWarps - 2) bring_vectors_ahead(op, heads, block + ahead);
    prepare<kSharing>(op, place, role, raw, shared);
    __syncthreads();  // the head's vectors are there
    if (kSharing == Sharing::Cluster) cluster_started();  // this block has read the history
    held.arrive(place.fresh, i, shared);
    held.step(op, shared, state);
    __syncthreads();  // the head's answer is there, and its vectors may be overwritten
    if (role == kFinisher) finish(op, place, shared, split);
  }
  if (kSharing == Sharing::Cluster) {
    wait_for_cluster();
    remember(op, place, role, shared);
  }
}

template <bool kLanded, Sharing kSharing>
void start(const DeltaMix& op, Context& context) {
  const size_t landing = kLanded ? kDim * kDim * sizeof(float) : 0;
  const SplitVectors split =
      leave_split(op.out, op.value_heads * kDim, op.rows.tokens, context);
  const auto kernel = held_kernel<kLanded, kSharing>;
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(landing)));
  const int group = op.value_heads / op.key_heads;
  launch(context,
         {.grid = dim3(kSharing == Sharing::Turns ? op.key_heads : op.value_heads,
                       single_rows(op.rows)),
          .block = dim3(kThreads), .shared = landing,
          .cluster = kSharing == Sharing::Cluster ? group : 1},
         kernel, op, split, context.fresh_state,
         context.fresh_state ? kResident * context.multiprocessors : 0,
         kLanded ? context.multiprocessors * 7 / 8 : context.multiprocessors);
}

template <bool kLanded>
void start(const DeltaMix& op, Context& context) {
  const int group = op.value_heads / op.key_heads;
  if (context.compute >= 90 && (group == 2 || group == 4 || group == 8)) {
    return start<kLanded, Sharing::Cluster>(op, context);
  }
  start<kLanded, Sharing::Turns>(op, context);
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
