#pragma once
#include "kernels/cached_cuda.cuh"
#include "kernels/swila_mix_cuda.cuh"

// A head's vectors for the kernels whose blocks hold a head of four mixtures of 64x64, made from
// the raw projections by all threads; its answer's norm.
namespace weir::cuda::swila_held {

using swila::kWidth;
using swila::Logits;

constexpr int J = 4, D = 64, kWarps = 16, kThreads = 32 * kWarps, kResident = 2;
constexpr int kLanes = 16;      // of a row
constexpr int kRows = 2 * J;    // of the state, of a thread: [mixture, pair of values]
static_assert(kThreads == 2 * J * D && 3 * D <= J * D && D / kWarps == 4);

struct Vectors {
  alignas(16) float vectors[3 * D];  // q, k (not normalised), v
  alignas(16) float decay[J * D];
  float prior[J * D], log_prior[J * D], write[J * D];  // [mixture, value]
  alignas(16) float squares[kWarps];
};

// Where a block's head is.
struct Here {
  int head, token;
  bool fresh;
  int oldest;  // the ring's row that the token's input replaces
  Slot slot;

  __device__ int64_t mixed(int i) const { return int64_t(head) * J * D + i; }
};

// What threads prepare: the first half of them a (mixture, value) each, four neighbours the
// mixtures of one value; the others a decay each, and all but the last a channel of q, k or v.
__device__ inline bool mixes() { return threadIdx.x < J * D; }
__device__ inline int own_mixed() { return threadIdx.x % J * D + threadIdx.x / J; }
__device__ inline int own_decay() { return threadIdx.x - J * D; }
__device__ inline bool convolves() { return !mixes() && own_decay() < 3 * D; }
__device__ inline int64_t column_of(const Here& here) {
  return int64_t(here.head) * D + threadIdx.x % D;
}
__device__ inline float* past_of(const SwilaMix& op, const Here& here) {
  return at(op.history, here.slot) + own_decay() / D * (op.heads * D) + column_of(here);
}

struct Input {
  float past[kWidth - 1] = {}, now = 0;  // of a channel
  float4 taps{};
  float a = 0, shift = 0, decay = 0;
  Logits logits;                         // of a mixture
  float posterior = 1.0f / J, prior = 1.0f / J;
};

// What no kernel of the same program writes before this one.
template <bool kGated>
__device__ inline void load_kept(const SwilaMix& op, const Here& here, Input& in) {
  if (mixes()) {
    if (op.key_mix.data == nullptr || here.fresh) return;
    in.posterior = at(op.posterior, here.slot)[here.mixed(own_mixed())];
    in.prior = at(op.prior, here.slot)[here.mixed(own_mixed())];
    return;
  }
  if (convolves()) {
    const int which = own_decay() / D;
    const float* const taps = which == 0 ? op.conv_q : which == 1 ? op.conv_k : op.conv_v;
    const float* const past = past_of(op, here);
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) {
      const int row = ring_row_of_age(here.oldest, j, kWidth - 1);
      in.past[j] = here.fresh ? 0.0f : past[row * 3 * op.heads * D];
    }
    in.taps = *reinterpret_cast<const float4*>(taps + column_of(here) * kWidth);
  }
  if constexpr (kGated) {
    const int64_t i = here.mixed(own_decay());
    in.a = op.decay_a[i / D];
    in.shift = op.dt_bias[i];
  }
}

// The token's own.
template <bool kGated>
__device__ inline void load_new(const SwilaMix& op, const Here& here, Input& in) {
  if (mixes()) {
    const int64_t i = here.mixed(own_mixed());
    in.logits.key_router = __ldcg(at(op.key_router, here.token) + i);
    in.logits.query_router = __ldcg(at(op.query_router, here.token) + i);
    in.logits.beta = __ldcg(at(op.beta, here.token) + i);
    if (op.key_mix.data == nullptr) return;
    const int column = here.head * D + threadIdx.x / J;
    in.logits.key_mix = __ldcg(at(op.key_mix, here.token) + column);
    in.logits.query_mix = __ldcg(at(op.query_mix, here.token) + column);
    return;
  }
  if (convolves()) {
    const int which = own_decay() / D;
    const Acts& from = which == 0 ? op.q : which == 1 ? op.k : op.v;
    in.now = __ldcg(at(from, here.token) + column_of(here));
  }
  if constexpr (kGated) in.decay = __ldcg(at(op.decay_in, here.token) + here.mixed(own_decay()));
}

// Over the mixtures of a value, which are `step` and 2 `step` lanes apart.
template <int step>
__device__ inline float sum_over_mixtures(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, step);
  return x + __shfl_xor_sync(0xffffffffu, x, 2 * step);
}
template <int step>
__device__ inline float softmax(float x) {
  float largest = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2 * step));
  x = quick_exp(x - largest);
  return __fdividef(x, sum_over_mixtures<step>(x));
}

// The thread's inputs become part of the head's vectors, and that of a channel joins the history.
template <bool kGated>
__device__ inline void prepare(const SwilaMix& op, const Here& here, const Input& in,
                               Vectors& shared) {
  if (mixes()) {
    float key = softmax<1>(in.logits.key_router), query = softmax<1>(in.logits.query_router);
    if (op.key_mix.data != nullptr) {
      const float from_key = quick_sigmoid(in.logits.key_mix),
                  from_query = quick_sigmoid(in.logits.query_mix);
      key = (1.0f - from_key) * in.posterior + from_key * key;
      query = (1.0f - from_query) * in.prior + from_query * query;
      at(op.prior, here.slot)[here.mixed(own_mixed())] = query;
    }
    shared.log_prior[own_mixed()] = logf(key);
    shared.prior[own_mixed()] = query;
    shared.write[own_mixed()] = quick_sigmoid(in.logits.beta);
    return;
  }
  if (convolves()) {
    const float x = in.taps.x * in.past[0] + in.taps.y * in.past[1] + in.taps.z * in.past[2] +
                    in.taps.w * in.now;
    shared.vectors[own_decay()] = x * quick_sigmoid(x);
    float* const past = past_of(op, here);
    past[here.oldest * 3 * op.heads * D] = in.now;
    if (here.fresh) past[3 * op.heads * D] = past[6 * op.heads * D] = 0.0f;
  }
  if constexpr (kGated) {
    shared.decay[own_decay()] = expf(-in.a * softplus(in.decay + in.shift));
  }
}
// A warp asks for a token's own vectors of a head, 32 floats a lane: those of all mixtures, or q,
// k, v and the mixes. Where so many states pass through the L2 cache, they are there no longer.
__device__ inline void bring_vectors(const SwilaMix& op, int token, int head, bool mixtures) {
  const int lane = threadIdx.x % 32, lines = (mixtures ? J * D : D) / 32;
  const float* from = nullptr;
  int64_t stride = 0;
  switch (mixtures ? lane / lines : 4 + lane / lines) {
    case 0: from = op.key_router.data, stride = op.key_router.stride; break;
    case 1: from = op.query_router.data, stride = op.query_router.stride; break;
    case 2: from = op.beta.data, stride = op.beta.stride; break;
    case 3: from = op.decay_in.data, stride = op.decay_in.stride; break;
    case 4: from = op.q.data, stride = op.q.stride; break;
    case 5: from = op.k.data, stride = op.k.stride; break;
    case 6: from = op.v.data, stride = op.v.stride; break;
    case 7: from = op.key_mix.data, stride = op.key_mix.stride; break;
    case 8: from = op.query_mix.data, stride = op.query_mix.stride; break;
  }
  if (from == nullptr) return;
  prefetch_line(from + token * stride + (head * lines + lane % lines) * 32);
}
// Normalises and writes the head's output, of which the thread has one value.
__device__ inline void finish(const SwilaMix& op, const Here& here, int value, float out,
                              float weight, const Vectors& shared, const SplitVectors& split) {
  const auto* sums = reinterpret_cast<const float4*>(shared.squares);
  float all = 0;
#pragma unroll
  for (int w = 0; w < kWarps / 4; ++w) all += (sums[w].x + sums[w].y) + (sums[w].z + sums[w].w);
  const float normed = out * weight * rsqrtf(all / float(D) + op.norm_eps);
  const int column = here.head * D + value;
  at(op.out, here.token)[column] = normed;
  store_split(split, int64_t(here.token) * op.heads * D + column, normed);
}
}  // namespace weir::cuda::swila_held
