#include "kernels/attention_cuda.cuh"

// Softmax attention: which kernels run an op, and those for heads and machines that the faster ones
// (attention_step_cuda.cu, attention_chunk_cuda.cu) do not take.
namespace weir::cuda {
namespace {

using namespace attention;

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kAtOnce = 4;         // positions a warp has in flight
constexpr int kHeadDimMost = 256;  // as many as the registers of attend() hold

// target = rope(norm(x)) of one head, by the whole block. `raw` is shared memory, [head_dim].
__device__ void rotate(const Attention& op, const float* x, const float* norm, int position,
                       float* raw, float* target) {
  const int d = op.head_dim;
  for (int i = threadIdx.x; i < d; i += kThreads) raw[i] = x[i];
  __syncthreads();  // raw is complete
  float scale = 1;
  if (norm != nullptr) {
    float sum = 0;
    for (int i = threadIdx.x % 32; i < d; i += 32) sum += raw[i] * raw[i];
    scale = 1.0f / sqrtf(sum_over_lanes(sum) / float(d) + op.norm_eps);
  }
  const auto normed = [&](int i) { return norm != nullptr ? raw[i] * scale * norm[i] : raw[i]; };
  if (op.rope_theta > 0) {
    for (int i = threadIdx.x; i < d / 2; i += kThreads) {
      const double power = -2.0 * i / d;
      const float angle = float(position) * float(pow(double(op.rope_theta), power));
      float sine, cosine;
      sincosf(angle, &sine, &cosine);
      const float a = normed(i), b = normed(i + d / 2);
      target[i] = a * cosine - b * sine;
      target[i + d / 2] = b * cosine + a * sine;
    }
  } else {
    for (int i = threadIdx.x; i < d; i += kThreads) target[i] = normed(i);
  }
  __syncthreads();  // target is complete, raw is free
}

__device__ void append(const Attention& op, const Memory& memory, int token, int position,
                       float* raw) {
  const int64_t offset = int64_t(memory.kv_head) * op.head_dim;
  float* key = memory.key(position);
  rotate(op, at(op.k, token) + offset, norm_of(op, op.k_norm, memory.kv_head), position, raw, key);
  float* value = key + memory.values_after();
  for (int i = threadIdx.x; i < op.head_dim; i += kThreads) value[i] = at(op.v, token)[offset + i];
}

// One warp's running softmax over the positions it has seen.
template <int kParts>
struct Running {
  float most = -INFINITY, total = 0, out[kParts] = {};
};

// A query head's sum of log gates at the token that attends.
struct Now {
  int head = 0;
  float sum = 0, rest = 0;

  // F_t - F_s for a position s; 0 without a forget gate.
  __device__ float bias(const Attention& op, const Memory& memory, int position) const {
    if (!op.forgets) return 0;
    const float* const then = memory.gate_sum(position, head);
    return (sum - then[0]) + (rest - then[memory.sum_rest()]);
  }
};

// Positions first, first + 1 .. of which the last `count` ones past the end are left out.
template <int kParts>
__device__ inline void see(const Attention& op, const Memory& memory, const float (&q)[kParts],
                           const Now& now, int first, int count, Running<kParts>& running) {
  const int lane = threadIdx.x % 32;
  const float scale = 1.0f / sqrtf(float(op.head_dim));
  const float* key[kAtOnce];
  float score[kAtOnce], value[kAtOnce][kParts];
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    key[u] = memory.key(u < count ? first + u : first);
    score[u] = 0;
  }
#pragma unroll
  for (int c = 0; c < kParts; ++c) {
    const int i = lane + 32 * c;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const bool valid = i < op.head_dim && u < count;
      score[u] += valid ? q[c] * key[u][i] : 0.0f;
      value[u][c] = valid ? key[u][memory.values_after() + i] : 0.0f;
    }
  }
  float most = running.most;
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const float sum = sum_over_lanes(score[u]) * scale;
    score[u] = u < count ? sum + now.bias(op, memory, first + u) : -INFINITY;
    most = fmaxf(most, score[u]);
  }
  const float shrink = expf(running.most - most);
  running.most = most;
  running.total *= shrink;
#pragma unroll
  for (int c = 0; c < kParts; ++c) running.out[c] *= shrink;
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const float weight = expf(score[u] - most);
    running.total += weight;
#pragma unroll
    for (int c = 0; c < kParts; ++c) running.out[c] += weight * value[u][c];
  }
}

struct Shared {
  float raw[kHeadDimMost], q[kHeadDimMost];
  float most[kWarps], total[kWarps];
  float out[kWarps][kHeadDimMost];
};

// One query head of one token, by the whole block.
template <int kParts>
__device__ void attend(const Attention& op, const Memory& memory, int head, int token,
                       int position, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = op.head_dim;
  rotate(op, at(op.q, token) + int64_t(head) * d, norm_of(op, op.q_norm, head), position,
         shared.raw, shared.q);
  float q[kParts];
#pragma unroll
  for (int c = 0; c < kParts; ++c) q[c] = lane + 32 * c < d ? shared.q[lane + 32 * c] : 0.0f;

  const int begin = op.window > 0 ? max(0, position - op.window + 1) : 0;
  Now now{head};
  if (op.forgets) {
    const float* const sum = memory.gate_sum(position, head);
    now.sum = sum[0];
    now.rest = sum[memory.sum_rest()];
  }
  Running<kParts> running;
  for (int p = begin + warp * kAtOnce; p <= position; p += kWarps * kAtOnce) {
    see<kParts>(op, memory, q, now, p, min(kAtOnce, position + 1 - p), running);
  }
  if (lane == 0) {
    shared.most[warp] = running.most;
    shared.total[warp] = running.total;
  }
#pragma unroll
  for (int c = 0; c < kParts; ++c) {
    if (lane + 32 * c < d) shared.out[warp][lane + 32 * c] = running.out[c];
  }
  __syncthreads();  // every warp's part is there
  float most = -INFINITY, total = 0;
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared.most[w]);
  for (int w = 0; w < kWarps; ++w) total += shared.total[w] * expf(shared.most[w] - most);
  for (int i = threadIdx.x; i < d; i += kThreads) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += shared.out[w][i] * expf(shared.most[w] - most);
    at(op.out, token)[int64_t(head) * d + i] = sum / total;
  }
  __syncthreads();  // the parts have been read
}

// Pages, first pass: the step's own keys and values. One block per (token, kv head).
__global__ __launch_bounds__(kThreads) void append_kernel(const __grid_constant__ Attention op) {
  let_successor_start();
  wait_for_predecessor();
  __shared__ float raw[kHeadDimMost];
  const int token = blockIdx.x, row = row_of(op.rows, token);
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || token >= op.rows.begin[row + 1]) return;
  const Memory memory{op, row, int(blockIdx.y), slot};
  append(op, memory, token, op.rows.first[row] + token - op.rows.begin[row], raw);
}

// Pages, with a forget gate: the sums of log gates of the step's own tokens, one after the other.
// One block a row, one thread a query head.
__global__ __launch_bounds__(kThreads) void gates_kernel(const __grid_constant__ Attention op) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.x, begin = op.rows.begin[row];
  const int count = op.rows.begin[row + 1] - begin, first = op.rows.first[row];
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || count == 0) return;
  const Memory memory{op, row, 0, slot};
  for (int head = threadIdx.x; head < op.heads; head += kThreads) {
    double total = gate_before(memory, head, first);
    for (int t = 0; t < count; ++t) {
      total = add_gate(op, memory, head, begin + t, first + t, total);
    }
  }
}

// Pages, second pass: one block per (token, query head).
template <int kParts>
__global__ __launch_bounds__(kThreads) void attend_kernel(const __grid_constant__ Attention op) {
  let_successor_start();
  wait_for_predecessor();
  __shared__ Shared shared;
  const int token = blockIdx.x, head = blockIdx.y, row = row_of(op.rows, token);
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || token >= op.rows.begin[row + 1]) return;
  const Memory memory{op, row, int(int64_t(head) * op.kv_heads / op.heads), slot};
  attend<kParts>(op, memory, head, token, op.rows.first[row] + token - op.rows.begin[row], shared);
}

// A ring: a token's key overwrites the one that leaves its window, so a row's tokens go one after
// the other. One block per (kv head, row).
template <int kParts>
__global__ __launch_bounds__(kThreads) void ring_kernel(const __grid_constant__ Attention op) {
  let_successor_start();
  wait_for_predecessor();
  __shared__ Shared shared;
  const int row = blockIdx.y, kv_head = blockIdx.x, group = op.heads / op.kv_heads;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding) return;
  const Memory memory{op, row, kv_head, slot};
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  for (int t = 0; t < count; ++t) {
    const int position = op.rows.first[row] + t;
    append(op, memory, begin + t, position, shared.raw);
    for (int i = threadIdx.x; op.forgets && i < group; i += kThreads) {
      const int head = kv_head * group + i;
      add_gate(op, memory, head, begin + t, position, gate_before(memory, head, position));
    }
    __syncthreads();  // key, value and sums can be read
    for (int i = 0; i < group; ++i) {
      attend<kParts>(op, memory, kv_head * group + i, begin + t, position, shared);
    }
  }
}

template <int kParts>
void start(const Attention& op, Context& context) {
  const dim3 block(kThreads);
  if (op.window > 0) {
    launch(context, {.grid = dim3(op.kv_heads, op.rows.count), .block = block},
           ring_kernel<kParts>, op);
    return;
  }
  launch(context, {.grid = dim3(op.rows.tokens, op.kv_heads), .block = block}, append_kernel, op);
  if (op.forgets) {
    launch(context, {.grid = dim3(op.rows.count), .block = block}, gates_kernel, op);
  }
  launch(context, {.grid = dim3(op.rows.tokens, op.heads), .block = block}, attend_kernel<kParts>,
         op);
}

}  // namespace

const char* refusal(const Attention& op) {
  return op.head_dim <= kHeadDimMost ? nullptr : "attention of heads with more than 256 numbers";
}

void run(const Attention& op, Context& context) {
  if (op.rows.count == 0 || op.rows.tokens == 0) return;
  WEIR_CHECK(op.heads % op.kv_heads == 0);
  WEIR_CHECK(refusal(op) == nullptr);
  WEIR_CHECK(op.rope_theta <= 0 || op.head_dim % 2 == 0);
  WEIR_CHECK(op.rows.count <= 65535);
  if (served(op, context)) {
    const bool chunks = op.rows.tokens > op.rows.count;
    if (!chunks) {
      const int dim = op.heads * op.head_dim;
      const SplitVectors split = leave_split(op.out, dim, op.rows.tokens, context);
      return run_steps(op, INT_MAX, split, context);
    }
    if (run_chunks(op, context)) {
      if (op.rows.count > 1) run_steps(op, 1, {}, context);
      return;
    }
  }
  if (op.head_dim <= 32) return start<1>(op, context);
  if (op.head_dim <= 64) return start<2>(op, context);
  if (op.head_dim <= 128) return start<4>(op, context);
  start<8>(op, context);
}

}  // namespace weir::cuda
