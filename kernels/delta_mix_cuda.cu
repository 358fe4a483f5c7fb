#include <climits>
#include <optional>

#include "kernels/delta_chunk_cuda.cuh"
#include "kernels/delta_prepare_cuda.cuh"
#include "kernels/delta_stream_cuda.cuh"
#include "kernels/long_rows_cuda.cuh"
#include "kernels/resident_cuda.cuh"

namespace weir::cuda {
namespace {

using namespace delta;

// For rows of several tokens, few heads, and for all that cross-layer routing asks for. A
// cluster of `slices` blocks per (key head, row) runs the mixer over the row's tokens, for each of
// the key head's value heads in turn; each block has its share of the state's rows (of the values),
// so that one sequence keeps many multiprocessors busy. The copy engine brings a share into shared
// memory and takes it back.
//
// Every block of a cluster prepares the whole q and k for itself; only the sum of squares of the
// gated norm is exchanged, in parts of kPart values that are added in order: the answer does not
// depend on the number of slices.
//
// Eight neighbouring threads share a row of the state: thread l of them holds the elements
// 4 l + 32 j .. + 3, so that a row is read in 128-byte lines, without bank conflicts.
//
// Floor, one token a row: the state read once and written once, 8 * key_dim * value_dim bytes per
// value head and row.
constexpr int kThreads = 128;
constexpr int kLanes = 8;
constexpr int kGroups = kThreads / kLanes;  // rows of the state at one time
constexpr int kPart = 16;                   // values whose squares are summed by neighbouring lanes
constexpr int kBlocks = 4;                  // on a multiprocessor, at least
constexpr int kHeldHeads = 16;              // from so many on, run_held() is faster
constexpr int kStreamHeads = 128;           // from so many on, run_stream() is faster,
constexpr int kManySlices = 200;            // and from so many on faster than run_slices()
constexpr int kPartsMost = 64;              // of a head: value_dim <= 1024

// What finish() multiplies a thread's first value with, loaded before the state's step.
struct Late {
  float weight = 0, gate = 0;
};

__device__ inline Late late_factors(const DeltaMix& op, const Place& place, int i) {
  if (i >= place.values || !op.norm_output) return {};
  const float* gate = op.gate.data == nullptr
                          ? nullptr
                          : at(op.gate, place.begin + place.token) +
                                int64_t(place.value_head) * op.value_dim + place.value0;
  return {op.norm_weight[place.value0 + i], gate == nullptr ? 0.0f : gate[i]};
}

// out = rms(o) * norm_weight [* gate_act(gate)]. squares: [value_dim / kPart], this token's own,
// filled by all blocks of the cluster.
__device__ inline void finish(const DeltaMix& op, const SplitVectors& split, const Place& place,
                              const Vectors& s, Late late, float* squares, int slices) {
  const int V = op.value_dim;
  const int64_t token = place.begin + place.token,
                value0 = int64_t(place.value_head) * V + place.value0,
                split0 = token * op.value_heads * V + value0;
  if (!op.norm_output) {
    for (int i = threadIdx.x; i < place.values; i += kThreads) {
      at(op.out, token)[value0 + i] = s.out[i];
      store_split(split, split0 + i, s.out[i]);
    }
    if (slices > 1) cluster_barrier();  // every block has read the history
    return;
  }
  for (int first = 0; first < place.values; first += kThreads) {
    const int i = first + int(threadIdx.x);
    const float o = i < place.values ? s.out[i] : 0.0f;
    const float part = sum_over_lanes<kPart>(o * o);
    const int peer = i % kPart;
    if (i - peer >= place.values) continue;
    float* mine = squares + (place.value0 + i) / kPart;
    if (slices == 1) {
      if (peer == 0) *mine = part;
    } else if (peer < slices) {
      write_peer(mine, peer, part);
    }
  }
  if (slices == 1) {
    __syncthreads();
  } else {
    cluster_barrier();
  }
  float sum = 0;
  for (int i = 0; i < (V + kPart - 1) / kPart; ++i) sum += squares[i];
  const float scale = 1.0f / sqrtf(sum / float(V) + op.norm_eps);
  for (int i = threadIdx.x; i < place.values; i += kThreads) {
    if (i >= kThreads) late = late_factors(op, place, i);
    float out = s.out[i] * scale * late.weight;
    if (op.gate.data != nullptr) out *= apply(op.gate_activation, late.gate);
    at(op.out, token)[value0 + i] = out;
    store_split(split, split0 + i, out);
  }
}

// What cross-layer routing takes and gives, of the slice's value v: the residual that was written,
// and what is added to the answer.
__device__ inline int64_t column_of(const DeltaMix& op, const Place& place, int v) {
  return int64_t(place.value_head) * op.value_dim + place.value0 + v;
}
__device__ inline void emit(const DeltaMix& op, const Place& place, int v, float residual) {
  if (!op.emits) return;
  at(op.emitted, place.begin + place.token)[column_of(op, place, v)] = residual;
}
template <bool kRouted>
__device__ inline float added(const DeltaMix& op, const Place& place, int v) {
  if (!kRouted || op.answer_add.data == nullptr) return 0;
  return at(op.answer_add, place.begin + place.token)[column_of(op, place, v)];
}

// The slice's rows of a head's state in shared memory, each of kParts * 32 elements; a thread works
// on kRows of them at one time.
template <int kParts, int kRows>
struct HeldState {
  static constexpr bool kHeld = true;
  float* s = nullptr;  // shared
  uint32_t barrier = 0, phase = 0, bytes = 0;

  __device__ void open(float* shared, uint64_t* mbarrier, int values) {
    s = shared;
    bytes = uint32_t(values) * kParts * 32 * sizeof(float);
    barrier = shared_address(mbarrier);
    if (threadIdx.x != 0) return;
    barrier_init(barrier, 1);
    barrier_init_done();
  }
  // Before sm_90 by all threads, otherwise by the copy engine.
  __device__ void move(float* to, const float* from) const {
    for (int i = threadIdx.x * 4; i < int(bytes) / 4; i += kThreads * 4) {
      *reinterpret_cast<float4*>(to + i) =
          from == nullptr ? float4{0, 0, 0, 0} : *reinterpret_cast<const float4*>(from + i);
    }
  }
  __device__ void load(const float* state, bool fresh) {
#if __CUDA_ARCH__ >= 900
    if (!fresh) {
      if (threadIdx.x != 0) return;
      barrier_expect(barrier, bytes);
      bulk_load(s, state, bytes, barrier);
      return;
    }
#endif
    move(s, fresh ? nullptr : state);
  }
  // After a __syncthreads(): the state can be read.
  __device__ void wait(bool fresh) {
#if __CUDA_ARCH__ >= 900
    if (fresh) return;
    barrier_wait(barrier, phase);
    phase ^= 1;
#endif
  }
  __device__ void store(float* state) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) bulk_store(state, s, bytes);
#else
    move(state, s);
#endif
  }
  // Shared memory may be used again, or given up.
  __device__ void stored() const {
    if (threadIdx.x == 0) bulk_stores_read<0>();
  }

  template <bool kRouted>
  __device__ void step(const DeltaMix& op, const Place& place, const Vectors& x) {
    constexpr int K = kParts * 32;
    const int values = place.values;
    const int lane = threadIdx.x % kLanes * 4;
    const auto part = [&](const float* vector, int j) {
      return *reinterpret_cast<const float4*>(vector + j * 32 + lane);
    };
    const float k_scale = head_scale(op.qk_norm, x.k, K);
    const float q_scale = head_scale(op.qk_norm, x.q, K) / sqrtf(float(K));
    for (int first = threadIdx.x / kLanes; first < values; first += kRows * kGroups) {
      float4 held[kRows][kParts];
      float recalled[kRows] = {}, answer[kRows] = {};
      const auto at_row = [&](int r, int j) {
        return reinterpret_cast<float4*>(s + (first + r * kGroups) * K + j * 32 + lane);
      };
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float4 decay = part(x.decay, j), erase = part(x.erase, j);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (first + r * kGroups < values) held[r][j] = times(*at_row(r, j), decay);
          recalled[r] += dot(held[r][j], erase);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float all = k_scale * sum_over_lanes<kLanes>(recalled[r]);
        const bool valid = first + r * kGroups < values;
        const float u = valid ? x.v[first + r * kGroups] - all : 0.0f;
        if (kRouted && valid && lane == 0) emit(op, place, first + r * kGroups, u);
        recalled[r] = u * k_scale;
      }
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float4 k = part(x.k, j), q = part(x.q, j);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          held[r][j] = plus(held[r][j], recalled[r], k);
          answer[r] += dot(held[r][j], q);
          if (first + r * kGroups < values) *at_row(r, j) = held[r][j];
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        answer[r] = sum_over_lanes<kLanes>(answer[r]) * q_scale;
        const int v = first + r * kGroups;
        if (v < values && lane == 0) x.out[v] = answer[r] + added<kRouted>(op, place, v);
      }
    }
  }
};

// The state of one head where it lies, for sizes that do not fit shared memory.
struct StreamedState {
  static constexpr bool kHeld = false;
  float* s = nullptr;
  bool zero = false;

  __device__ void open(float*, uint64_t*, int) {}
  __device__ void load(float* state, bool fresh) {
    s = state;
    zero = fresh;
  }
  __device__ void wait(bool) const {}
  __device__ void store(float*) const {}
  __device__ void stored() const {}
  template <bool kRouted>
  __device__ void step(const DeltaMix& op, const Place& place, const Vectors& x) {
    const int K = op.key_dim, lane = threadIdx.x % kLanes, values = place.values;
    const float k_scale = head_scale(op.qk_norm, x.k, K);
    const float q_scale = head_scale(op.qk_norm, x.q, K) / sqrtf(float(K));
    // Every lane goes through the same number of rows: the sums need all lanes of a warp.
    for (int first = 0; first < values; first += kGroups) {
      const int v = first + threadIdx.x / kLanes;
      const bool valid = v < values;
      float* row = s + int64_t(v) * K;
      float recalled = 0, answer = 0;
      if (valid && !zero) {
#pragma unroll 8
        for (int i = lane; i < K; i += kLanes) recalled += row[i] * x.decay[i] * x.erase[i];
      }
      recalled = sum_over_lanes<kLanes>(recalled) * k_scale;
      if (valid) {
        const float residual = x.v[v] - recalled, u = residual * k_scale;
        if (kRouted && lane == 0) emit(op, place, v, residual);
#pragma unroll 8
        for (int i = lane; i < K; i += kLanes) {
          const float next = (zero ? 0.0f : row[i] * x.decay[i]) + u * x.k[i];
          row[i] = next;
          answer += next * x.q[i];
        }
      }
      answer = sum_over_lanes<kLanes>(answer) * q_scale;
      if (valid && lane == 0) x.out[v] = answer + added<kRouted>(op, place, v);
    }
    zero = false;
  }
};

// All of a block's part of a row. `fresh_state`: the predecessor has not been waited for, and need
// not be for the state. `started`: the cluster's blocks are known to run.
template <typename State, int kWidth, bool kRouted>
__device__ inline void run_row(const DeltaMix& op, const SplitVectors& split, const Vectors& x,
                               State& held, int row, int slices, bool fresh_state, bool started,
                               int& turn, float (&squares)[2][kPartsMost]) {
  const int values = op.value_dim / slices, slice = int(blockIdx.x) % slices;
  const int group = op.value_heads / op.key_heads;
  const Slot slot = op.rows.slot[row];
  const int begin = op.rows.begin[row], tokens = op.rows.begin[row + 1] - begin;
  Place place{.key_head = int(blockIdx.x) / slices,
              .value_head = int(blockIdx.x) / slices * group,
              .decay_head = 0,
              .value0 = slice * values,
              .values = values,
              .token = 0,
              .begin = begin,
              .fresh = op.rows.first[row] == 0,
              .oldest = oldest_ring_row(op.rows.first[row], op.conv_width),
              .history = op.history.data == nullptr ? nullptr : at(op.history, slot),
              .channels = 2 * op.key_heads * op.key_dim};
  // Values that are ready have their history elsewhere.
  if (!kRouted || !op.values_ready) place.channels += op.value_heads * op.value_dim;
  for (int i = 0; i < group; ++i, ++place.value_head) {
    float* state = at(op.state, slot) +
                   (int64_t(place.value_head) * op.value_dim + place.value0) * op.key_dim;
    held.load(state, place.fresh);
    place.decay_head = place.value_head * op.decay_heads / op.value_heads;
    for (place.token = 0; place.token < tokens; ++place.token, turn ^= 1) {
      const bool last = place.token + 1 == tokens;
      bool waits = fresh_state && i == 0 && place.token == 0;
      const int all = 2 * op.key_dim + values, thread = threadIdx.x;
      for (int channels = thread; channels - thread < all; channels += 3 * kThreads) {
        Pass<kWidth, kThreads, 3, kRouted> pass;
        pass.load(op, place, channels, waits);
        pass.make(op, place, channels, x, last);
        waits = false;
      }
      const Late late = late_factors(op, place, threadIdx.x);
      __syncthreads();  // the token's vectors are there, and the copy's barrier
      if (place.token == 0) held.wait(place.fresh);
      held.template step<kRouted>(op, place, x);
      publish_to_copy_engine();
      __syncthreads();  // the slice's answer is there, and the vectors may be overwritten
      if (last) held.store(state);
      if (!started && i == 0 && place.token == 0) wait_for_cluster();
      finish(op, split, place, x, late, squares[turn], slices);
    }
    if (op.conv_width > 1) {
      remember<kThreads>(op, place, x, threadIdx.x, tokens, i + 1 == group, slice, slices);
    }
    if (i + 1 < group) {
      held.stored();
      __syncthreads();  // the state has left shared memory
    }
  }
  held.stored();
}

template <typename State, int kWidth, bool kRouted>
__global__ __launch_bounds__(kThreads, kBlocks) void delta_mix_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ SplitVectors split,
    bool fresh_state, int slices, int tokens_most) {
  extern __shared__ float4 shared[];
  __shared__ uint64_t barrier;
  __shared__ float squares[2][kPartsMost];
  float* const space = reinterpret_cast<float*>(shared);
  const int values = op.value_dim / slices, row = blockIdx.y;
  const Vectors x =
      vectors(op, values, State::kHeld ? space + int64_t(values) * op.key_dim : space);
  let_successor_start();
  const int tokens = op.rows.begin[row + 1] - op.rows.begin[row];
  // The same answer in every thread of the cluster.
  if (op.rows.slot[row] == kPadding || tokens == 0 || tokens > tokens_most) {
    wait_for_predecessor();
    return;
  }
  if (slices > 1) cluster_started();
  State held;
  held.open(space, &barrier, values);
  if (!fresh_state) wait_for_predecessor();
  int turn = 0;
  run_row<State, kWidth, kRouted>(op, split, x, held, row, slices, fresh_state, slices == 1, turn,
                                  squares);
}

// Few blocks for the rows of 2 to tokens_most tokens, of which a step of prompts and of rows that
// decode has few or none.
template <typename State>
__global__ __launch_bounds__(kThreads, kBlocks) void delta_few_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ SplitVectors split, int slices,
    int tokens_most) {
  extern __shared__ float4 shared[];
  __shared__ uint64_t barrier;
  __shared__ float squares[2][kPartsMost];
  float* const space = reinterpret_cast<float*>(shared);
  const int values = op.value_dim / slices;
  const Vectors x = vectors(op, values, space + int64_t(values) * op.key_dim);
  let_successor_start();
  int row = row_among(op.rows, blockIdx.y, 2, tokens_most);
  wait_for_predecessor();
  if (row < 0) return;
  if (slices > 1) cluster_barrier();
  State held;
  held.open(space, &barrier, values);
  int turn = 0;
#pragma unroll 1
  for (int k = blockIdx.y; row >= 0; row = row_among(op.rows, k += gridDim.y, 2, tokens_most)) {
    if (op.rows.slot[row] == kPadding) continue;
    __syncthreads();  // the last row's state and vectors have left shared memory
    run_row<State, 4, false>(op, split, x, held, row, slices, false, true, turn, squares);
  }
}

// How many blocks share a head: enough of them for the machine, and shares of kShare bytes.
int slices_of(const DeltaMix& op, const Context& context) {
  constexpr int kSlicesMost = 8, kShare = 16 * 1024;
  if (context.compute < 90) return 1;
  const int64_t bytes = int64_t(op.key_dim) * op.value_dim * int64_t(sizeof(float));
  int slices = 1;
  const auto divides = [&](int n) { return op.value_dim % (n * kPart) == 0; };
  const auto idle = [&] {
    return int64_t(op.rows.count) * op.key_heads * slices < 2 * context.multiprocessors;
  };
  while (slices < kSlicesMost && divides(2 * slices) && (bytes > slices * kShare || idle())) {
    slices *= 2;
  }
  return slices;
}

// Whether the op asks for what only cross-layer routing and its models ask for.
bool routed(const DeltaMix& op) {
  return op.values_ready || op.emits || op.answer_add || !op.erases;
}

template <typename State, int kWidth, bool kRouted>
void start(const DeltaMix& op, Context& context, const SplitVectors& split, int slices,
           int tokens_most) {
  const auto kernel = delta_mix_kernel<State, kWidth, kRouted>;
  const int values = op.value_dim / slices;
  const size_t shared =
      size_t((State::kHeld ? values * op.key_dim : 0) + vector_floats(op, values)) *
      sizeof(float);
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  launch(context,
         {.grid = dim3(op.key_heads * slices, op.rows.count), .block = dim3(kThreads),
          .shared = shared, .cluster = slices},
         kernel, op, split, context.fresh_state, slices, tokens_most);
}

template <typename State>
void start(const DeltaMix& op, Context& context, const SplitVectors& split, int slices,
           int tokens_most) {
  const auto aligned = [](const float* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (routed(op)) {
    start<State, 0, true>(op, context, split, slices, tokens_most);
  } else if (op.conv_width == 4 && aligned(op.conv_q) && aligned(op.conv_k) &&
             aligned(op.conv_v)) {
    start<State, 4, false>(op, context, split, slices, tokens_most);
  } else {
    start<State, 0, false>(op, context, split, slices, tokens_most);
  }
}

template <int kParts>
void start_held(const DeltaMix& op, Context& context, const SplitVectors& split, int slices,
                int tokens_most) {
  if (op.value_dim / slices < 2 * kGroups) {
    start<HeldState<kParts, 1>>(op, context, split, slices, tokens_most);
  } else {
    start<HeldState<kParts, 2>>(op, context, split, slices, tokens_most);
  }
}

// Rows of up to tokens_most tokens, one after the other, their answers also split.
void run_steps(const DeltaMix& op, Context& context, const SplitVectors& split, int tokens_most) {
  constexpr int kHeldMost = 128 * 1024;  // bytes of a slice; larger ones stay where they are
  const bool aligned =
      op.state.stride % 4 == 0 && reinterpret_cast<uintptr_t>(op.state.data) % 16 == 0;
  const int slices = slices_of(op, context);
  const bool fits =
      aligned && op.key_dim * op.value_dim / slices * int(sizeof(float)) <= kHeldMost;
  switch (fits ? op.key_dim : 0) {
    case 32: return start_held<1>(op, context, split, slices, tokens_most);
    case 64: return start_held<2>(op, context, split, slices, tokens_most);
    case 128: return start_held<4>(op, context, split, slices, tokens_most);
    case 256: return start_held<8>(op, context, split, slices, tokens_most);
    default: return start<StreamedState>(op, context, split, 1, tokens_most);
  }
}

// The rows of 2 to kStepTokensMost tokens of what run_held() serves: as many at one time as the
// machine has room for.
void run_few(const DeltaMix& op, Context& context, const SplitVectors& split) {
  using State = HeldState<4, 2>;
  constexpr int kSlices = 4;
  const int values = op.value_dim / kSlices;
  const size_t shared =
      size_t(values * op.key_dim + vector_floats(op, values)) * sizeof(float);
  const auto kernel = delta_few_kernel<State>;
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  const int room = kBlocks * context.multiprocessors / (op.key_heads * kSlices);
  launch(context,
         {.grid = dim3(op.key_heads * kSlices, std::clamp(room, 1, op.rows.count)),
          .block = dim3(kThreads), .shared = shared, .cluster = kSlices},
         kernel, op, split, kSlices, kStepTokensMost);
}

// What run_chunks() has left alone, or all rows where none is long. Their answers join the others',
// split, or nothing is.
void run_short_rows(const DeltaMix& op, Context& context, const SplitVectors& split) {
  if (op.rows.count * op.value_heads < kHeldHeads || !holds(op, context)) {
    return run_steps(op, context, split, kStepTokensMost);
  }
  if (single_rows(op.rows) > 0) run_held(op, context);
  if (split.high == nullptr) context.next_split = {};
  run_few(op, context, split);
}

}  // namespace

const char* refusal(const DeltaMix& op) {
  if (op.value_dim > kPart * kPartsMost) return "delta_mix of heads with more than 1,024 values";
  const bool fits = vector_floats(op, op.value_dim) * sizeof(float) <= 96 * 1024;
  return fits ? nullptr : "delta_mix of heads whose vectors and histories take more than 96 KiB";
}

bool defers(const DeltaMix& op, const Context& context) {
  if (!op.norm_output || routed(op) || op.rows.computed || !holds(op, context)) return false;
  if (op.rows.count <= resident::kTokensMost || op.rows.count * op.value_heads < kHeldHeads) {
    return false;
  }
  const int longest = op.rows.tokens - op.rows.count + 1;  // at most, if no row is empty
  return longest <= kStepTokensMost || serves_chunks(op, context);
}

void run(const DeltaMix& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.pending.data == nullptr || defers(op, context));
  WEIR_CHECK(op.value_heads % op.key_heads == 0);
  WEIR_CHECK(op.rows.count <= 65535 && refusal(op) == nullptr);
  const int longest = op.rows.tokens - op.rows.count + 1;  // at most, if no row is empty
  const bool plain = op.norm_output && !routed(op);
  // The chunk kernels norm what they answer, and know their rows when they start.
  const bool chunks = plain && !op.rows.computed && longest > kStepTokensMost;
  if (chunks && op.rows.count > 1) Beside::fork(context);
  if (const Chunks done = chunks ? run_chunks(op, context) : Chunks{}; done.run) {
    if (op.rows.count == 1) return;
    // Where prompts are few their kernels leave most of the machine idle.
    std::optional<Beside> beside;
    if (done.apart) beside.emplace(context);
    return run_short_rows(op, context, done.left);
  }
  // Rows that an op of the step makes may be empty and long, though they are as many as the tokens.
  const bool single = longest == 1 && !op.rows.computed;
  const int heads = op.rows.count * op.value_heads;
  if (single && plain && heads >= kHeldHeads && op.rows.singles != 0 && holds(op, context)) {
    return run_held(op, context);
  }
  if (op.pending.data != nullptr) {
    const int dim = op.value_heads * op.value_dim;
    return run_short_rows(op, context, leave_split(op.out, dim, op.rows.tokens, context));
  }
  if (single && plain) {
    const bool sliced = slices(op, context);
    if (heads >= (sliced ? kManySlices : kStreamHeads) && streams(op, context)) {
      return run_stream(op, context);
    }
    if (sliced) return run_slices(op, context);
  }
  run_steps(op, context,
            leave_split(op.out, op.value_heads * op.value_dim, op.rows.tokens, context), INT_MAX);
}

}  // namespace weir::cuda
