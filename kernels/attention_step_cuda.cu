#include <algorithm>
#include <cmath>

#include "kernels/async_cuda.cuh"
#include "kernels/attention_cuda.cuh"
#include "kernels/tensor_core.cuh"

// Attention for rows of one token: 2 kv_heads (p + 1) head_dim floats a row that must be read, and
// next to nothing to compute, in float32. A block reads one kv head's keys and values for all query
// heads that share them. Where rows and heads do not fill the machine, a row's positions are split
// among the blocks of a cluster, which put their sums together through each other's shared memory.
namespace weir::cuda::attention {
namespace {

constexpr int kMostSplits = 8;
constexpr int kKeys = 8;  // keys and values that a lane asks for before it uses one
constexpr float kLog2E = 1.4426950408889634f;

struct StepJob {
  Attention op;
  double log_theta = 0;  // to base 2
  int tokens_most = 0, splits = 1;
  SplitVectors split;
};

// kGroup query heads share a kv head, or a part of those that do.
template <int kDim, int kGroup>
struct Sizes {
  static constexpr int kLanes = kDim / 4;              // a key's
  static constexpr int kAtOnce = 32 / kLanes;          // keys side by side in a warp
  static constexpr int kChunk = kKeys * kAtOnce;       // a warp's positions at once
  // Many heads' sums take registers, so there are fewer warps. They share one block: several small
  // ones on a multiprocessor are balanced worse.
  static constexpr int kThreads = kGroup <= 2 ? 256 : kGroup <= 4 ? 384 : 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlocks = kGroup <= 2 ? 2 : 1;  // of a multiprocessor
};

template <int kDim, int kGroup>
struct StepShared {
  static constexpr int kWarps = Sizes<kDim, kGroup>::kWarps;
  alignas(16) float angles[kDim];               // cosines, sines
  alignas(16) float q[kGroup][kDim];            // times log2(e) / sqrt(kDim)
  alignas(16) float out[kWarps][kGroup][kDim];  // each warp's sum, before it is divided
  float most[kWarps][kGroup], total[kWarps][kGroup];
  float now[kGroup], now_rest[kGroup];          // sums of log gates
  float block_out[kGroup][kDim];                // the block's, for the others of the cluster
  float block_most[kGroup], block_total[kGroup];
};

// The token that attends, and for which query heads: first_head and those behind it. Of those
// beyond the kv head's last, the last itself is computed again.
struct Token {
  const StepJob& job;
  Memory memory;
  int token, position, first_head, heads;

  __device__ int head(int i) const { return first_head + min(i, heads - 1); }
};

template <int kDim>
__device__ inline void find_angles(const StepJob& job, int position, float* angles) {
  if (job.op.rope_theta <= 0 || threadIdx.x >= kDim / 2) return;
  cosine_and_sine(position, turns_of<kDim>(threadIdx.x, job.log_theta), angles + threadIdx.x,
                  angles + kDim / 2 + threadIdx.x);
}

// Queries into shared memory and, the first time, the token's key, value and gates into the row's
// memory. Every block of a cluster writes the same there.
template <int kDim, int kGroup>
__device__ void prepare(const Token& t, bool append, StepShared<kDim, kGroup>& shared) {
  using S = Sizes<kDim, kGroup>;
  const Attention& op = t.job.op;
  const int lane = threadIdx.x % 32, column = 4 * (lane % S::kLanes);
  const int items = append ? kGroup + 2 : kGroup, kv = t.memory.kv_head;
  const float* const angles = op.rope_theta > 0 ? shared.angles : nullptr;
  for (int base = threadIdx.x / 32 * S::kAtOnce; base < items; base += S::kWarps * S::kAtOnce) {
    const int item = base + lane / S::kLanes;
    const bool query = item < kGroup;
    const int head = query ? t.head(item) : kv;
    const Acts& in = query ? op.q : item == kGroup ? op.k : op.v;
    const float4 raw = load_four(at(in, t.token) + int64_t(head) * kDim + column);
    const float* const norm = query ? op.q_norm : op.k_norm;
    const float4 ready = rotated<S::kLanes>(
        normed<S::kLanes>(raw, norm_of(op, norm, head), column, op.norm_eps), angles, column);
    if (query) {
      store_four(&shared.q[item][column], scaled(ready, kLog2E / sqrtf(float(kDim))));
    } else if (item < items) {
      float* const key = t.memory.key(t.position) + column;
      store_four(item == kGroup ? key : key + t.memory.values_after(),
                 item == kGroup ? ready : raw);
    }
  }
  for (int i = threadIdx.x; op.forgets && i < kGroup; i += S::kThreads) {
    const int head = t.head(i);
    if (i < t.heads) {
      add_gate(op, t.memory, head, t.token, t.position, gate_before(t.memory, head, t.position));
      shared.now[i] = t.memory.gate_sum(t.position, head)[0];
      shared.now_rest[i] = t.memory.gate_sum(t.position, head)[t.memory.sum_rest()];
    }
  }
}

// Running softmaxes over the positions that these kLanes lanes have seen; `total` is a lane's own.
template <int kGroup>
struct Running {
  float most[kGroup], total[kGroup];
  float4 out[kGroup];
};

// Keys and values of the positions from `first` on, the last one again where they end.
template <int kDim, int kGroup>
__device__ inline void load_chunk(const Token& t, int first, float4 (&key)[kKeys],
                                  float4 (&value)[kKeys]) {
  using S = Sizes<kDim, kGroup>;
  const Attention& op = t.job.op;
  const int lane = threadIdx.x % 32, column = 4 * (lane % S::kLanes);
  const int mine = lane / S::kLanes * kKeys, last = t.position - first;
  const int64_t values_after = t.memory.values_after();
  if (op.window == 0 && op.page_tokens % S::kChunk == 0) {
    const float* const from = t.memory.key(first) + column;
#pragma unroll
    for (int u = 0; u < kKeys; ++u) key[u] = load_four(from + min(mine + u, last) * kDim);
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      value[u] = load_four(from + values_after + min(mine + u, last) * kDim);
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < kKeys; ++u) {
    const float* const from = t.memory.key(first + min(mine + u, last)) + column;
    key[u] = load_four(from);
    value[u] = load_four(from + values_after);
  }
}

// The score of the key that a lane's last three bits name, for one query head.
template <int kDim, int kGroup>
__device__ inline float score(const Token& t, int position, int g, const float4 (&key)[kKeys],
                              const StepShared<kDim, kGroup>& shared) {
  using S = Sizes<kDim, kGroup>;
  const float4 q = load_four(&shared.q[g][4 * (threadIdx.x % S::kLanes)]);
  float parts[kKeys];
#pragma unroll
  for (int u = 0; u < kKeys; ++u) parts[u] = dot(q, key[u]);
  float score = scatter_sums(parts);
#pragma unroll
  for (int step = kKeys; step < S::kLanes; step *= 2) {
    score += __shfl_xor_sync(0xffffffffu, score, step);
  }
  if (position > t.position) return -INFINITY;
  if (t.job.op.forgets) {
    const float* const then = t.memory.gate_sum(position, t.head(g));
    const int i = min(g, t.heads - 1);
    score += kLog2E * ((shared.now[i] - then[0]) +
                       (shared.now_rest[i] - then[t.memory.sum_rest()]));
  }
  return score;
}

// One more chunk. The heads' sums over lanes, each a chain, go side by side.
template <int kDim, int kGroup>
__device__ inline void see(const Token& t, int first, const float4 (&key)[kKeys],
                           const float4 (&value)[kKeys], const StepShared<kDim, kGroup>& shared,
                           Running<kGroup>& running) {
  using S = Sizes<kDim, kGroup>;
  const int lane = threadIdx.x % 32;
  const int position = first + lane / S::kLanes * kKeys + lane % kKeys;
  float weight[kGroup], most[kGroup];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    weight[g] = score<kDim, kGroup>(t, position, g, key, shared);
    most[g] = fmaxf(running.most[g], weight[g]);
  }
#pragma unroll
  for (int step = 1; step < kKeys; step *= 2) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      most[g] = fmaxf(most[g], __shfl_xor_sync(0xffffffffu, most[g], step));
    }
  }
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const float anchor = most[g] == -INFINITY ? 0.0f : most[g];
    const float shrink = exp2_fast(running.most[g] - anchor);
    weight[g] = exp2_fast(weight[g] - anchor);
    running.most[g] = most[g];
    running.total[g] = running.total[g] * shrink + weight[g];
    running.out[g] = scaled(running.out[g], shrink);
  }
#pragma unroll
  for (int u = 0; u < kKeys; ++u) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      const float one = __shfl_sync(0xffffffffu, weight[g], (lane & ~(kKeys - 1)) | u);
      running.out[g] = plus(running.out[g], one, value[u]);
    }
  }
}

// A warp's groups of lanes together; then it leaves its sums in shared memory.
template <int kDim, int kGroup>
__device__ inline void leave_sums(const Running<kGroup>& running,
                                  StepShared<kDim, kGroup>& shared) {
  using S = Sizes<kDim, kGroup>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    float most = running.most[g];
#pragma unroll
    for (int step = S::kLanes; step < 32; step *= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    }
    const float shrink = most == -INFINITY ? 0.0f : exp2_fast(running.most[g] - most);
    float total = sum_over_lanes<kKeys>(running.total[g]) * shrink;
    float4 out = scaled(running.out[g], shrink);
    total = sum_over_groups<S::kLanes>(total);
    out = {sum_over_groups<S::kLanes>(out.x), sum_over_groups<S::kLanes>(out.y),
           sum_over_groups<S::kLanes>(out.z), sum_over_groups<S::kLanes>(out.w)};
    if (lane < S::kLanes) store_four(&shared.out[warp][g][4 * lane], out);
    if (lane == 0) {
      shared.most[warp][g] = most;
      shared.total[warp][g] = total;
    }
  }
}

// Sums over `count` parts, each with its largest score, sum of weights and weighted values.
template <typename Part>
__device__ inline void add_parts(int count, const Part& part, float& most, float& total,
                                 float& out) {
  most = -INFINITY;
  for (int i = 0; i < count; ++i) most = fmaxf(most, part(i, 0));
  total = out = 0;
  if (most == -INFINITY) return;
  for (int i = 0; i < count; ++i) {
    const float weight = exp2_fast(part(i, 0) - most);
    total += weight * part(i, 1);
    out += weight * part(i, 2);
  }
}

template <int kDim, int kGroup>
__device__ inline void store(const Token& t, int g, int column, float value) {
  if (g >= t.heads) return;
  const Attention& op = t.job.op;
  const int64_t place = int64_t(t.head(g)) * kDim + column;
  at(op.out, t.token)[place] = value;
  store_split(t.job.split, int64_t(t.token) * op.heads * kDim + place, value);
}

// The block's warps together, then the cluster's blocks.
template <int kDim, int kGroup>
__device__ void finish(const Token& t, StepShared<kDim, kGroup>& shared) {
  using S = Sizes<kDim, kGroup>;
  const int splits = t.job.splits;
  float most, total, out;
  for (int i = threadIdx.x; i < kGroup * kDim; i += S::kThreads) {
    const int g = i / kDim, column = i % kDim;
    add_parts(S::kWarps, [&](int w, int what) {
      return what == 0 ? shared.most[w][g] : what == 1 ? shared.total[w][g]
                                                       : shared.out[w][g][column];
    }, most, total, out);
    if (splits == 1) {
      store<kDim, kGroup>(t, g, column, out / total);
      continue;
    }
    shared.block_out[g][column] = out;
    if (column == 0) {
      shared.block_most[g] = most;
      shared.block_total[g] = total;
    }
  }
  if (splits == 1) return;
  cluster_barrier();  // every block's sums are there
  for (int i = cluster_rank() * S::kThreads + threadIdx.x; i < kGroup * kDim;
       i += splits * S::kThreads) {
    const int g = i / kDim, column = i % kDim;
    add_parts(splits, [&](int s, int what) {
      return read_peer(what == 0 ? &shared.block_most[g] : what == 1 ? &shared.block_total[g]
                                                         : &shared.block_out[g][column], s);
    }, most, total, out);
    store<kDim, kGroup>(t, g, column, out / total);
  }
  cluster_barrier();  // they have been read
}

template <int kDim, int kGroup>
__device__ inline void attend(const Token& t, StepShared<kDim, kGroup>& shared) {
  using S = Sizes<kDim, kGroup>;
  const Attention& op = t.job.op;
  const int oldest = op.window > 0 ? max(0, t.position - op.window + 1) : 0;
  const int chunks = (t.position + 1 - oldest + S::kChunk - 1) / S::kChunk;
  const int share = (chunks + t.job.splits - 1) / t.job.splits;
  const int begin = int(cluster_rank()) * share, end = min(chunks, begin + share);
  Running<kGroup> running;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    running.most[g] = -INFINITY;
    running.total[g] = 0;
    running.out[g] = {0, 0, 0, 0};
  }
  for (int c = begin + int(threadIdx.x) / 32; c < end; c += S::kWarps) {
    const int first = oldest + c * S::kChunk;
    float4 key[kKeys], value[kKeys];
    load_chunk<kDim, kGroup>(t, first, key, value);
    see<kDim, kGroup>(t, first, key, value, shared, running);
  }
  leave_sums<kDim, kGroup>(running, shared);
}

// One block, or the blocks of a cluster, for each (kv head, row).
template <int kDim, int kGroup>
__global__ __launch_bounds__(
    Sizes<kDim, kGroup>::kThreads, Sizes<kDim, kGroup>::kBlocks) void step_kernel(
    const __grid_constant__ StepJob job) {
  __shared__ StepShared<kDim, kGroup> shared;
  const Attention& op = job.op;
  const int row = blockIdx.z, kv_head = blockIdx.y, group = op.heads / op.kv_heads;
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  const int position = op.rows.first[row];
  const Slot slot = op.rows.slot[row];
  let_successor_start();
  find_angles<kDim>(job, position, shared.angles);
  wait_for_predecessor();
  if (slot == kPadding || count > job.tokens_most) return;
  for (int i = 0; i < count; ++i) {
    if (i > 0) find_angles<kDim>(job, position + i, shared.angles);
    for (int first = 0; first < group; first += kGroup) {
      const Token t{job, {op, row, kv_head, slot}, begin + i, position + i,
                    kv_head * group + first, min(kGroup, group - first)};
      __syncthreads();  // angles are there, and what the last pass left has been read
      prepare<kDim, kGroup>(t, first == 0, shared);
      __syncthreads();  // key, value, sums and queries can be read
      attend<kDim, kGroup>(t, shared);
      __syncthreads();  // every warp's sums are there
      finish<kDim, kGroup>(t, shared);
    }
  }
}

// How many clusters of so many blocks run at once, where a multiprocessor holds `held` blocks. With
// one each, some multiprocessors are left over: where n clusters of four fit, 5 / 4 n of three do.
int64_t room_for(int blocks, int held, const Context& context) {
  const int64_t all = int64_t(held) * context.multiprocessors;
  if (held > 1 || blocks == 1) return std::max<int64_t>(all / blocks, 1);
  const int* const clusters = context.hopper.clusters;  // of 1, 2, 4 and 8
  const int64_t found = blocks == 2   ? clusters[1]
                        : blocks == 3 ? clusters[2] * 5 / 4
                        : blocks == 4 ? clusters[2]
                                      : clusters[3];
  return std::max<int64_t>(found, 1);
}

template <int kDim, int kGroup>
void start(StepJob& job, Context& context) {
  using S = Sizes<kDim, kGroup>;
  const Attention& op = job.op;
  const int64_t blocks = int64_t(op.rows.count) * op.kv_heads;
  const int64_t positions =
      op.window > 0 ? op.window : int64_t(op.pages_per_row) * op.page_tokens;
  // Clusters run in turns of as many as there is room for; a turn of shorter blocks must gain what
  // their sums cost.
  const auto turns = [&](int splits) {
    const int64_t room = room_for(splits, S::kBlocks, context);
    return double((blocks + room - 1) / room) / splits;
  };
  const int64_t most = std::min<int64_t>(kMostSplits, positions / 64);
  for (const int splits : {2, 3, 4, 8}) {
    if (context.compute < 90 || splits > most) break;
    if (turns(splits) < 0.93 * turns(job.splits)) job.splits = splits;
  }
  launch(context,
         {.grid = dim3(job.splits, op.kv_heads, op.rows.count), .block = dim3(S::kThreads),
          .cluster = job.splits},
         step_kernel<kDim, kGroup>, job);
}

template <int kDim>
void start(StepJob& job, Context& context) {
  const int group = job.op.heads / job.op.kv_heads;
  if (group == 1) return start<kDim, 1>(job, context);
  if (group == 2) return start<kDim, 2>(job, context);
  if (group <= 4) return start<kDim, 4>(job, context);
  start<kDim, 8>(job, context);
}

bool aligned(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 4 == 0;
}

}  // namespace

bool served(const Attention& op, const Context& context) {
  bool all = op.head_dim == 64 || op.head_dim == 128;
  for (const Acts& acts : {op.q, op.k, op.v, op.out}) {
    all = all && aligned(acts.data, acts.stride);
  }
  all = all && aligned(op.q_norm, 0) && aligned(op.k_norm, 0);
  all = all && (op.window > 0 ? aligned(op.ring.data, op.ring.stride)
                              : aligned(op.pages, op.page_stride));
  return all && context.compute >= 80;
}

void run_steps(const Attention& op, int tokens_most, const SplitVectors& split,
               Context& context) {
  StepJob job{.op = op, .tokens_most = tokens_most, .split = split};
  if (op.rope_theta > 0) job.log_theta = std::log2(double(op.rope_theta));
  op.head_dim == 64 ? start<64>(job, context) : start<128>(job, context);
}

}  // namespace weir::cuda::attention
