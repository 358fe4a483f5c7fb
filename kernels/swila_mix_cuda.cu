#include "kernels/swila_mix_cuda.cuh"

namespace weir::cuda {
namespace swila {
namespace {

// One channel that a thread convolves, with its last inputs, oldest first.
struct Channel {
  const float* in = nullptr;   // of the row's first token
  int64_t stride = 0;
  float tap[kWidth], x[kWidth];
};

// Channel i of the head: of q, k or v (group 0, 1, 2).
template <class L>
__device__ inline float* history_of(const SwilaMix& op, const Place& place, int i) {
  const int channels = op.heads * L::D;
  return at(op.history, place.slot) + (i / L::D * channels + place.head * L::D + i % L::D);
}

template <class L>
__device__ inline Channel channel(const SwilaMix& op, const Place& place, int i) {
  const int group = i / L::D, column = place.head * L::D + i % L::D;
  const Acts in = group == 0 ? op.q : group == 1 ? op.k : op.v;
  const float* taps = group == 0 ? op.conv_q : group == 1 ? op.conv_k : op.conv_v;
  Channel c{.in = at(in, place.begin) + column, .stride = in.stride};
  const float4 tap = *reinterpret_cast<const float4*>(taps + column * kWidth);
  c.tap[0] = tap.x, c.tap[1] = tap.y, c.tap[2] = tap.z, c.tap[3] = tap.w;
  const float* history = history_of<L>(op, place, i);
#pragma unroll
  for (int j = 1; j < kWidth; ++j) {
    c.x[j] = place.fresh ? 0.0f : history[(j - 1) * 3 * op.heads * L::D];
  }
  return c;
}

// What a thread reads of one token.
template <class L>
struct Inputs {
  float x[L::kOwn], decay;
  Logits logits;

  __device__ void load(const SwilaMix& op, const Place& place, const Channel* own, int t) {
    const int64_t token = place.begin + t;
    const int head = place.head * L::D;
    const int mixed = head * L::J + place.mixture * L::D + place.value;
#pragma unroll
    for (int u = 0; u < L::kOwn; ++u) x[u] = own[u].in[t * own[u].stride];
    logits.key_router = at(op.key_router, token)[mixed];
    logits.query_router = at(op.query_router, token)[mixed];
    logits.beta = at(op.beta, token)[mixed];
    if (op.key_mix.data != nullptr) {
      logits.key_mix = at(op.key_mix, token)[head + place.value];
      logits.query_mix = at(op.query_mix, token)[head + place.value];
    }
    if (op.decay_in.data != nullptr) decay = at(op.decay_in, token)[head * L::J + threadIdx.x];
  }
};

// A token's inputs become vectors in shared memory and the thread's own factors. With the last one
// the inputs become the history.
template <class L, bool kGated>
__device__ inline void prepare(const SwilaMix& op, const Place& place, const Inputs<L>& in,
                               bool last, Channel* own, Shared<L>& shared, Mixed& mine) {
#pragma unroll
  for (int u = 0; u < L::kOwn; ++u) {
    Channel& c = own[u];
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      c.x[j] = j + 1 < kWidth ? c.x[j + 1] : in.x[u];
      sum += c.tap[j] * c.x[j];
    }
    const int i = threadIdx.x + u * L::kThreads;
    if (i >= 3 * L::D) continue;
    shared.vectors[i] = sum * sigmoid(sum);
    if (!last) continue;
    float* const history = history_of<L>(op, place, i);
#pragma unroll
    for (int j = 1; j < kWidth; ++j) history[(j - 1) * 3 * op.heads * L::D] = c.x[j];
  }
  if constexpr (kGated) {
    const int i = place.head * L::J * L::D + int(threadIdx.x);
    const float a = op.decay_a[place.head * L::J + int(threadIdx.x) / L::D];
    shared.decay[threadIdx.x] = expf(-a * softplus(in.decay + op.dt_bias[i]));
  }
  mix<L>(in.logits, op.key_mix.data != nullptr, mine);
}

// `tokens` of one row from place.begin on.
template <class L, bool kGated>
__device__ inline void run_row(const SwilaMix& op, const Place& place, int tokens, bool wait,
                               Shared<L>& shared) {
  float* const first = at(op.state, place.slot) + int64_t(place.head) * L::J * L::D * L::D +
                       State<L>::first(place);
  const int mixed = (place.head * L::J + place.mixture) * L::D + place.value;
  const bool temporal = op.key_mix.data != nullptr;
  State<L> state;
  state.load(first, place.fresh);
  if (wait) wait_for_predecessor();
  Channel own[L::kOwn];
#pragma unroll
  for (int u = 0; u < L::kOwn; ++u) {
    own[u] = channel<L>(op, place, min(int(threadIdx.x) + u * L::kThreads, 3 * L::D - 1));
  }
  Inputs<L> in;
  in.load(op, place, own, 0);
  Mixed mine{.posterior = 1.0f / L::J, .prior = 1.0f / L::J};
  if (temporal && !place.fresh) {
    mine.posterior = at(op.posterior, place.slot)[mixed];
    mine.prior = at(op.prior, place.slot)[mixed];
  }
  for (int t = 0; t < tokens; ++t) {
    prepare<L, kGated>(op, place, in, t + 1 == tokens, own, shared, mine);
    __syncthreads();  // the token's vectors are there
    if (t + 1 < tokens) in.load(op, place, own, t + 1);  // on their way during this token
    const float answer = state.template step<kGated>(shared, mine);
    if (t + 1 == tokens) state.store(first);
    finish<L>(op, place, place.begin + t, answer, mine, shared, t % 2);
  }
  if (temporal) {
    at(op.posterior, place.slot)[mixed] = mine.posterior;
    at(op.prior, place.slot)[mixed] = mine.prior;
  }
}

// kMany: rows have several tokens as a rule. Without it registers are fewer, and a row of several
// tokens is taken as several rows, one after the other.
template <class L, bool kGated, bool kMany>
__global__ __launch_bounds__(L::kThreads, L::kResident) void swila_mix_kernel(
    const __grid_constant__ SwilaMix op, bool fresh_state) {
  __shared__ Shared<L> shared;
  let_successor_start();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const int tokens = op.rows.begin[row + 1] - begin;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || tokens == 0) {
    wait_for_predecessor();
    return;
  }
  Place place = place_of<L>(blockIdx.x, begin, op.rows.first[row] == 0, slot);
  if (!fresh_state) wait_for_predecessor();
  const int step = kMany ? tokens : 1;
#pragma unroll 1
  for (int t = 0; t < tokens; t += step) {
    run_row<L, kGated>(op, place, step, fresh_state && t == 0, shared);
    place.begin += step;
    place.fresh = false;
  }
}

template <class L, bool kGated>
void start(const SwilaMix& op, Context& context) {
  const auto kernel = op.rows.tokens > op.rows.count ? swila_mix_kernel<L, kGated, true>
                                                     : swila_mix_kernel<L, kGated, false>;
  launch(context, {.grid = dim3(op.heads, op.rows.count), .block = dim3(L::kThreads)}, kernel, op,
         context.fresh_state);
}

template <class L>
void start(const SwilaMix& op, Context& context) {
  op.decay_in.data != nullptr ? start<L, true>(op, context) : start<L, false>(op, context);
}

bool aligned(const SwilaMix& op) {
  bool all = op.state.stride % 4 == 0;
  for (const float* p : {static_cast<const float*>(op.state.data), op.conv_q, op.conv_k,
                         op.conv_v}) {
    all = all && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  }
  return all;
}

}  // namespace
}  // namespace swila

void run(const SwilaMix& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.rows.count <= 65535);
  const auto is = [&](int mixtures, int dim) {
    return op.mixtures == mixtures && op.dim == dim && op.conv_width == swila::kWidth &&
           swila::aligned(op);
  };
  if (is(4, 64)) return swila::start<swila::Layout<4, 64>>(op, context);
  if (is(4, 32)) return swila::start<swila::Layout<4, 32>>(op, context);
  if (is(2, 64)) return swila::start<swila::Layout<2, 64>>(op, context);
  if (is(8, 64)) return swila::start<swila::Layout<8, 64>>(op, context);
  swila::run_any(op, context);
}

}  // namespace weir::cuda
