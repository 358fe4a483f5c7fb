#include "kernels/swila_mix_cuda.cuh"

#include <algorithm>
#include <climits>

#include "kernels/long_rows_cuda.cuh"
#include "kernels/resident_cuda.cuh"
#include "kernels/swila_chunk_cuda.cuh"
#include "kernels/swila_rows_cuda.cuh"

namespace weir::cuda {
namespace swila {
namespace {

template <class L>
__device__ inline Channel channel(const SwilaMix& op, const Place& place, int i) {
  const int group = i / L::D, column = place.head * L::D + i % L::D;
  const Acts in = group == 0 ? op.q : group == 1 ? op.k : op.v;
  const float* taps = group == 0 ? op.conv_q : group == 1 ? op.conv_k : op.conv_v;
  Channel c{.in = at(in, place.begin) + column, .stride = in.stride};
  const float4 tap = *reinterpret_cast<const float4*>(taps + column * kWidth);
  c.tap[0] = tap.x, c.tap[1] = tap.y, c.tap[2] = tap.z, c.tap[3] = tap.w;
  const float* history = history_of<L>(op, place, i);
  const int oldest = ring_row(place.first, kWidth - 1);
#pragma unroll
  for (int j = 1; j < kWidth; ++j) {
    const int row = ring_row_of_age(oldest, j - 1, kWidth - 1);
    c.x[j] = place.fresh() ? 0.0f : history[row * 3 * op.heads * L::D];
  }
  return c;
}

// What a thread reads of one token.
template <class L>
struct Inputs {
  float x[L::kOwn], decay;
  Logits logits;

  __device__ Inputs(const SwilaMix& op, const Place& place, const Channel* own) {
    const int64_t token = place.begin;
    const int head = place.head * L::D;
    const int mixed = head * L::J + place.mixture * L::D + place.value;
#pragma unroll
    for (int u = 0; u < L::kOwn; ++u) x[u] = *own[u].in;
    logits.key_router = at(op.key_router, token)[mixed];
    logits.query_router = at(op.query_router, token)[mixed];
    logits.beta = at(op.beta, token)[mixed];
    if (op.key_mix.data != nullptr) {
      logits.key_mix = at(op.key_mix, token)[head + place.value];
      logits.query_mix = at(op.query_mix, token)[head + place.value];
    }
    if (op.gated) decay = at(op.decay_in, token)[head * L::J + threadIdx.x];
  }
};

// The thread's channels' last inputs of `tokens` join the row's history.
template <class L>
__device__ inline void remember(const SwilaMix& op, const Place& place, int tokens,
                                const Channel* own) {
  const int oldest = ring_row(place.first + tokens, kWidth - 1);
#pragma unroll
  for (int u = 0; u < L::kOwn; ++u) {
    const int i = threadIdx.x + u * L::kThreads;
    if (i >= 3 * L::D) continue;
    float* const history = history_of<L>(op, place, i);
#pragma unroll
    for (int j = 1; j < kWidth; ++j) {
      if (kWidth - j > tokens && !place.fresh()) continue;  // it is there
      const int row = ring_row_of_age(oldest, j - 1, kWidth - 1);
      history[row * 3 * op.heads * L::D] = own[u].x[j];
    }
  }
}

// A token's inputs become vectors in shared memory and the thread's own factors.
template <class L, bool kGated>
__device__ inline void prepare(const SwilaMix& op, const Place& place, const Inputs<L>& in,
                               Channel* own, Shared<L>& shared, Mixed& mine) {
#pragma unroll
  for (int u = 0; u < L::kOwn; ++u) {
    const int i = threadIdx.x + u * L::kThreads;
    const float x = own[u].push(in.x[u]);
    if (i < 3 * L::D) shared.vectors[i] = x;
  }
  if constexpr (kGated) {
    const int i = place.head * L::J * L::D + int(threadIdx.x);
    const float a = op.decay_a[place.head * L::J + int(threadIdx.x) / L::D];
    shared.decay[threadIdx.x] = expf(-a * softplus(in.decay + op.dt_bias[i]));
  }
  mix<L>(in.logits, op.key_mix.data != nullptr, mine);
}

// Normalises and writes the head's output of one token from what each (j, d) answers. Behind it the
// block's shared vectors may be overwritten.
template <class L>
__device__ inline void finish(const SwilaMix& op, const Place& place, float answer,
                              const Mixed& mine, Shared<L>& shared) {
  const float out = sum_over_groups<L::kLanes>(answer * mine.prior);
  const float squares = sum_over_lanes<L::kLanes>(out * out);
  if (threadIdx.x % 32 == 0) shared.squares[threadIdx.x / 32] = squares;
  const float weight = op.norm_weight[place.value];
  __syncthreads();  // all sums are there, the vectors have been read
  float all = 0;
#pragma unroll
  for (int w = 0; w < L::kWarps; ++w) all += shared.squares[w];
  if (place.mixture > 0) return;
  at(op.out, place.begin)[place.head * L::D + place.value] =
      out * weight / sqrtf(all / float(L::D) + op.norm_eps);
}

template <class L>
__device__ inline float* first_of_state(const SwilaMix& op, const Place& place) {
  return at(op.state, place.slot) + int64_t(place.head) * L::J * L::D * L::D +
         State<L>::first(place);
}

// Of the thread's own (j, d).
template <class L>
__device__ inline Mixed last_mixed(const SwilaMix& op, const Place& place) {
  const int mixed = (place.head * L::J + place.mixture) * L::D + place.value;
  Mixed mine{.posterior = 1.0f / L::J, .prior = 1.0f / L::J};
  if (op.key_mix.data != nullptr && !place.fresh()) {
    mine.posterior = at(op.posterior, place.slot)[mixed];
    mine.prior = at(op.prior, place.slot)[mixed];
  }
  return mine;
}
template <class L>
__device__ inline void keep_mixed(const SwilaMix& op, const Place& place, const Mixed& mine) {
  const int mixed = (place.head * L::J + place.mixture) * L::D + place.value;
  if (op.key_mix.data == nullptr) return;
  at(op.posterior, place.slot)[mixed] = mine.posterior;
  at(op.prior, place.slot)[mixed] = mine.prior;
}

template <class L>
__device__ inline void own_channels(const SwilaMix& op, const Place& place,
                                    Channel (&own)[L::kOwn]) {
#pragma unroll
  for (int u = 0; u < L::kOwn; ++u) {
    own[u] = channel<L>(op, place, min(int(threadIdx.x) + u * L::kThreads, 3 * L::D - 1));
  }
}

// One token of one row. The state is loaded before the predecessor is waited for, where that has
// not been done.
template <class L, bool kGated>
__device__ inline void run_token(const SwilaMix& op, const Place& place, bool wait,
                                 Shared<L>& shared) {
  float* const first = first_of_state<L>(op, place);
  State<L> state;
  state.load(first, place.fresh());
  if (wait) wait_for_predecessor();
  Channel own[L::kOwn];
  own_channels<L>(op, place, own);
  const Inputs<L> in(op, place, own);
  Mixed mine = last_mixed<L>(op, place);
  prepare<L, kGated>(op, place, in, own, shared, mine);
  remember<L>(op, place, 1, own);
  __syncthreads();  // the token's vectors are there
  const float answer = state.template step<kGated>(shared.vectors, shared.decay, mine);
  state.store(first);
  finish<L>(op, place, answer, mine, shared);
  keep_mixed<L>(op, place, mine);
}

// Rows of so many tokens; others are those of another kernel.
struct Lengths {
  int least = 1, most = INT_MAX;

  __device__ bool have(int tokens) const { return least <= tokens && tokens <= most; }
};

// Rows of one token as a rule: a row of several is taken as several rows, one after the other.
template <class L, bool kGated>
__global__ __launch_bounds__(L::kThreads, L::kResident) void swila_mix_kernel(
    const __grid_constant__ SwilaMix op, const __grid_constant__ Lengths lengths,
    bool fresh_state) {
  __shared__ Shared<L> shared;
  let_successor_start();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const int tokens = op.rows.begin[row + 1] - begin;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || !lengths.have(tokens)) {
    wait_for_predecessor();
    return;
  }
  Place place = place_of<L>(blockIdx.x, begin, op.rows.first[row], slot);
  if (!fresh_state) wait_for_predecessor();
#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    run_token<L, kGated>(op, place, fresh_state && t == 0, shared);
    __syncthreads();  // the squares have been read
    ++place.begin;
    ++place.first;
  }
}

// A row of several tokens.
template <class L, bool kGated>
__device__ inline void run_row(const SwilaMix& op, const Lengths& lengths, int row,
                               RowShared<L, kGated>& shared) {
  const int begin = op.rows.begin[row], tokens = op.rows.begin[row + 1] - begin;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || !lengths.have(tokens)) return;
  const Place place = place_of<L>(blockIdx.x, begin, op.rows.first[row], slot);
  State<L> state;
  state.load(first_of_state<L>(op, place), place.fresh());
  Channel own[L::kOwn];
  own_channels<L>(op, place, own);
  Mixed mine = last_mixed<L>(op, place);
  RowRunner<L, kGated>{op, place, shared}.run(tokens, state, mine, own);
  state.store(first_of_state<L>(op, place));
  remember<L>(op, place, tokens, own);
  keep_mixed<L>(op, place, mine);
}

template <class L, bool kGated>
__global__ __launch_bounds__(L::kThreads, L::kResident) void swila_rows_kernel(
    const __grid_constant__ SwilaMix op, const __grid_constant__ Lengths lengths) {
  extern __shared__ __align__(16) unsigned char space[];
  let_successor_start();
  wait_for_predecessor();
  run_row<L, kGated>(op, lengths, blockIdx.y, *reinterpret_cast<RowShared<L, kGated>*>(space));
}

// Few blocks, for rows of several tokens of which a step has few or none.
template <class L, bool kGated>
__global__ __launch_bounds__(L::kThreads, L::kResident) void swila_few_kernel(
    const __grid_constant__ SwilaMix op, const __grid_constant__ Lengths lengths) {
  extern __shared__ __align__(16) unsigned char space[];
  let_successor_start();
  wait_for_predecessor();
#pragma unroll 1
  for (int k = blockIdx.y;; k += gridDim.y) {
    const int row = row_among(op.rows, k, lengths.least, lengths.most);
    if (row < 0) return;
    run_row<L, kGated>(op, lengths, row, *reinterpret_cast<RowShared<L, kGated>*>(space));
    __syncthreads();  // the last tile has left shared memory
  }
}

// What the copies of rows of several tokens ask for.
bool inputs_aligned(const SwilaMix& op) {
  bool all = true;
  for (const Acts& acts : {op.q, op.k, op.v, op.key_router, op.query_router, op.beta, op.key_mix,
                           op.query_mix, op.decay_in}) {
    all = all && reinterpret_cast<uintptr_t>(acts.data) % 16 == 0 && acts.stride % 4 == 0;
  }
  return all;
}

template <class L, bool kGated>
void start(const SwilaMix& op, Context& context, const Lengths& lengths) {
  const dim3 grid(op.heads, op.rows.count), block(L::kThreads);
  if (op.rows.tokens == op.rows.count || !inputs_aligned(op)) {
    return launch(context, {.grid = grid, .block = block}, swila_mix_kernel<L, kGated>, op,
                  lengths, context.fresh_state);
  }
  constexpr size_t kBytes = sizeof(RowShared<L, kGated>);
  const auto kernel = swila_rows_kernel<L, kGated>;
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(kBytes)));
  launch(context, {.grid = grid, .block = block, .shared = kBytes}, kernel, op, lengths);
}

template <class L, bool kGated>
void start_few(const SwilaMix& op, Context& context, const Lengths& lengths) {
  if (!inputs_aligned(op)) return start<L, kGated>(op, context, lengths);
  constexpr size_t kBytes = sizeof(RowShared<L, kGated>);
  const auto kernel = swila_few_kernel<L, kGated>;
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(kBytes)));
  const int room = L::kResident * context.multiprocessors / op.heads;
  launch(context,
         {.grid = dim3(op.heads, std::clamp(room, 1, op.rows.count)), .block = dim3(L::kThreads),
          .shared = kBytes},
         kernel, op, lengths);
}

template <class L>
void start(const SwilaMix& op, Context& context, const Lengths& lengths = {}) {
  op.gated ? start<L, true>(op, context, lengths) : start<L, false>(op, context, lengths);
}

bool aligned(const SwilaMix& op) {
  bool all = true;
  for (const SlotState& part : {op.state, op.history, op.posterior, op.prior, op.pending}) {
    all = all && reinterpret_cast<uintptr_t>(part.data) % 16 == 0 && part.stride % 4 == 0;
  }
  for (const float* taps : {op.conv_q, op.conv_k, op.conv_v}) {
    all = all && reinterpret_cast<uintptr_t>(taps) % 16 == 0;
  }
  return all;
}

// Heads of four mixtures of 64x64.
void run_largest(const SwilaMix& op, Context& context) {
  const bool defers = op.pending.data != nullptr;
  if (op.rows.tokens == op.rows.count && holds(op)) {
    return defers ? run_deferring(op, context) : run_held(op, context);
  }
  using L = Layout<4, 64>;
  Lengths lengths;
  const int longest = op.rows.tokens - op.rows.count + 1;  // at most, if no row is empty
  if (longest > swila_chunk::kStepTokensMost && swila_chunk::run(op, context)) {
    if (op.rows.count == 1) return;
    lengths.most = swila_chunk::kStepTokensMost;
  }
  if (!defers) return start<L>(op, context, lengths);
  run_deferring(op, context);
  lengths.least = 2;
  op.gated ? start_few<L, true>(op, context, lengths) : start_few<L, false>(op, context, lengths);
}

}  // namespace
}  // namespace swila

bool defers(const SwilaMix& op, const Context& context) {
  return swila::holds(op) && swila::aligned(op) && context.compute >= 80 &&
         op.rows.tokens > resident::kTokensMost;
}

void run(const SwilaMix& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.rows.count <= 65535);
  WEIR_CHECK(op.pending.data == nullptr || defers(op, context));
  const auto is = [&](int mixtures, int dim) {
    return op.mixtures == mixtures && op.dim == dim && op.conv_width == swila::kWidth &&
           swila::aligned(op);
  };
  if (is(4, 64)) return swila::run_largest(op, context);
  if (is(4, 32)) return swila::start<swila::Layout<4, 32>>(op, context);
  if (is(2, 64)) return swila::start<swila::Layout<2, 64>>(op, context);
  if (is(8, 64)) return swila::start<swila::Layout<8, 64>>(op, context);
  swila::run_any(op, context);
}

}  // namespace weir::cuda
