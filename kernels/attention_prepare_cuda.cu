#include <algorithm>

#include "kernels/attention_chunk_cuda.cuh"

// What comes before and after the scores of many tokens. Floor: keys and values read and written.
namespace weir::cuda::attention {
namespace {

constexpr int kThreads = 256;
constexpr int kPrepared = 16;  // tokens of a block that prepares

// Each token's row, -1 for one that is not served here, and its position.
struct Places {
  int row[kPrepared], position[kPrepared];
};

// Where a token's key goes; its value too, `values_after` floats on, unless that is 0.
template <int kDim>
__device__ inline float* key_place(const ChunkJob& job, const Places& places, int token, int head,
                                   int64_t* values_after) {
  const Attention& op = job.op;
  *values_after = 0;
  const int local = token - blockIdx.x * kPrepared;
  if (op.window > 0) {
    return job.new_keys + (int64_t(token) * job.kv_count + head - job.kv_first) * kDim;
  }
  const Memory memory{op, places.row[local], head, 0};
  *values_after = memory.values_after();
  return memory.key(places.position[local]);
}

template <int kDim>
__device__ void keep_keys(const ChunkJob& job, const Places& places, const float* angles) {
  constexpr int kLanes = kDim / 4, kAtOnce = kThreads / kLanes, kUnroll = 4;
  const Attention& op = job.op;
  const int column = 4 * (threadIdx.x % kLanes), items = kPrepared * job.kv_count;
  for (int base = threadIdx.x / kLanes; base < items; base += kUnroll * kAtOnce) {
    float4 key[kUnroll], value[kUnroll];
    int head[kUnroll], token[kUnroll];
    bool exists[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int item = min(base + u * kAtOnce, items - 1), local = item / job.kv_count;
      exists[u] = base + u * kAtOnce < items && places.row[local] >= 0;
      token[u] = blockIdx.x * kPrepared + local;
      head[u] = job.kv_first + item % job.kv_count;
      const int64_t from = int64_t(head[u]) * kDim + column;
      const int readable = min(token[u], op.rows.tokens - 1);
      key[u] = load_four(at(op.k, readable) + from);
      value[u] = op.window > 0 ? float4{} : load_four(at(op.v, readable) + from);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int local = token[u] - blockIdx.x * kPrepared;
      const float* const norm = norm_of(op, op.k_norm, head[u]);
      const float* const turn = op.rope_theta > 0 ? angles + local * kDim : nullptr;
      const float4 ready =
          rotated<kLanes>(normed<kLanes>(key[u], norm, column, op.norm_eps), turn, column);
      if (!exists[u]) continue;
      int64_t values_after;
      float* const to = key_place<kDim>(job, places, token[u], head[u], &values_after) + column;
      store_four(to, ready);
      if (values_after > 0) store_four(to + values_after, value[u]);
    }
  }
}

// One block for kPrepared tokens.
template <int kDim>
__global__ __launch_bounds__(kThreads) void prepare_kernel(const __grid_constant__ ChunkJob job) {
  __shared__ Places places;
  __shared__ alignas(16) float angles[kPrepared * kDim];
  let_successor_start();
  const Attention& op = job.op;
  const int first = blockIdx.x * kPrepared;
  if (threadIdx.x < kPrepared) {
    const int token = first + threadIdx.x;
    const int row = row_of(op.rows, min(token, op.rows.tokens - 1));
    const bool exists = token < op.rows.begin[row + 1] && chunked(op.rows, row);
    places.row[threadIdx.x] = exists ? row : -1;
    places.position[threadIdx.x] = op.rows.first[row] + token - op.rows.begin[row];
  }
  __syncthreads();  // every token's place is known
  if (op.rope_theta > 0) {
    const int pair = threadIdx.x % (kDim / 2);
    const double turns = turns_of<kDim>(pair, job.log_theta);
    for (int local = threadIdx.x / (kDim / 2); local < kPrepared; local += 2 * kThreads / kDim) {
      float* const to = angles + local * kDim + pair;
      cosine_and_sine(places.position[local], turns, to, to + kDim / 2);
    }
  }
  wait_for_predecessor();
  __syncthreads();  // the angles are there
  for (int i = 4 * threadIdx.x; op.rope_theta > 0 && i < kPrepared * kDim; i += 4 * kThreads) {
    if (first + i / kDim < op.rows.tokens) {
      store_four(job.angles + int64_t(first) * kDim + i, load_four(angles + i));
    }
  }
  keep_keys<kDim>(job, places, angles);
}

// The sums of log forget gates of the step's tokens. One block for each (query head, row).
__global__ __launch_bounds__(kThreads) void gates_kernel(const __grid_constant__ ChunkJob job) {
  __shared__ double sums[kThreads / 32];
  let_successor_start();
  wait_for_predecessor();
  const Attention& op = job.op;
  const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (!chunked(op.rows, row)) return;
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  const int first = op.rows.first[row];
  const Memory memory{op, row, 0, op.rows.slot[row]};
  double before = gate_before(memory, head, first);
  for (int base = 0; base < count; base += kThreads) {
    const int t = base + threadIdx.x;
    double sum = t < count ? log_gate(op, head, begin + t) : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double earlier = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += earlier;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();  // every warp's sum is there
    double all = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w == warp) sum += all;
      all += sums[w];
    }
    if (t < count) keep_gate(memory, head, first + t, before + sum);
    before += all;
    __syncthreads();  // the sums have been read
  }
}

// With a window: the last keys and values of each row into its ring. One block for each (token that
// may be one of them, row).
__global__ __launch_bounds__(kThreads) void ring_kernel(const __grid_constant__ ChunkJob job) {
  let_successor_start();
  wait_for_predecessor();
  const Attention& op = job.op;
  const int row = blockIdx.y;
  if (!chunked(op.rows, row)) return;
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  const int fours = op.head_dim / 4;
  for (int t = max(0, count - op.window) + blockIdx.x; t < count; t += gridDim.x) {
    const int64_t token = begin + t;
    for (int i = threadIdx.x; i < job.kv_count * fours; i += kThreads) {
      const int head = job.kv_first + i / fours, column = 4 * (i % fours);
      const Memory memory{op, row, head, op.rows.slot[row]};
      float* const key = memory.key(op.rows.first[row] + t) + column;
      store_four(key, load_four(job.new_keys + token * job.kv_count * op.head_dim + 4 * i));
      store_four(key + memory.values_after(),
                 load_four(at(op.v, token) + int64_t(head) * op.head_dim + column));
    }
  }
}

}  // namespace

void prepare(const ChunkJob& job, Context& context) {
  const Attention& op = job.op;
  launch(context,
         {.grid = dim3((op.rows.tokens + kPrepared - 1) / kPrepared), .block = dim3(kThreads)},
         op.head_dim == 64 ? prepare_kernel<64> : prepare_kernel<128>, job);
  if (!op.forgets) return;
  launch(context, {.grid = dim3(op.heads, op.rows.count), .block = dim3(kThreads)}, gates_kernel,
         job);
}

void keep_window(const ChunkJob& job, Context& context) {
  const Attention& op = job.op;
  const int blocks = std::min({op.window, op.rows.tokens, 4 * context.multiprocessors});
  launch(context, {.grid = dim3(blocks, op.rows.count), .block = dim3(kThreads)}, ring_kernel,
         job);
}

}  // namespace weir::cuda::attention
