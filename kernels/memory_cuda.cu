#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMemoriesMost = 256;  // as many as route_kernel counts in shared memory

// The row of a token; -1: of none that a sequence fills.
__device__ int filled_row_of(const Rows& rows, int token) {
  if (rows.count == 0) return -1;
  const int row = row_of(rows, token);
  const bool filled = rows.slot[row] != kPadding && token >= rows.begin[row] &&
                      token < rows.begin[row + 1];
  return filled ? row : -1;
}

// One token's memories in order of falling logits, the earlier of equals first, and their weights.
__device__ void choose(const MemoryRoute& op, int token, int32_t* memory) {
  const float* const logits = at(op.logits, token);
  float* const weight = at(op.weight, token);
  const bool filled = filled_row_of(op.rows, token) >= 0;
  double total = 0;
  for (int c = 0; c < op.chosen; ++c) {
    int best = -1;
    for (int m = 0; m < op.memories; ++m) {
      bool taken = false;
      for (int before = 0; before < c; ++before) taken |= memory[before] == m;
      if (!taken && (best < 0 || logits[m] > logits[best])) best = m;
    }
    memory[c] = best;
    total += exp(double(logits[best]) - double(logits[memory[0]]));
  }
  for (int c = 0; c < op.chosen; ++c) {
    const double share = exp(double(logits[memory[c]]) - double(logits[memory[0]])) / total;
    weight[c] = filled ? float(share) : 0.0f;
    if (!filled) memory[c] = -1;
    op.pair[int64_t(token) * op.chosen + c] = 0;
  }
}

// Lists one memory's pairs from `next` on, row by row in the order of tokens; by one warp.
__device__ void list_pairs(const MemoryRoute& op, int memory, const int32_t* chosen_memory,
                           int next) {
  const int lane = threadIdx.x % 32;
  int32_t* const begin = op.row_begin + int64_t(memory) * (op.rows.count + 1);
  for (int row = 0; row < op.rows.count; ++row) {
    const int64_t first = int64_t(op.rows.begin[row]) * op.chosen;
    const int64_t end = int64_t(op.rows.begin[row + 1]) * op.chosen;
    const int row_begin = next;
    for (int64_t i = first; i < end; i += 32) {
      const bool mine = i + lane < end && chosen_memory[i + lane] == memory;
      const unsigned all = __ballot_sync(0xffffffffu, mine);
      if (mine) {
        const int pair = next + __popc(all & ((1u << lane) - 1));
        op.pair[i + lane] = pair;
        op.token[pair] = int32_t((i + lane) / op.chosen);
      }
      next += __popc(all);
    }
    if (lane != 0) continue;
    begin[row] = row_begin;
    int32_t before = 0;
    if (op.rows.slot[row] != kPadding && first < end) {
      auto* const seen = reinterpret_cast<int32_t*>(at(op.seen, op.rows.slot[row])) + memory;
      before = op.rows.first[row] == 0 ? 0 : *seen;
      *seen = before + next - row_begin;
    }
    op.row_first[int64_t(memory) * op.rows.count + row] = before;
  }
  if (lane == 0) begin[op.rows.count] = next;
}

// One block: choices by thread, then a warp a memory for the lists. `chosen_memory` is scratch,
// [tokens, chosen].
__global__ __launch_bounds__(kThreads) void route_kernel(const __grid_constant__ MemoryRoute op,
                                                         int32_t* chosen_memory) {
  wait_for_predecessor();
  let_successor_start();
  __shared__ int32_t counts[kMemoriesMost + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pairs = op.rows.tokens * op.chosen;
  for (int t = threadIdx.x; t < op.rows.tokens; t += kThreads) {
    choose(op, t, chosen_memory + int64_t(t) * op.chosen);
  }
  for (int i = threadIdx.x; i < pairs; i += kThreads) op.token[i] = 0;
  __syncthreads();  // all choices are there
  for (int m = warp; m < op.memories; m += kWarps) {
    int count = 0;
    for (int i = lane; i < pairs; i += 32) count += chosen_memory[i] == m;
    count = __reduce_add_sync(0xffffffffu, count);
    if (lane == 0) counts[m] = count;
  }
  __syncthreads();  // all counts are there
  if (threadIdx.x == 0) {
    int next = 0;
    for (int m = 0; m <= op.memories; ++m) {
      const int count = m < op.memories ? counts[m] : 0;
      counts[m] = op.memory_begin[m] = next;
      next += count;
    }
  }
  __syncthreads();  // counts are now where each memory begins
  for (int m = warp; m < op.memories; m += kWarps) list_pairs(op, m, chosen_memory, counts[m]);
}

__global__ __launch_bounds__(kThreads) void merge_kernel(const __grid_constant__ MemoryMerge op) {
  let_successor_start();
  wait_for_predecessor();
  const int64_t token = blockIdx.x;
  const float* const weight = at(op.weight, token);
  for (int i = threadIdx.x; i < op.dim; i += kThreads) {
    float sum = op.shared.data == nullptr ? 0.0f : at(op.shared, token)[i];
    for (int c = 0; c < op.chosen; ++c) {
      sum += weight[c] * at(op.answers, op.pair[token * op.chosen + c])[i];
    }
    at(op.out, token)[i] = sum;
  }
}

__device__ inline float widen(const Matrix& part, int64_t i) {
  switch (part.dtype) {
    case DType::F32: return static_cast<const float*>(part.data)[i];
    case DType::BF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(part.data)[i]);
    case DType::F16: return __half2float(static_cast<const __half*>(part.data)[i]);
  }
  return 0;
}

// A Linear of a range of tokens that the device alone knows: one warp a row, eight tokens at a
// time, lanes along the columns. Blocks beyond the range leave at once.
constexpr int kTokensAtOnce = 8;

__global__ __launch_bounds__(kThreads) void linear_range_kernel(const __grid_constant__ Linear op) {
  let_successor_start();
  wait_for_predecessor();
  const int first = op.range[0] + int(blockIdx.y) * kTokensAtOnce, lane = threadIdx.x % 32;
  const int count = min(kTokensAtOnce, op.range[1] - first);
  if (count <= 0) return;
  int row = int(blockIdx.x) * kWarps + threadIdx.x / 32, p = 0;
  const int whole_row = row;
  while (p < op.parts && row >= op.part[p].rows) row -= op.part[p++].rows;
  if (p == op.parts) return;
  const int64_t begin = int64_t(row) * op.in;
  float sum[kTokensAtOnce] = {};
  for (int i = lane; i < op.in; i += 32) {
    const float w = widen(op.part[p], begin + i);
#pragma unroll
    for (int j = 0; j < kTokensAtOnce; ++j) {
      if (j < count) sum[j] += w * at(op.x, first + j)[i];
    }
  }
#pragma unroll
  for (int j = 0; j < kTokensAtOnce; ++j) {
    float all = sum_over_lanes(sum[j]);
    if (lane != 0 || j >= count) continue;
    if (op.bias[p] != nullptr) all += op.bias[p][row];
    float* const y = at(op.y, first + j) + whole_row;
    *y = op.accumulate ? *y + all : all;
  }
}

}  // namespace

void run(const MemoryRoute& op, Context& context) {
  if (op.rows.tokens == 0) return;
  WEIR_CHECK(op.chosen > 0 && op.chosen <= op.memories && op.memories <= kMemoriesMost);
  const size_t bytes = size_t(op.rows.tokens) * size_t(op.chosen) * sizeof(int32_t);
  WEIR_CHECK(bytes <= context.half_bytes);
  launch(context, {.grid = dim3(1), .block = dim3(kThreads)}, route_kernel, op,
         static_cast<int32_t*>(context.scratch));
}

void run(const MemoryMerge& op, Context& context) {
  if (op.tokens == 0) return;
  launch(context, {.grid = dim3(op.tokens), .block = dim3(kThreads)}, merge_kernel, op);
}

void run_range(const Linear& op, Context& context) {
  int rows = 0;
  for (int p = 0; p < op.parts; ++p) rows += op.part[size_t(p)].rows;
  const dim3 grid((rows + kWarps - 1) / kWarps, (op.tokens + kTokensAtOnce - 1) / kTokensAtOnce);
  launch(context, {.grid = grid, .block = dim3(kThreads)}, linear_range_kernel, op);
}

}  // namespace weir::cuda
