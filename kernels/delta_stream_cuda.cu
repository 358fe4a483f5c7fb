#include <algorithm>

#include "kernels/delta_raw_cuda.cuh"
#include "kernels/delta_stream_cuda.cuh"

namespace weir::cuda {
namespace {

using namespace delta;

// For rows of one token each: one block stays on each multiprocessor and goes from head to head.
// Whatever a head needs comes far ahead, so that no warp waits for memory:
//
//   one warp    has the copy engine bring pieces of the states, into a ring,
//   four warps  bring the heads' raw vectors and make heads of them, each a whole one, in turn,
//   eight warps step the states, each a piece of its own,
//   one warp    norms and gates the answers.
//
// They meet at barriers in shared memory alone; no two warps of a kind ever wait for each other.
//
// Floor: as delta_mix_kernel. A multiprocessor's share of a copy brings and takes a 128x128 head in
// 4 us. The copy engine is for large pieces only: it starts one in 150 ns, whatever its size.
constexpr int kWorkers = 8;        // warps that step states
constexpr int kPreparersMost = 4;  // warps that make heads of raw vectors
constexpr int kFinisher = kWorkers + kPreparersMost, kBringer = kFinisher + 1,
              kWarps = kFinisher + 2;
constexpr int kPieceBytes = 8192;  // of a state, at most
constexpr int kPieceRows = 32;     // at most, and a divisor of value_dim
constexpr int kPiecesMost = 32;    // in the ring
constexpr int kHeadsAhead = 6;     // heads whose vectors are in shared memory
constexpr int kWidthMost = 4;      // of the convolution
constexpr int kPiecesWanted = 12;  // in the ring, before more warps make heads
constexpr int kPart = 16;          // values whose squares are summed by neighbouring lanes
constexpr int kPartsMost = 64;
constexpr int kSharedMost = 224 * 1024;

__host__ __device__ constexpr int piece_rows(int key_dim) {
  return kPieceBytes / (4 * key_dim) < kPieceRows ? kPieceBytes / (4 * key_dim) : kPieceRows;
}

// A head's work, for the warps that step states. No state: there is no more.
struct Task {
  float* state;
  bool fresh;
};

// What the block's warps share beside the vectors.
struct Signals {
  uint64_t full[kPiecesMost], empty[kPiecesMost];      // of the pieces
  uint64_t ready[kHeadsAhead], answered[kHeadsAhead];  // a head's vectors, its answer
  uint64_t done[kHeadsAhead];                          // the head's place may be used again
  Task task[kHeadsAhead];
};

// The dynamic shared memory.
struct Space {
  float *ring, *raw, *heads;
  int pieces, preparers;
  Signals* signals;
};

// A place in a ring, and the parity of its current round.
struct Turn {
  int at = 0;
  uint32_t parity = 0;
  __device__ void next(int size, int steps = 1) {
    at += steps;
    if (at < size) return;
    at -= size;
    parity ^= 1;
  }
};

// Visits the block's units in order; called by whole warps.
template <typename Visit>
__device__ inline void visit_units(const DeltaMix& op, Visit visit) {
  const int lane = threadIdx.x % 32, all = op.rows.count * op.key_heads;
  for (int first = blockIdx.x; first < all; first += 32 * gridDim.x) {
    const int mine = first + lane * int(gridDim.x), row = mine / op.key_heads;
    Slot slot = kPadding;
    int token = 0, fresh = 0;
    if (mine < all) {
      slot = op.rows.slot[row];
      token = op.rows.begin[row];
      fresh = op.rows.first[row] == 0;
      if (op.rows.begin[row + 1] - token != 1) slot = kPadding;
    }
    for (int i = 0; i < 32 && first + i * int(gridDim.x) < all; ++i) {
      const Slot from = __shfl_sync(0xffffffffu, slot, i);
      const int at = __shfl_sync(0xffffffffu, token, i);
      const bool zero = __shfl_sync(0xffffffffu, fresh, i) != 0;
      if (from == kPadding) continue;
      visit(Unit{from, at, (first + i * int(gridDim.x)) % op.key_heads, zero});
    }
  }
}

__device__ inline float* state_of(const DeltaMix& op, const Unit& unit, int value_head) {
  return at(op.state, unit.slot) + int64_t(value_head) * op.value_dim * op.key_dim;
}

// The warp that has states brought.
__device__ inline void bring_states(const DeltaMix& op, const Space& space) {
  const int rows = piece_rows(op.key_dim), floats = rows * op.key_dim;
  const int group = op.value_heads / op.key_heads;
  const auto bytes = uint32_t(floats * sizeof(float));
  Signals& signals = *space.signals;
  Turn turn;
  visit_units(op, [&](const Unit& unit) {
    if (threadIdx.x % 32 != 0) return;
    const float* from = state_of(op, unit, unit.key_head * group);
    // The unit's states lie end to end.
    for (int v = 0; v < group * op.value_dim; v += rows, turn.next(space.pieces)) {
      const uint32_t full = shared_address(&signals.full[turn.at]);
      barrier_wait(shared_address(&signals.empty[turn.at]), turn.parity ^ 1);
      if (unit.fresh) {
        barrier_arrive(full);
        continue;
      }
      barrier_expect(full, bytes);
      bulk_load(space.ring + turn.at * floats, from + int64_t(v) * op.key_dim, bytes, full);
    }
  });
}

// A warp that makes the heads of every unit whose turn is its own. With `waits` set, what this op's
// predecessors wrote is read only after they are done.
template <int kParts, int kWidth>
__device__ inline void prepare(const DeltaMix& op, const Space& space, int number, bool waits) {
  const RawLayout layout = raw_layout(op);
  const int lane = threadIdx.x % 32, group = op.value_heads / op.key_heads;
  Signals& signals = *space.signals;
  float* const raw = space.raw + number * layout.size;
  Turn to;
  int units = 0;
  visit_units(op, [&](const Unit& unit) {
    const bool own = units++ % space.preparers == number;
    for (int i = 0; i < group; ++i, to.next(kHeadsAhead)) {
      if (!own) continue;
      const Head head(op, unit, unit.key_head * group + i);
      bring_kept<kWidth>(op, layout, head, unit.fresh, raw);
      if (waits) wait_for_predecessor();
      waits = false;
      bring_new<kWidth>(op, layout, head, unit.token, raw);
      const Numbers numbers(op, head, unit.token);
      copies_commit();
      copies_wait();
      barrier_wait(shared_address(&signals.done[to.at]), to.parity ^ 1);
      __syncwarp();
      make_head<kParts, kWidth>(op, layout, raw, numbers,
                                space.heads + to.at * head_floats(op));
      if (lane == 0) signals.task[to.at] = {state_of(op, unit, head.value_head), unit.fresh};
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&signals.ready[to.at]));
      if (op.conv_width > 1) remember<kWidth>(op, head, i + 1 == group, raw);
      __syncwarp();
    }
  });
  if (units % space.preparers != number) return;
  barrier_wait(shared_address(&signals.done[to.at]), to.parity ^ 1);
  if (lane != 0) return;
  signals.task[to.at] = {};
  barrier_arrive(shared_address(&signals.ready[to.at]));
}

// The warp that finishes answers, out = rms(o) * norm_weight [* gate_act(gate)], and leaves them
// split too. The squares are summed as delta_mix_kernel sums them.
__device__ inline void finish(const DeltaMix& op, const Space& space, const SplitVectors& split) {
  constexpr int kAtOnce = 4;  // a lane's values whose gates are loaded before the answer is there
  const int lane = threadIdx.x % 32, V = op.value_dim, group = op.value_heads / op.key_heads;
  Signals& signals = *space.signals;
  Turn turn;
  visit_units(op, [&](const Unit& unit) {
    for (int h = 0; h < group; ++h, turn.next(kHeadsAhead)) {
      const int64_t value0 = int64_t(unit.key_head * group + h) * V;
      const float* const gates =
          op.gate.data == nullptr ? nullptr : at(op.gate, unit.token) + value0;
      float weight[kAtOnce], gate[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = min(lane + 32 * u, V - 1);
        weight[u] = op.norm_weight[i];
        gate[u] = gates == nullptr ? 0.0f : gates[i];
      }
      const float* const o = space.heads + turn.at * head_floats(op) + 4 * op.key_dim + V;
      barrier_wait(shared_address(&signals.answered[turn.at]), turn.parity);
      float sum = 0;
      for (int i = lane; i < V; i += 32) {
        const float part = sum_over_lanes<kPart>(o[i] * o[i]);
        sum += __shfl_sync(0xffffffffu, part, 0);
        sum += __shfl_sync(0xffffffffu, part, kPart);
      }
      const float scale = 1.0f / sqrtf(sum / float(V) + op.norm_eps);
      float* const out = at(op.out, unit.token) + value0;
      const int64_t place = int64_t(unit.token) * op.value_heads * V + value0;
      const auto write = [&](int i, float w, float g) {
        float value = o[i] * scale * w;
        if (gates != nullptr) value *= activated(op.gate_activation, g);
        out[i] = value;
        store_split(split, place + i, value);
      };
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (lane + 32 * u < V) write(lane + 32 * u, weight[u], gate[u]);
      }
      for (int i = lane + 32 * kAtOnce; i < V; i += 32) {
        write(i, op.norm_weight[i], gates == nullptr ? 0.0f : gates[i]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&signals.done[turn.at]));
    }
  });
}

__device__ inline float4 four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// A thread's part of a row of the state or of a key: the elements 4 l + 32 j .. + 3, for thread l
// of eight.
template <int kParts>
struct Part {
  float4 value[kParts];
  __device__ void load(const float* from) {
#pragma unroll
    for (int j = 0; j < kParts; ++j) value[j] = four(from + 32 * j);
  }
};

// A head's vectors, as a thread needs them: those of long keys stay in shared memory.
template <int kParts>
struct HeadPart {
  static constexpr bool kHeld = kParts <= 4;
  Part<kParts> decay, erase;
  Part<kHeld ? kParts : 1> q_held, k_held;
  const float *q_from, *k_from;
  float q_scale, k_scale;

  __device__ void load(const float* x, int lane, int value_dim) {
    constexpr int K = 32 * kParts;
    q_from = x + lane;
    k_from = x + K + lane;
    decay.load(x + 2 * K + lane);
    erase.load(x + 3 * K + lane);
    if constexpr (kHeld) {
      q_held.load(q_from);
      k_held.load(k_from);
    }
    q_scale = x[4 * K + 2 * value_dim];
    k_scale = x[4 * K + 2 * value_dim + 1];
  }
  __device__ float4 q(int j) const {
    if constexpr (kHeld) return q_held.value[j];
    return four(q_from + 32 * j);
  }
  __device__ float4 k(int j) const {
    if constexpr (kHeld) return k_held.value[j];
    return four(k_from + 32 * j);
  }
};

// Steps kRows rows of the state, four apart, from `s` to `to`; `value` and `o` are their own.
template <int kParts, int kRows>
__device__ inline void step_rows(const HeadPart<kParts>& x, const float* s, float* to,
                                 const float* value, float* o, bool fresh) {
  constexpr int K = 32 * kParts;
  Part<kParts> held[kRows];
  float recalled[kRows] = {}, answer[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) held[r].load(s + 4 * r * K);
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float4& h = held[r].value[j];
      h = fresh ? float4{} : times(h, x.decay.value[j]);
      recalled[r] += dot(h, x.erase.value[j]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float all = x.k_scale * sum_over_lanes<8>(recalled[r]);
    recalled[r] = (value[4 * r] - all) * x.k_scale;
  }
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const float4 k = x.k(j), q = x.q(j);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float4& h = held[r].value[j];
      h = plus(h, recalled[r], k);
      answer[r] += dot(h, q);
      *reinterpret_cast<float4*>(to + 4 * r * K + 32 * j) = h;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    answer[r] = sum_over_lanes<8>(answer[r]) * x.q_scale;
    if (threadIdx.x % 8 == 0) o[4 * r] = answer[r];
  }
}

// A warp that steps every kWorkers-th piece.
template <int kParts>
__device__ inline void work(const DeltaMix& op, const Space& space, int number) {
  constexpr int K = kParts * 32, kRowsOfPiece = piece_rows(K), kAtOnce = kParts > 4 ? 1 : 2;
  constexpr int kFloats = kRowsOfPiece * K;
  const int lane = threadIdx.x % 8 * 4, row = threadIdx.x % 32 / 8, V = op.value_dim;
  const bool first = threadIdx.x % 32 == 0;
  Signals& signals = *space.signals;
  Turn turn, head;
  turn.at = number;
  int v = number * kRowsOfPiece;  // the next piece's first row, from the current head on
  for (;; head.next(kHeadsAhead), v -= V) {
    barrier_wait(shared_address(&signals.ready[head.at]), head.parity);
    const Task task = signals.task[head.at];
    if (task.state == nullptr) break;
    float* const vectors = space.heads + head.at * head_floats(op);
    HeadPart<kParts> x;
    x.load(vectors, lane, V);
    for (; v < V; v += kWorkers * kRowsOfPiece, turn.next(space.pieces, kWorkers)) {
      float* const piece = space.ring + turn.at * kFloats;
      float* const value = vectors + 4 * K + v + row;  // and V further the answer
      barrier_wait(shared_address(&signals.full[turn.at]), turn.parity);
      float* const state = task.state + int64_t(v) * K;
#pragma unroll 1
      for (int r = 0; r < kRowsOfPiece; r += 4 * kAtOnce) {
        const int at = (row + r) * K + lane;
        step_rows<kParts, kAtOnce>(x, piece + at, state + at, value + r, value + V + r, task.fresh);
      }
      __syncwarp();  // the piece has been read
      if (first) barrier_arrive(shared_address(&signals.empty[turn.at]));
    }
    __syncwarp();
    if (first) barrier_arrive(shared_address(&signals.answered[head.at]));
  }
}

template <int kParts, int kWidth>
__global__ __launch_bounds__(32 * kWarps, 1) void stream_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ SplitVectors split,
    bool fresh_state, int pieces, int preparers) {
  extern __shared__ float4 shared[];
  __shared__ Signals signals;
  float* const ring = reinterpret_cast<float*>(shared);
  float* const raw = ring + pieces * piece_rows(32 * kParts) * 32 * kParts;
  const Space space{ring,   raw,       raw + preparers * raw_layout(op).size,
                    pieces, preparers, &signals};
  if (threadIdx.x == 0) {
    for (int i = 0; i < pieces; ++i) {
      barrier_init(shared_address(&signals.full[i]), 1);
      barrier_init(shared_address(&signals.empty[i]), 1);
    }
    for (int i = 0; i < kHeadsAhead; ++i) {
      barrier_init(shared_address(&signals.ready[i]), 1);
      barrier_init(shared_address(&signals.answered[i]), kWorkers);
      barrier_init(shared_address(&signals.done[i]), 1);
    }
    barrier_init_done();
  }
  let_successor_start();
  if (!fresh_state) wait_for_predecessor();
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < kWorkers) {
    wait_for_predecessor();
    work<kParts>(op, space, warp);
  } else if (warp < kWorkers + preparers) {
    prepare<kParts, kWidth>(op, space, warp - kWorkers, fresh_state);
  } else if (warp == kFinisher) {
    wait_for_predecessor();
    finish(op, space, split);
  } else if (warp == kBringer) {
    bring_states(op, space);
  }
}

// How the dynamic shared memory is divided.
struct Division {
  int pieces, preparers;
  size_t bytes;
};

Division divide(const DeltaMix& op) {
  constexpr int kFloat = int(sizeof(float));
  const int piece = piece_rows(op.key_dim) * op.key_dim * kFloat;
  const int raw = raw_layout(op).size * kFloat;
  const int left = kSharedMost - kHeadsAhead * head_floats(op) * kFloat;
  // From one of a warp's heads to its next there are at most kHeadsAhead: a parity tells no more.
  const int group = op.value_heads / op.key_heads;
  int preparers = std::min(kPreparersMost, 1 + (kHeadsAhead - 1) / group);
  while (preparers > 1 && (left - preparers * raw) / piece < kPiecesWanted) --preparers;
  const int pieces = std::min(kPiecesMost, (left - preparers * raw) / piece);
  return {pieces, preparers, size_t(kSharedMost - left + preparers * raw + pieces * piece)};
}

template <int kParts>
void start(const DeltaMix& op, Context& context) {
  const Division shared = divide(op);
  const auto kernel = op.conv_width == 4 ? stream_kernel<kParts, 4> : stream_kernel<kParts, 0>;
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(shared.bytes)));
  const SplitVectors split =
      leave_split(op.out, op.value_heads * op.value_dim, op.rows.tokens, context);
  launch(context,
         {.grid = dim3(std::min(context.multiprocessors, op.rows.count * op.key_heads)),
          .block = dim3(32 * kWarps), .shared = shared.bytes},
         kernel, op, split, context.fresh_state, shared.pieces, shared.preparers);
}

// The copy engine moves 16 bytes at a time.
bool aligned(const float* data, int64_t stride) {
  return data == nullptr || (stride % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0);
}
bool aligned(const Acts& acts) { return aligned(acts.data, acts.stride); }

bool copies(const DeltaMix& op) {
  for (const float* taps : {op.conv_q, op.conv_k, op.conv_v, op.conv_q_bias, op.conv_k_bias,
                            op.conv_v_bias}) {
    if (!aligned(taps, 0)) return false;
  }
  const bool channels = op.decay == Decay::PerChannel;
  return aligned(op.state.data, op.state.stride) && aligned(op.history.data, op.history.stride) &&
         aligned(op.q) && aligned(op.k) && aligned(op.v) && aligned(op.erase) &&
         aligned(op.write) && (!channels || (aligned(op.decay_in) && aligned(op.dt_bias, 0)));
}

}  // namespace

bool streams(const DeltaMix& op, const Context& context) {
  const int K = op.key_dim;
  const bool sizes = (K == 32 || K == 64 || K == 128 || K == 256) &&
                     op.value_dim % kPieceRows == 0 && op.value_dim <= kPart * kPartsMost &&
                     op.conv_width <= kWidthMost;
  return context.compute >= 90 && sizes && copies(op) && divide(op).pieces >= kWorkers;
}

void run_stream(const DeltaMix& op, Context& context) {
  switch (op.key_dim) {
    case 32: return start<1>(op, context);
    case 64: return start<2>(op, context);
    case 128: return start<4>(op, context);
    case 256: return start<8>(op, context);
  }
  WEIR_UNREACHABLE("streams() said so");
}

}  // namespace weir::cuda
