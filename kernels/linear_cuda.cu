#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <utility>

#include "kernels/async_cuda.cuh"
#include "kernels/linear_cuda.cuh"
#include "kernels/resident_cuda.cuh"

namespace weir::cuda {
namespace {

// y = W x on the tensor cores for a few tokens: the weights are read once, straight into the
// fragments of the thread that multiplies them.
//
// A block computes kRows rows for kTile * 8 tokens; its eight warps share the columns in turn, 32
// at a time, and blocks of a cluster share them in longer runs. x is split into two bf16 numbers,
// high + low, so that a product keeps 16 bits of x; sums are float32, in an order that depends on
// the matrix alone.
//
// Columns are permuted inside a run of 32, the same way for W and x: a thread's fragments are eight
// neighbouring columns, one 16-byte load.
//
// Floor: the weights read once.
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 64, kPieces = kRows / 8;  // 16-byte pieces of one thread and run
constexpr int kRun = 32;                        // columns
constexpr int kStages = 3;                      // runs in flight
constexpr int kClusterMost = 8;
constexpr size_t kRingBytes = size_t(kStages) * kPieces * kThreads * 16;

__device__ inline void copy_async(void* shared, const void* global, bool valid) {
  const auto target = uint32_t(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;  // the rest is zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global),
               "r"(bytes)
               : "memory");
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                uint32_t a3, uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// high + low = x to 16 bits, or high alone, each [tokens, in] without gaps.
__global__ __launch_bounds__(kThreads) void split_kernel(Acts x, int in, int tokens,
                                                         SplitVectors to) {
  let_successor_start();
  wait_for_predecessor();
  const int i = (blockIdx.x * kThreads + threadIdx.x) * 4;
  if (i >= in) return;
  for (int token = blockIdx.y; token < tokens; token += gridDim.y) {
    store_split(to, int64_t(token) * in + i, *reinterpret_cast<const float4*>(at(x, token) + i));
  }
}

// Where a row of the stacked bf16 matrices begins.
__device__ inline const char* matrix_row(const Linear& op, int row) {
  for (int p = 0; p < op.parts; ++p) {
    if (row < op.part[p].rows) {
      return static_cast<const char*>(op.part[p].data) + int64_t(row) * op.in * 2;
    }
    row -= op.part[p].rows;
  }
  return nullptr;
}
__device__ inline float bias_of(const Linear& op, int row) {
  for (int p = 0; p < op.parts; ++p) {
    if (row < op.part[p].rows) return op.bias[p] != nullptr ? op.bias[p][row] : 0.0f;
    row -= op.part[p].rows;
  }
  return 0;
}
__device__ inline int rows_of(const Linear& op) {
  int rows = 0;
  for (int p = 0; p < op.parts; ++p) rows += op.part[p].rows;
  return rows;
}

__device__ inline void store(const Linear& op, int row, int token, float value) {
  float* y = at(op.y, token) + row;
  value += bias_of(op, row);
  *y = op.accumulate ? *y + value : value;
}

// The fragments of x for one run of columns: eight neighbouring columns of one token in each tile.
template <int kTile>
struct Columns {
  uint4 high[kTile], low[kTile];

  // From x itself: for so few tokens that reading it costs nothing.
  __device__ void load(const Linear& op, int first_token, int column) {
    const int token = first_token + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      const bool valid = token + j * 8 < op.tokens && column < op.in;
      const auto* from = reinterpret_cast<const float4*>(at(op.x, token + j * 8) + column);
      const float4 a = valid ? from[0] : float4{0, 0, 0, 0};
      const float4 b = valid ? from[1] : float4{0, 0, 0, 0};
      split(a.x, a.y, high[j].x, low[j].x);
      split(a.z, a.w, high[j].y, low[j].y);
      split(b.x, b.y, high[j].z, low[j].z);
      split(b.z, b.w, high[j].w, low[j].w);
    }
  }
  // From what split_kernel() has made of it.
  __device__ void load(const Linear& op, const SplitVectors& x, int first_token, int column) {
    const int token = first_token + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      const bool valid = token + j * 8 < op.tokens && column < op.in;
      const int64_t at = int64_t(token + j * 8) * op.in + column;
      high[j] = valid ? *reinterpret_cast<const uint4*>(x.high + at) : uint4{0, 0, 0, 0};
      low[j] = valid && x.low != nullptr ? *reinterpret_cast<const uint4*>(x.low + at)
                                         : uint4{0, 0, 0, 0};
    }
  }
};

// Adds one run: ring[i * kThreads] is row 8 i + lane / 4 of the block, eight columns. Products that
// follow one another belong to different sums: a product waits some 30 cycles for its sum's last.
template <int kTile>
__device__ inline void add_run(float (&sum)[kRows / 16][kTile][4], const uint4* ring,
                               const Columns<kTile>& x) {
  constexpr int kAtOnce = kTile >= 4 ? 1 : kRows / 16;  // tiles of 16 rows
#pragma unroll
  for (int first = 0; first < kRows / 16; first += kAtOnce) {
    uint4 top[kAtOnce], bottom[kAtOnce];
#pragma unroll
    for (int m = 0; m < kAtOnce; ++m) {
      top[m] = ring[2 * (first + m) * kThreads];
      bottom[m] = ring[(2 * (first + m) + 1) * kThreads];
    }
    const auto all = [&](const auto& product) {
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
#pragma unroll
        for (int j = 0; j < kTile; ++j) product(sum[first + m][j], top[m], bottom[m], j);
      }
    };
    all([&](float(&to)[4], const uint4& t, const uint4& b, int j) {
      multiply(to, t.x, b.x, t.y, b.y, x.low[j].x, x.low[j].y);
    });
    all([&](float(&to)[4], const uint4& t, const uint4& b, int j) {
      multiply(to, t.z, b.z, t.w, b.w, x.low[j].z, x.low[j].w);
    });
    all([&](float(&to)[4], const uint4& t, const uint4& b, int j) {
      multiply(to, t.x, b.x, t.y, b.y, x.high[j].x, x.high[j].y);
    });
    all([&](float(&to)[4], const uint4& t, const uint4& b, int j) {
      multiply(to, t.z, b.z, t.w, b.w, x.high[j].z, x.high[j].w);
    });
  }
}

// The block's sums, added over its warps, in `total` [kRows][kTile * 8 + 1]. `shared` holds
// the partial sums of at most four tiles of tokens at a time.
template <int kTile>
__device__ inline void add_warps(const float (&sum)[kRows / 16][kTile][4], float* shared,
                                 float* total) {
  constexpr int kAtOnce = kTile < 4 ? kTile : 4, kWide = kAtOnce * 8, kStride = kWide + 8;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int first = 0; first < kTile; first += kAtOnce) {
    __syncthreads();  // the ring, or the sums before, have been read
#pragma unroll
    for (int m = 0; m < kRows / 16; ++m) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float* to = shared + (warp * kRows + m * 16 + g) * kStride + j * 8 + 2 * t;
        const float(&s)[4] = sum[m][first + j];
        *reinterpret_cast<float2*>(to) = {s[0], s[1]};
        *reinterpret_cast<float2*>(to + 8 * kStride) = {s[2], s[3]};
      }
    }
    __syncthreads();  // every warp's sums are there
    for (int i = threadIdx.x; i < kRows * kWide; i += kThreads) {
      const int row = i / kWide, column = i % kWide;
      float all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all += shared[(w * kRows + row) * kStride + column];
      total[row * (kTile * 8 + 1) + first * 8 + column] = all;
    }
  }
}

template <int kTile>
__global__ __launch_bounds__(kThreads, kTile <= 2 ? 2 : 1) void linear_kernel(
    const __grid_constant__ Linear op, SplitVectors x, int cluster) {
  extern __shared__ uint4 ring[];  // [kStages][kPieces][kThreads], then the block's sums
  let_successor_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = int(cluster_rank()), rows = rows_of(op);
  const int first_row = int(blockIdx.x) / cluster * kRows, first_token = blockIdx.y * kTile * 8;
  const int runs = (op.in + kRun - 1) / kRun, share = (runs + cluster - 1) / cluster;
  const int end = min(runs, (rank + 1) * share);

  const char* row[kPieces];
  const char* const first = matrix_row(op, first_row);
  const char* const last =
      first_row + kRows <= rows ? matrix_row(op, first_row + kRows - 1) : nullptr;
  const int64_t row_bytes = int64_t(op.in) * 2;
  const bool whole = last - first == (kRows - 1) * row_bytes;  // the block's rows lie end to end
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int r = i * 8 + lane / 4;
    row[i] = whole                  ? first + r * row_bytes
             : first_row + r < rows ? matrix_row(op, first_row + r)
                                    : nullptr;
  }
  const auto fetch = [&](int run, int stage) {
    const int column = run * kRun + lane % 4 * 8;
    const bool inside = run < end && column < op.in;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool valid = inside && row[i] != nullptr;
      copy_async(ring + (stage * kPieces + i) * kThreads + threadIdx.x,
                 valid ? row[i] + int64_t(column) * 2 : op.part[0].data, valid);
    }
    copy_commit();
  };

  int run = rank * share + warp;
#pragma unroll
  for (int s = 0; s < kStages; ++s) fetch(run + s * kWarps, s);
  wait_for_predecessor();

  // Eight tiles fill the registers: only with fewer is the next run's x loaded ahead.
  constexpr bool kAhead = kTile <= 4;
  const auto load = [&](Columns<kTile>& columns, int r) {
    const int column = r < end ? r * kRun + lane % 4 * 8 : op.in;
    if constexpr (kTile == 1) {
      columns.load(op, first_token, column);
    } else {
      columns.load(op, x, first_token, column);
    }
  };
  float sum[kRows / 16][kTile][4] = {};
  Columns<kTile> columns;
  load(columns, run);
  for (int stage = 0; run < end; run += kWarps, stage = (stage + 1) % kStages) {
    Columns<kTile> next;
    if constexpr (kAhead) load(next, run + kWarps);
    copy_wait<kStages - 1>();  // a thread reads only what it has fetched itself: no barrier
    add_run<kTile>(sum, ring + stage * kPieces * kThreads + threadIdx.x, columns);
    fetch(run + kStages * kWarps, stage);
    if constexpr (kAhead) {
      columns = next;
    } else {
      load(columns, run + kWarps);
    }
  }
  copy_wait<0>();
  float* total = reinterpret_cast<float*>(ring + kStages * kPieces * kThreads);
  add_warps<kTile>(sum, reinterpret_cast<float*>(ring), total);

  if (cluster > 1) {
    cluster_barrier();  // every block's sums are there
  } else {
    __syncthreads();  // the block's sums are there
  }
  const int own = kRows / cluster;  // rows that this block of the cluster adds up
  for (int i = threadIdx.x; i < own * kTile * 8; i += kThreads) {
    const int r = rank * own + i % own, token = first_token + i / own;
    const float* mine = total + r * (kTile * 8 + 1) + i / own;
    float part[kClusterMost], all = 0;
#pragma unroll
    for (int c = 0; c < kClusterMost; ++c) part[c] = c < cluster ? read_peer(mine, c) : 0.0f;
#pragma unroll
    for (int c = 0; c < kClusterMost; ++c) all += part[c];
    if (token < op.tokens && first_row + r < rows) store(op, first_row + r, token, all);
  }
  if (cluster > 1) cluster_barrier();  // no block leaves while its sums are being read
}

// How many blocks share the columns. Not a function of the tokens: a sum's order must not be.
int cluster_size(const Context& context, int rows, int in) {
  if (context.compute < 90) return 1;
  const int tiles = (rows + kRows - 1) / kRows, runs = (in + kRun - 1) / kRun;
  // One block for each multiprocessor: two blocks' sums are slow to meet when not all run at once.
  int cluster = 1;
  while (cluster < kClusterMost && 10 * tiles * cluster < 9 * context.multiprocessors &&
         runs >= 2 * cluster * kWarps) {
    cluster *= 2;
  }
  return cluster;
}

template <int kTile>
void start(const Linear& op, int rows, const SplitVectors& x, Context& context) {
  const int cluster = cluster_size(context, rows, op.in);
  const size_t shared = kRingBytes + size_t(kRows) * (kTile * 8 + 1) * sizeof(float);
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(linear_kernel<kTile>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  launch(context,
         {.grid = dim3((rows + kRows - 1) / kRows * cluster,
                       (op.tokens + kTile * 8 - 1) / (kTile * 8)),
          .block = dim3(kThreads),
          .shared = shared,
          .cluster = cluster},
         linear_kernel<kTile>, op, x, cluster);
}

// Any dtype, size and alignment: one warp a row, eight tokens at a time, lanes along the columns.
constexpr int kTokensAtOnce = 8;

__global__ __launch_bounds__(kThreads) void linear_any_kernel(const __grid_constant__ Linear op) {
  let_successor_start();
  wait_for_predecessor();
  const int rows = rows_of(op), lane = threadIdx.x % 32;
  int row = int(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int whole_row = row;
  int p = 0;
  while (row >= op.part[p].rows) row -= op.part[p++].rows;
  const Matrix& part = op.part[p];
  const int64_t begin = int64_t(row) * op.in;
  const int first = blockIdx.y * kTokensAtOnce;
  const int count = min(kTokensAtOnce, op.tokens - first);
  float sum[kTokensAtOnce] = {};
  for (int i = lane; i < op.in; i += 32) {
    float w = 0;
    switch (part.dtype) {
      case DType::F32: w = static_cast<const float*>(part.data)[begin + i]; break;
      case DType::BF16:
        w = __bfloat162float(static_cast<const __nv_bfloat16*>(part.data)[begin + i]);
        break;
      case DType::F16: w = __half2float(static_cast<const __half*>(part.data)[begin + i]); break;
    }
#pragma unroll
    for (int j = 0; j < kTokensAtOnce; ++j) {
      if (j < count) sum[j] += w * at(op.x, first + j)[i];
    }
  }
#pragma unroll
  for (int j = 0; j < kTokensAtOnce; ++j) {
    const float all = sum_over_lanes(sum[j]);
    if (lane == 0 && j < count) store(op, whole_row, first + j, all);
  }
}

bool fits_tensor_cores(const Linear& op) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (op.in % 8 != 0 || !aligned(op.x.data) || op.x.stride % 4 != 0) return false;
  return std::all_of(op.part.begin(), op.part.begin() + op.parts, [&](const Matrix& part) {
    return part.dtype == DType::BF16 && aligned(part.data);
  });
}

// How many tokens' split vectors a half of the scratch holds; a multiple of 8.
int most_split(int in, const Context& context) {
  const size_t each = size_t(in) * (context.keep_low ? 4 : 2);
  return int(std::min((context.half_bytes - kSquaresBytes) / each / 8 * 8, size_t(1) << 30));
}

// Where the split vectors lie.
SplitVectors place_of(const Split& split, const Context& context) {
  auto* high = reinterpret_cast<__nv_bfloat16*>(static_cast<char*>(context.scratch) +
                                                split.half * context.half_bytes);
  const int64_t padded = (int64_t(split.tokens) + 7) / 8 * 8;
  return {high, context.keep_low ? high + padded * split.in : nullptr};
}

bool has_hopper(const Context& context) { return context.hopper.encode_map != nullptr; }
bool fits_hopper(const Linear& op, const Context& context) {
  return has_hopper(context) && op.tokens > 0 && op.tokens <= kHopperTokens &&
         op.range == nullptr && fits_tensor_cores(op);
}

bool fits_large(const Linear& op, const Context& context) {
  return op.tokens >= kLargeTokens && context.products != nullptr && op.range == nullptr &&
         fits_tensor_cores(op);
}

// Whether the kernel of whole steps may run the next op, which reads float32.
bool resident_may_follow(int tokens, const Context& context) {
  return context.meeting != nullptr && tokens <= resident::kTokensMost;
}

bool same(const Acts& a, const Acts& b) { return a.data == b.data && a.stride == b.stride; }

// Whether gate's halves are just what op computes.
bool fits(const Linear& op, const Swiglu& gate) {
  return op.parts == 2 && op.part[0].rows == gate.dim && op.part[1].rows == gate.dim &&
         op.bias[0] == nullptr && op.bias[1] == nullptr && !op.accumulate &&
         op.tokens == gate.tokens && same(gate.gate, op.y) &&
         same(gate.up, op.y.from(gate.dim)) && gate.read_once && gate.dim % 8 == 0 &&
         by_fours(gate.out);
}
// Whether op and gate are done by run_large_gated(): where that rounds what passes between them,
// vectors are rounded anyway.
bool may_be_gated(const Linear& op, const Swiglu& gate, const Context& context) {
  return fits_large(op, context) && is_one_matrix(op) && by_fours(op.y) &&
         op.tokens <= most_split(op.in, context) &&
         next_reads_split(gate.out, gate.dim, gate.tokens, context) &&
         (!context.keep_low || suits_prompt(total_rows(op), op.in, op.tokens, context));
}
// Whether norm's input is just what op computes, and its output just what reader reads.
bool fits(const Linear& op, const RmsNorm& norm, const Linear& reader) {
  return op.parts == 1 && op.bias[0] == nullptr && op.part[0].rows == norm.dim &&
         reader.in == norm.dim && op.tokens == norm.tokens && reader.tokens == norm.tokens &&
         same(norm.in, op.y) && same(norm.out, reader.x) && norm.read_once &&
         norm.dim % 8 == 0 && by_fours(op.y) &&
         reinterpret_cast<uintptr_t>(norm.weight) % 16 == 0;
}

}  // namespace

SplitVectors leave_split(const Acts& out, int dim, int tokens, Context& context) {
  if (dim % 8 != 0 || tokens > most_split(dim, context)) return {};
  context.next_split = {out.data, out.stride, dim, tokens, 1 - context.split.half};
  return place_of(context.next_split, context);
}

bool next_reads_split(const Acts& out, int dim, int tokens, const Context& context) {
  const Linear* const next = context.next;
  return next != nullptr && next->x.data == out.data && next->x.stride == out.stride &&
         next->in == dim && next->tokens == tokens && next->range == nullptr &&
         tokens <= most_split(dim, context) && fits_tensor_cores(*next) &&
         !resident_may_follow(tokens, context) &&
         (has_hopper(context) || (context.compute >= 80 && tokens > 8));
}

SplitVectors split(const Acts& x, int in, int tokens, Context& context) {
  const Split wanted{x.data, x.stride, in, tokens, context.split.half};
  const bool there = context.split.same_vectors(wanted);
  if (!there) context.split = wanted;
  context.next_split = context.split;  // also for another Linear of the same x
  const SplitVectors place = place_of(wanted, context);
  if (there) return place;
  const dim3 grid((in / 4 + kThreads - 1) / kThreads, std::min(tokens, 65535));
  launch(context, {.grid = grid, .block = dim3(kThreads)}, split_kernel, x, in, tokens, place);
  return place;
}

int total_rows(const Linear& op) {
  int rows = 0;
  for (int p = 0; p < op.parts; ++p) rows += op.part[p].rows;
  return rows;
}

void run_small(const Linear& op, Context& context) {
  const int rows = total_rows(op);
  if (context.compute < 80 || !fits_tensor_cores(op)) {
    const dim3 grid((rows + kWarps - 1) / kWarps, (op.tokens + kTokensAtOnce - 1) / kTokensAtOnce);
    launch(context, {.grid = grid, .block = dim3(kThreads)}, linear_any_kernel, op);
    return;
  }
  if (op.tokens <= 8) return start<1>(op, rows, {}, context);
  start<2>(op, rows, split(op.x, op.in, op.tokens, context), context);
}

// At most so many tokens at a time, about as many each time.
static void run_in_turn(const Linear& op, int most, Context& context) {
  constexpr int kEven = 128;
  const int turns = (op.tokens + most - 1) / most;
  const int even = ((op.tokens + turns - 1) / turns + kEven - 1) / kEven * kEven;
  const int each = std::min(even, most);
  Linear some = op;
  for (int first = 0; first < op.tokens; first += each) {
    some.tokens = std::min(each, op.tokens - first);
    run(some, context);
    some.x.data += each * op.x.stride;
    some.y.data += each * op.y.stride;
  }
}

void run(const Linear& op, Context& context) {
  if (op.tokens == 0 || total_rows(op) == 0) return;
  if (op.range != nullptr) return run_range(op, context);
  const int most = fits_tensor_cores(op) ? most_split(op.in, context) : op.tokens;
  WEIR_CHECK(most > 0);
  if (op.tokens > most) return run_in_turn(op, most, context);
  if (fits_hopper(op, context)) {
    run_hopper(op, {}, context);
  } else if (fits_large(op, context)) {
    run_large(op, context);
  } else {
    run_small(op, context);
  }
}

size_t run_fused(std::span<const Op> ops, Context& context) {
  const auto* const op = std::get_if<Linear>(&ops[0]);
  if (op == nullptr || ops.size() < 2) return 0;
  const auto* const reader = ops.size() > 2 ? std::get_if<Linear>(&ops[2]) : nullptr;
  if (const auto* const gate = std::get_if<Swiglu>(&ops[1])) {
    if (!fits(*op, *gate)) return 0;
    const Linear* const next = std::exchange(context.next, reader);
    if (fits_hopper(*op, context)) {
      run_hopper(*op,
                 {.gate = gate,
                  .split_alone = next_reads_split(gate->out, gate->dim, gate->tokens, context)},
                 context);
      return 2;
    }
    if (!may_be_gated(*op, *gate, context)) {
      context.next = next;
      return 0;
    }
    run_large_gated(*op, *gate, context);
    return 2;
  }
  if (!fits_hopper(*op, context)) return 0;
  const auto* const norm = std::get_if<RmsNorm>(&ops[1]);
  if (norm == nullptr || reader == nullptr || !fits(*op, *norm, *reader)) return 0;
  if (!fits_hopper(*reader, context) || resident_may_follow(op->tokens, context)) return 0;
  run_hopper(*op, {.norm = norm}, context);
  return 2;
}

}  // namespace weir::cuda
