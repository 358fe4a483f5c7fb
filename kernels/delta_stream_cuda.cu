#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/delta_stream_cuda.cuh"

namespace weir::cuda {
namespace {

using namespace delta;

// For rows of one token each: one block stays on each multiprocessor and goes from head to head.
// A warp has the copy engine bring the states, far ahead, through a ring in shared memory; two
// groups of three warps prepare the heads' vectors in turn; eight warps work on a stage of the ring
// as soon as it and the vectors are there, and have the copy engine take it back. So the memory is
// busy all the time, whatever the latencies.
//
// Floor: as delta_mix_kernel.
constexpr int kStageRows = 32;  // of a head's state; eight lanes for each
constexpr int kWorkers = 256;   // threads that compute
constexpr int kGroups = 2;      // of kThreads threads that prepare
constexpr int kThreads = 96;
constexpr int kStreamThreads = kWorkers + kGroups * kThreads + 32;
constexpr int kHeadsAhead = 4;  // heads whose vectors are in shared memory
constexpr int kStagesMost = 32;
constexpr int kPart = 16;       // values whose squares are summed by neighbouring lanes
constexpr int kPartsMost = 64;
constexpr int kSharedMost = 224 * 1024;

// A head's vectors: q, k, decay, erase, v and then the scales of q and k.
__host__ __device__ inline int head_floats(const DeltaMix& op) {
  return 4 * op.key_dim + op.value_dim + 4;
}
// A head's last inputs, which a group keeps for the history.
__host__ __device__ inline int kept_floats(const DeltaMix& op) {
  return op.conv_width > 1 ? (op.conv_width - 1) * (2 * op.key_dim + op.value_dim) : 0;
}

// A head's work, for the threads that compute. No state: there is no more.
struct Task {
  float* state;
  int32_t token, value_head;
  bool fresh;
};

// What the block's warps share beside the ring.
struct Signals {
  uint64_t full[kStagesMost], empty[kStagesMost];          // of the ring's stages
  uint64_t ready[kHeadsAhead], done[kHeadsAhead];          // of the heads' vectors
  Task task[kHeadsAhead];
  float squares[kPartsMost];
};

// A place in a ring, and the parity of its current round.
struct Turn {
  int at = 0;
  uint32_t parity = 0;
  __device__ void next(int size) {
    if (++at < size) return;
    at = 0;
    parity ^= 1;
  }
};

// A key head of a row of one token: its value heads are worked on by the same block.
struct Unit {
  Slot slot;
  int begin, key_head, first;  // the row's token and its position
  __device__ bool fresh() const { return first == 0; }
};

// Visits the block's units in order; called by whole warps.
template <typename Visit>
__device__ inline void visit_units(const DeltaMix& op, Visit visit) {
  const int lane = threadIdx.x % 32, all = op.rows.count * op.key_heads;
  for (int first = blockIdx.x; first < all; first += 32 * gridDim.x) {
    const int mine = first + lane * int(gridDim.x), row = mine / op.key_heads;
    Slot slot = kPadding;
    int begin = 0, position = 0;
    if (mine < all) {
      slot = op.rows.slot[row];
      begin = op.rows.begin[row];
      position = op.rows.first[row];
      if (op.rows.begin[row + 1] - begin != 1) slot = kPadding;
    }
    for (int i = 0; i < 32 && first + i * int(gridDim.x) < all; ++i) {
      const Slot from = __shfl_sync(0xffffffffu, slot, i);
      const int token = __shfl_sync(0xffffffffu, begin, i);
      const int its = __shfl_sync(0xffffffffu, position, i);
      if (from == kPadding) continue;
      visit(Unit{from, token, (first + i * int(gridDim.x)) % op.key_heads, its});
    }
  }
}

__device__ inline float* state_of(const DeltaMix& op, const Unit& unit, int value_head) {
  return at(op.state, unit.slot) + int64_t(value_head) * op.value_dim * op.key_dim;
}

// The warp that has states brought.
__device__ inline void bring_states(const DeltaMix& op, float* ring, Signals& signals,
                                    int stages) {
  const int floats = kStageRows * op.key_dim, group = op.value_heads / op.key_heads;
  const auto bytes = uint32_t(floats * sizeof(float));
  Turn turn;
  visit_units(op, [&](const Unit& unit) {
    if (threadIdx.x % 32 != 0) return;
    const float* from = state_of(op, unit, unit.key_head * group);
    const int rows = group * op.value_dim;  // the unit's states lie end to end
    for (int v = 0; v < rows; v += kStageRows, turn.next(stages)) {
      barrier_wait(shared_address(&signals.empty[turn.at]), turn.parity ^ 1);
      if (unit.fresh()) {
        barrier_arrive(shared_address(&signals.full[turn.at]));
        continue;
      }
      barrier_expect(shared_address(&signals.full[turn.at]), bytes);
      bulk_load(ring + turn.at * floats, from + int64_t(v) * op.key_dim, bytes,
                shared_address(&signals.full[turn.at]));
    }
  });
}

// A group of warps that prepares every kGroups-th unit. `heads` is the ring of vectors.
template <int kWidth, int kNumber>
__device__ inline void prepare_heads(const DeltaMix& op, float* heads, float* kept,
                                     Signals& signals, bool waits) {
  const int K = op.key_dim, V = op.value_dim, group = op.value_heads / op.key_heads;
  const int thread = int(threadIdx.x) - kWorkers - kNumber * kThreads;
  Turn turn;
  int units = 0;
  visit_units(op, [&](const Unit& unit) {
    const bool own = units++ % kGroups == kNumber;
    Place place{.key_head = unit.key_head, .value_head = unit.key_head * group, .value0 = 0,
                .values = V, .token = 0, .begin = unit.begin, .fresh = unit.fresh(),
                .oldest = oldest_ring_row(unit.first, op.conv_width),
                .history = op.history.data == nullptr ? nullptr : at(op.history, unit.slot),
                .channels = 2 * op.key_heads * K + op.value_heads * V};
    for (int i = 0; i < group; ++i, ++place.value_head, turn.next(kHeadsAhead)) {
      if (!own) continue;
      float* x = heads + turn.at * head_floats(op);
      const Vectors to{x, x + K, x + 2 * K, x + 3 * K, x + 4 * K, nullptr, kept};
      place.decay_head = place.value_head * op.decay_heads / op.value_heads;
      barrier_wait(shared_address(&signals.done[turn.at]), turn.parity ^ 1);
      Pass<kWidth, kThreads, 2> pass;
      for (int first = thread; first - thread < 2 * K + V; first += 2 * kThreads) {
        pass.load(op, place, first, waits);
        waits = false;
        pass.make(op, place, first, to, true);
      }
      if (thread == 0) {
        signals.task[turn.at] = {state_of(op, unit, place.value_head), unit.begin,
                                 place.value_head, unit.fresh()};
      }
      barrier_among<2 + kNumber>(kThreads);
      if (thread < 64) {
        const float scale = head_scale(op.qk_norm, thread < 32 ? to.q : to.k, K);
        if (thread % 32 == 0) x[4 * K + V + thread / 32] = scale;
      }
      barrier_arrive(shared_address(&signals.ready[turn.at]));
      if (op.conv_width > 1) remember<kThreads>(op, place, to, thread, 1, i + 1 == group, 0, 1);
    }
  });
  if (units % kGroups != kNumber) return;
  barrier_wait(shared_address(&signals.done[turn.at]), turn.parity ^ 1);
  if (thread == 0) signals.task[turn.at] = {};
  barrier_arrive(shared_address(&signals.ready[turn.at]));
}

__device__ inline float output_gate(const DeltaMix& op, const Task& task, int value) {
  if (op.gate.data == nullptr) return 0.0f;
  return at(op.gate, task.token)[int64_t(task.value_head) * op.value_dim + value];
}

// out = rms(o) * norm_weight [* gate_act(gate)]; weight and gate: of the thread's first value.
// The squares are summed as delta_mix_kernel sums them.
__device__ inline void finish(const DeltaMix& op, const Task& task, const float* o, float* squares,
                              float weight, float gate) {
  const int V = op.value_dim;
  barrier_among<1>(kWorkers);  // o is complete
  for (int first = 0; first < V; first += kWorkers) {
    const int i = first + int(threadIdx.x);
    const float value = i < V ? o[i] : 0.0f;
    const float part = sum_over_lanes<kPart>(value * value);
    if (i < V && i % kPart == 0) squares[i / kPart] = part;
  }
  barrier_among<1>(kWorkers);
  float sum = 0;
  for (int i = 0; i < V / kPart; ++i) sum += squares[i];
  const float scale = 1.0f / sqrtf(sum / float(V) + op.norm_eps);
  float* out = at(op.out, task.token) + int64_t(task.value_head) * V;
  for (int i = threadIdx.x; i < V; i += kWorkers) {
    if (i >= kWorkers) {
      weight = op.norm_weight[i];
      gate = output_gate(op, task, i);
    }
    float value = o[i] * scale * weight;
    if (op.gate.data != nullptr) value *= apply(op.gate_activation, gate);
    out[i] = value;
  }
}

__device__ inline float4 four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// A thread's part of one row of the state: the elements 4 l + 32 j .. + 3.
template <int kParts>
struct Part {
  float4 value[kParts];
  __device__ void load(const float* from) {
#pragma unroll
    for (int j = 0; j < kParts; ++j) value[j] = four(from + 32 * j);
  }
};

// The warps that compute.
template <int kParts>
__device__ inline void work(const DeltaMix& op, float* ring, float* heads, float* o,
                            Signals& signals, int stages) {
  constexpr int K = kParts * 32, kStageFloats = kStageRows * K;
  constexpr int kLag = kParts > 4 ? 2 : 4;  // stores still reading when a stage is given back
  const int row = threadIdx.x / 8, lane = threadIdx.x % 8 * 4, V = op.value_dim;
  Turn turn, head;
  int stored = 0;
  for (;; head.next(kHeadsAhead)) {
    barrier_wait(shared_address(&signals.ready[head.at]), head.parity);
    const Task task = signals.task[head.at];
    if (task.state == nullptr) break;
    const float* x = heads + head.at * head_floats(op);
    float weight = 0, gate = 0;
    if (threadIdx.x < V) {
      weight = op.norm_weight[threadIdx.x];
      gate = output_gate(op, task, threadIdx.x);
    }
    const float *q = x + lane, *k = q + K;
    // The thread holds them, or reads them again for each row where they would be spilled.
    constexpr bool kHeld = kParts <= 4;
    Part<kParts> decay, erase, held;
    if constexpr (kHeld) {
      decay.load(k + K);
      erase.load(k + 2 * K);
    }
    const float q_scale = x[4 * K + V] / sqrtf(float(K)), k_scale = x[4 * K + V + 1];
    for (int v = 0; v < V; v += kStageRows, turn.next(stages)) {
      barrier_wait(shared_address(&signals.full[turn.at]), turn.parity);
      float* const stage = ring + turn.at * kStageFloats;
      float* const s = stage + row * K + lane;
      held.load(s);
      float recalled = 0, answer = 0;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float4 kept = kHeld ? decay.value[j] : four(k + K + 32 * j);
        held.value[j] = task.fresh ? float4{} : times(held.value[j], kept);
        recalled += dot(held.value[j], kHeld ? erase.value[j] : four(k + 2 * K + 32 * j));
      }
      const float all = k_scale * sum_over_lanes<8>(recalled);
      recalled = (x[4 * K + v + row] - all) * k_scale;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        held.value[j] = plus(held.value[j], recalled, four(k + 32 * j));
        answer += dot(held.value[j], four(q + 32 * j));
        *reinterpret_cast<float4*>(s + 32 * j) = held.value[j];
      }
      publish_to_copy_engine();
      barrier_among<1>(kWorkers);  // the stage is complete
      if (threadIdx.x == 0) {
        bulk_store(task.state + int64_t(v) * K, stage, kStageFloats * sizeof(float));
        bulk_stores_read<kLag>();
        const int back = turn.at - kLag < 0 ? turn.at - kLag + stages : turn.at - kLag;
        if (stored++ >= kLag) barrier_arrive(shared_address(&signals.empty[back]));
      }
      answer = sum_over_lanes<8>(answer) * q_scale;
      if (lane == 0) o[v + row] = answer;
    }
    finish(op, task, o, signals.squares, weight, gate);
    barrier_among<1>(kWorkers);  // o and the vectors may be overwritten
    if (threadIdx.x == 0) barrier_arrive(shared_address(&signals.done[head.at]));
  }
  if (threadIdx.x == 0) bulk_stores_read<0>();
}

template <int kParts, int kWidth>
__global__ __launch_bounds__(kStreamThreads, 1) void stream_kernel(
    const __grid_constant__ DeltaMix op, bool fresh_state, int stages) {
  extern __shared__ float4 shared[];
  __shared__ Signals signals;
  float* const ring = reinterpret_cast<float*>(shared);
  float* const heads = ring + stages * kStageRows * kParts * 32;
  float* const o = heads + kHeadsAhead * head_floats(op);
  float* const kept = o + op.value_dim;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      barrier_init(shared_address(&signals.full[i]), 1);
      barrier_init(shared_address(&signals.empty[i]), 1);
    }
    for (int i = 0; i < kHeadsAhead; ++i) {
      barrier_init(shared_address(&signals.ready[i]), kThreads);
      barrier_init(shared_address(&signals.done[i]), 1);
    }
    barrier_init_done();
  }
  let_successor_start();
  if (!fresh_state) wait_for_predecessor();
  __syncthreads();
  const int thread = threadIdx.x;
  if (thread < kWorkers) {
    wait_for_predecessor();
    work<kParts>(op, ring, heads, o, signals, stages);
  } else if (thread < kWorkers + kThreads) {
    prepare_heads<kWidth, 0>(op, heads, kept, signals, fresh_state);
  } else if (thread < kWorkers + 2 * kThreads) {
    prepare_heads<kWidth, 1>(op, heads, kept + kept_floats(op), signals, fresh_state);
  } else {
    bring_states(op, ring, signals, stages);
  }
}

template <int kParts>
void start(const DeltaMix& op, Context& context) {
  const int stage_bytes = kStageRows * op.key_dim * int(sizeof(float));
  const int beside = (kHeadsAhead * head_floats(op) + op.value_dim + kGroups * kept_floats(op)) *
                     int(sizeof(float));
  const int stages = std::min(kStagesMost, (kSharedMost - beside) / stage_bytes);
  const size_t shared = size_t(stages) * stage_bytes + beside;
  const auto aligned = [](const float* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool four =
      op.conv_width == 4 && aligned(op.conv_q) && aligned(op.conv_k) && aligned(op.conv_v);
  const auto kernel = four ? stream_kernel<kParts, 4> : stream_kernel<kParts, 0>;
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  launch(context,
         {.grid = dim3(std::min(context.multiprocessors, op.rows.count * op.key_heads)),
          .block = dim3(kStreamThreads), .shared = shared},
         kernel, op, context.fresh_state, stages);
}

}  // namespace

bool streams(const DeltaMix& op, const Context& context) {
  const bool aligned =
      op.state.stride % 4 == 0 && reinterpret_cast<uintptr_t>(op.state.data) % 16 == 0;
  const int K = op.key_dim;
  // A group that prepares as many value heads as the ring has places would come round to a place
  // whose barrier is two phases behind, and take it for done.
  const bool few = op.value_heads < kHeadsAhead * op.key_heads;
  return context.compute >= 90 && aligned && few && (K == 32 || K == 64 || K == 128 || K == 256) &&
         op.value_dim % kStageRows == 0 && op.value_dim <= kPart * kPartsMost;
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
