#pragma once
#include <climits>

#include "kernels/vector_cuda.cuh"

// What the kernels of softmax attention share: where keys, values and sums of log forget gates lie,
// and how a head's vector is normed and rotated by a few lanes of a warp.
namespace weir::cuda::attention {

// A row's keys and values for one kv head, and the sums of log forget gates of all query heads.
struct Memory {
  const Attention& op;
  int row, kv_head;
  Slot slot;

  __device__ int block_tokens() const { return op.window > 0 ? op.window : op.page_tokens; }
  __device__ float* block(int position) const {
    if (op.window > 0) return at(op.ring, slot);
    const int32_t page =
        op.page_table[int64_t(row) * op.pages_per_row + position / op.page_tokens];
    return op.pages + page * op.page_stride;
  }
  // The key of a position; its value lies values_after() floats on.
  __device__ float* key(int position) const {
    const int64_t at_head = int64_t(kv_head) * block_tokens() + position % block_tokens();
    return block(position) + at_head * op.head_dim;
  }
  __device__ int64_t values_after() const {
    return int64_t(op.kv_heads) * block_tokens() * op.head_dim;
  }
  // A query head's sum up to a position; what its rounding left lies sum_rest() floats on.
  __device__ float* gate_sum(int position, int head) const {
    return block(position) + 2 * values_after() + int64_t(head) * block_tokens() +
           position % block_tokens();
  }
  __device__ int64_t sum_rest() const { return int64_t(op.heads) * block_tokens(); }
};

// The norm of a head: all heads share one, or there is one for each.
__device__ inline const float* norm_of(const Attention& op, const float* norm, int head) {
  return norm != nullptr && op.norm_per_head ? norm + int64_t(head) * op.head_dim : norm;
}

__device__ inline double log_gate(const Attention& op, int head, int token) {
  const double x = at(op.forget, token)[head];
  return fmin(x, 0.0) - log1p(exp(-fabs(x)));
}
// Keeps the sum of a query head's log gates up to a position, and returns it as it is kept.
__device__ inline double keep_gate(const Memory& memory, int head, int position, double total) {
  float* const sum = memory.gate_sum(position, head);
  sum[0] = float(total);
  const float rest = float(total - double(sum[0]));
  sum[memory.sum_rest()] = rest;
  return double(sum[0]) + double(rest);
}
// The same, given the one before: a chunk's sums are those of its tokens one by one.
__device__ inline double add_gate(const Attention& op, const Memory& memory, int head, int token,
                                  int position, double before) {
  return keep_gate(memory, head, position, before + log_gate(op, head, token));
}
__device__ inline double gate_before(const Memory& memory, int head, int position) {
  if (position == 0) return 0;
  const float* const sum = memory.gate_sum(position - 1, head);
  return double(sum[0]) + double(sum[memory.sum_rest()]);
}

// --- norm and rotation: kLanes neighbouring lanes hold a head, four neighbouring columns each ----

__device__ inline float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ inline void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }

// The angle of a pair of columns at position 1, in turns; `log_theta` to base 2.
template <int kDim>
__device__ inline double turns_of(int pair, double log_theta) {
  constexpr double kPerRadian = 0.15915494309189535;
  return exp2(-2.0 / kDim * pair * log_theta) * kPerRadian;
}
// Whole turns are taken off before anything is rounded to float32.
__device__ inline void cosine_and_sine(int position, double turns, float* cosine, float* sine) {
  const double angle = position * turns;
  sincospif(2 * float(angle - rint(angle)), sine, cosine);
}

// x / rms(x) * norm; the norm is optional.
template <int kLanes>
__device__ inline float4 normed(float4 x, const float* norm, int column, float eps) {
  if (norm == nullptr) return x;
  const float squares = sum_over_lanes<kLanes>(dot(x, x));
  const float scale = 1.0f / sqrtf(squares / float(4 * kLanes) + eps);
  return times(scaled(x, scale), load_four(norm + column));
}
// Columns i and i + d/2 are rotated together. `cosine` and `sine` are those of i.
template <int kLanes>
__device__ inline float4 rotated(float4 x, float4 cosine, float4 sine) {
  const auto other = [](float one) { return __shfl_xor_sync(0xffffffffu, one, kLanes / 2); };
  const float sign = threadIdx.x & (kLanes / 2) ? 1.0f : -1.0f;
  return {x.x * cosine.x + sign * (other(x.x) * sine.x),
          x.y * cosine.y + sign * (other(x.y) * sine.y),
          x.z * cosine.z + sign * (other(x.z) * sine.z),
          x.w * cosine.w + sign * (other(x.w) * sine.w)};
}
// The same, from a token's cosines of all pairs and, behind them, its sines; null: no positions.
template <int kLanes>
__device__ inline float4 rotated(float4 x, const float* angles, int column) {
  if (angles == nullptr) return x;
  const float* const mine = angles + column % (2 * kLanes);
  return rotated<kLanes>(x, load_four(mine), load_four(mine + 2 * kLanes));
}

// Whether the kernels below can run an op: heads of 64 or 128 columns, all in 16-byte pieces.
bool served(const Attention& op, const Context& context);
// Rows of at most `tokens_most` tokens, one token after the other; others are left alone.
// `split`: where the answers are also left split.
void run_steps(const Attention& op, int tokens_most, const SplitVectors& split, Context& context);
// Rows of more than one token, all their tokens at once, on Hopper's tensor cores. False, having
// done nothing, where the op is not served so.
bool run_chunks(const Attention& op, Context& context);

}  // namespace weir::cuda::attention
