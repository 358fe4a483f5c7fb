#pragma once
#include <cfloat>

#include "kernels/sample_cuda.cuh"
#include "kernels/tensor_core.cuh"

// Rows that are drawn from as they come: no edits, no alternatives to report, no filter but min_p.
// Their logits are read once and stay in registers as weights, so that a row waits for the cache
// once, and for the whole block twice: for the largest logit and for the sums. Sums are not those
// of other rows bit for bit: a number within some 1e-7 of a boundary may draw the token beside it
// where, say, alternatives are asked for.
//
// Floor: the logits read once, 4 * vocab bytes; a multiprocessor's 64 bytes a cycle take 2,000
// cycles for 32,000 of them, as long as 16 exponentials a cycle do.
namespace weir::cuda::sample {

constexpr int kHeld = 32;  // logits of a thread

// Reads only what was there before the program.
__device__ inline bool held_row(const Sample& op, int row) {
  const Sampling& how = op.sampling[row];
  if (op.vocab > kHeld * kThreads || op.top[row] > 0) return false;
  if (op.target[row] >= 0) return true;
  const bool edits = op.edit_begin[row] != op.edit_begin[row + 1] ||
                     (op.counts != nullptr && op.counts[row] >= 0);
  const bool filters = how.top_k > 0 || how.typical_p < 1 || how.top_p < 1;
  return !edits && (how.temperature <= 0 || !filters);
}

// A thread's logits. A warp has a run of them, each lane every 32nd of these.
struct Held {
  float value[kHeld];
  int first;  // token

  __device__ Held(const float* logits, int vocab) {
    const int run = ((vocab - 1) / kThreads + 1) * 32;
    first = int(threadIdx.x / 32) * run + int(threadIdx.x % 32);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = first + 32 * j;
      value[j] = 32 * j < run && i < vocab ? logits[i] : -INFINITY;
    }
  }

  // The largest finite one; -infinity: there is none.
  __device__ float largest() const {
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) most = value[j] < INFINITY ? fmaxf(most, value[j]) : most;
    return most;
  }
};

// The first token of the warp, by id, with which the weights of all up to it exceed the goal,
// `before` being the sum of earlier warps' weights. Where rounding leaves none: the last one of any
// weight. One at least has some. space: [32][33].
__device__ inline int first_beyond(const Held& weights, double before, double goal, float* space) {
  const int lane = threadIdx.x % 32;
  // The lane where the sum first exceeds the goal.
  const auto reached = [&](float weight, double sum) {
    const unsigned beyond = __ballot_sync(0xffffffffu, weight > 0 && before + sum > goal);
    const unsigned any = __ballot_sync(0xffffffffu, weight > 0);
    return beyond != 0 ? __ffs(int(beyond)) - 1 : 31 - __clz(int(any));
  };
#pragma unroll
  for (int j = 0; j < kHeld; ++j) space[33 * j + lane] = weights.value[j];
  __syncwarp();
  float group = 0;  // lane j: the weights of 32 neighbouring tokens
#pragma unroll 8
  for (int i = 0; i < 32; ++i) group += space[33 * lane + i];
  const double groups = sum_up_to(double(group));
  const int j = reached(group, groups);
  const double earlier = __shfl_sync(0xffffffffu, groups, max(j - 1, 0));
  if (j > 0) before += earlier;
  const float weight = space[33 * j + lane];
  const int at = reached(weight, sum_up_to(double(weight)));
  return weights.first - lane + 32 * j + at;
}

// Sums over the block, in a fixed order, and the warp where those of weights first exceed a share.
struct HeldSums {
  double all = 0;                // of exp(logit - largest)
  double before = 0, goal = 0;   // of weights: those of the warps before; what is to be exceeded
  int warp = -1;                 // none, where rounding left the goal at the sum
};
__device__ inline HeldSums sum_held(float all, float weights, double share, Scratch& scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto add = [](double a, double b) { return a + b; };
  const double of_warp = combine_lanes(double(all), add);
  const double weights_of_warp = combine_lanes(double(weights), add);
  auto* const sums = reinterpret_cast<double*>(scratch.candidate);
  if (lane == 0) {
    scratch.sum[warp] = of_warp;
    sums[warp] = weights_of_warp;
  }
  __syncthreads();  // every warp's sums are there
  const double own = sums[lane], up_to = sum_up_to(own);
  const double goal = share * __shfl_sync(0xffffffffu, up_to, 31);
  const unsigned beyond = __ballot_sync(0xffffffffu, own > 0 && up_to > goal);
  const int found = __ffs(int(beyond)) - 1;
  const double before = __shfl_sync(0xffffffffu, up_to, max(found - 1, 0));
  return {combine_lanes(scratch.sum[lane], add), found > 0 ? before : 0, goal, found};
}

// The largest of a block's values, none of them NaN.
__device__ inline float block_largest(float value, Scratch& scratch) {
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, ordered(value));
  if (threadIdx.x % 32 == 0) scratch.key[threadIdx.x / 32] = of_warp;
  __syncthreads();  // every warp's value is there
  return unordered(__reduce_max_sync(0xffffffffu, uint32_t(scratch.key[threadIdx.x % 32])));
}

// The first token of the block whose logit is `most`; `mine` is the thread's largest.
__device__ inline int find_first(const float* logits, int vocab, float mine, float most,
                                 Scratch& scratch) {
  int found = INT_MAX;
  if (mine == most) {  // hardly any thread's; it may hold weights by now
    const Held again(logits, vocab);
#pragma unroll
    for (int j = kHeld - 1; j >= 0; --j) {
      if (again.value[j] == most) found = again.first + 32 * j;
    }
  }
  const int of_warp = __reduce_min_sync(0xffffffffu, found);
  auto* const firsts = reinterpret_cast<int*>(scratch.units);
  if (threadIdx.x % 32 == 0) firsts[threadIdx.x / 32] = of_warp;
  __syncthreads();  // every warp's token is there
  return __reduce_min_sync(0xffffffffu, firsts[threadIdx.x % 32]);
}

// Logits become weights relative to the largest, 0 below min_p; the exponentials' and the weights'
// sums.
__device__ inline float2 weigh(Held& held, float most, const Sampling& how) {
  constexpr float kLog2E = 1.4426950408889634f;
  const bool same = how.temperature == 1;
  const float scale = fminf(kLog2E / how.temperature, FLT_MAX);
  float all[4] = {}, weights[4] = {};  // four sums of eight each round less than one
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const float below = held.value[j] - most, e = exp2_fast(below * kLog2E);
    const float weight = same ? e : exp2_fast(below * scale);
    all[j % 4] += e;
    held.value[j] = weight >= how.min_p ? weight : 0.0f;
    weights[j % 4] += held.value[j];
  }
  return {(all[0] + all[1]) + (all[2] + all[3]),
          (weights[0] + weights[1]) + (weights[2] + weights[3])};
}
__device__ inline float sum_exponentials(const Held& held, float most) {
  constexpr float kLog2E = 1.4426950408889634f;
  float all[4] = {};
#pragma unroll
  for (int j = 0; j < kHeld; ++j) all[j % 4] += exp2_fast((held.value[j] - most) * kLog2E);
  return (all[0] + all[1]) + (all[2] + all[3]);
}

__device__ inline void draw_held(const Sample& op, int row, Scratch& scratch) {
  const Sampling& how = op.sampling[row];
  const float* const logits = at(op.logits, row);
  Held held(logits, op.vocab);
  const Token target = op.target[row];
  const bool weighs = target < 0 && how.temperature > 0;
  const float mine = held.largest(), largest = block_largest(mine, scratch);
  const float most = largest > -INFINITY ? largest : 0.0f;
  const float2 sums = weighs ? weigh(held, most, how)
                             : float2{sum_exponentials(held, most), 0.0f};
  const double share = weighs ? uniform(how.seed, op.position[row]) : 0;
  const HeldSums found = sum_held(sums.x, sums.y, share, scratch);
  if (threadIdx.x < Sample::kTop) {
    op.top_token[row * Sample::kTop + threadIdx.x] = -1;
    op.top_logprob[row * Sample::kTop + threadIdx.x] = -INFINITY;
  }
  // A NaN or +inf among the logits shows in the sum: then this is no distribution.
  const bool usable = largest > -INFINITY && isfinite(found.all);
  bool answers = threadIdx.x == 0;
  int token = target;
  if (!usable) {
    token = -1;
  } else if (weighs && found.warp >= 0) {
    if (int(threadIdx.x / 32) != found.warp) return;
    token = first_beyond(held, found.before, found.goal, reinterpret_cast<float*>(scratch.bin));
    answers = threadIdx.x % 32 == 0;
  } else if (target < 0) {
    token = find_first(logits, op.vocab, mine, most, scratch);
  }
  if (!answers) return;
  const float logit = usable ? logits[token] : 0.0f;
  const float score = logit - most - logf(float(found.all));
  op.token[row] = token;
  op.logprob[row] = !usable ? 0.0f : isfinite(logit) ? score : -INFINITY;
}

}  // namespace weir::cuda::sample
