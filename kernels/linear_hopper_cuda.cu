// Linear on Hopper for up to 128 tokens: at the speed at which weights can be read.
#include <algorithm>
#include <cstring>

#include "kernels/linear_epilogue_cuda.cuh"

namespace weir::cuda {
namespace {

using namespace hopper;

// A block computes `rows` rows of the stacked matrices for all tokens; blocks of a cluster share
// the columns and add their sums up through each other's shared memory, in the order of their
// ranks. The tensor cores take the tokens as their 64 rows and the matrix rows as their columns,
// so that any multiple of eight rows is a block's share and all multiprocessors have as much to do.
//
// One warp keeps the copy engine busy: stages of 64 columns, of x (high and low bf16 planes) and of
// the matrix, go through a ring in shared memory. A warpgroup multiplies 64 tokens; the unused ones
// of them read whatever lies there, and are thrown away.
//
// The first stages of the matrix are on their way before the predecessor has finished; as the last
// ones are asked for, the successor may start and ask for its own, so that memory does not pause.
//
// A token's sum is one order of columns that depends on the matrix and on whether x has low planes:
// not on the number of tokens.
//
// A gate and its other half (SwiGLU) are done in the same kernel: a block then has as many rows of
// the one as of the other. So is half of a norm of y: its weights here; its scale, a number a token
// that is known only when all blocks are done, by the Linear after it, to what comes out of that.
//
// Floor: the weights read once.
constexpr int kColumns = 64;        // of a stage: the 128 bytes of a swizzled row
constexpr int kRowBytes = kColumns * 2;
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kGroupTokens = 64;
constexpr int kMostStages = 16;
constexpr size_t kAlign = 1024;     // of a swizzled tile

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kLate = 5;  // stages not yet asked for when the successor may start

__device__ inline Block block_of(const Job& job, int rows) {
  const Slabs& slabs = job.slabs;
  Block block;
  const int tile = int(blockIdx.x) / job.cluster;
  block.slab = 0;
  while (tile >= slabs.first_tile[block.slab + 1]) ++block.slab;
  block.first_row = (tile - slabs.first_tile[block.slab]) * rows;
  block.rows = slabs.rows[block.slab];
  block.above = slabs.first_row[block.slab];
  block.rank = int(blockIdx.x) % job.cluster;
  const int share = (job.chunks + job.cluster - 1) / job.cluster;
  block.first = min(job.chunks, block.rank * share);
  block.end = min(job.chunks, block.first + share);
  return block;
}

// A ring of stages in shared memory: x, then the matrix.
struct Ring {
  uint32_t data, full, free;  // addresses; barriers are 8 bytes apart
  uint32_t x_plane, x_bytes, stage_bytes;

  __device__ uint32_t x(int stage) const { return data + stage * stage_bytes; }
  __device__ uint32_t matrix(int stage) const { return x(stage) + x_bytes; }
};

// What the copying warp's one thread does.
struct Copies {
  const Job& job;
  const Block& block;
  const Ring& ring;

  __device__ void matrix(int chunk, int stage) const {
    barrier_expect(ring.full + 8 * stage, ring.stage_bytes);
    const int column = (block.first + chunk) * kColumns, full = ring.full + 8 * stage;
    copy_box(ring.matrix(stage), job.slabs.map[block.slab], column, block.first_row, full,
             kReadOnce);
    if (!job.gated) return;
    const uint32_t half = (ring.stage_bytes - ring.x_bytes) / 2;
    copy_box(ring.matrix(stage) + half, job.slabs.map[1], column, block.first_row, full, kReadOnce);
  }
  __device__ void x(int chunk, int stage) const {
    copy_box(ring.x(stage), job.x, (block.first + chunk) * kColumns, 0, 0, ring.full + 8 * stage,
             kReadOften);
  }
  __device__ int count() const { return block.end - block.first; }
  __device__ int ahead() const { return min(count(), job.stages); }
  __device__ int early() const { return min(ahead(), job.early); }

  // Before the other threads know of the barriers.
  template <int kGroups>
  __device__ void begin() const {
#pragma unroll 1
    for (int s = 0; s < job.stages; ++s) {
      barrier_init(ring.full + 8 * s, 1);
      barrier_init(ring.free + 8 * s, kGroups);
    }
    barrier_init_done();
#pragma unroll 1  // here and below: see store_slowly()
    for (int i = 0; i < early(); ++i) matrix(i, i);
    prefetch_map(job.x);
    if (count() <= ahead() + kLate) let_successor_start();
  }
  __device__ void finish() const {
    wait_for_predecessor();
#pragma unroll 1
    for (int i = 0; i < ahead(); ++i) {
      if (i >= early()) matrix(i, i);
      x(i, i);
    }
#pragma unroll 1
    for (int i = ahead(), stage = 0, parity = 0; i < count(); ++i) {
      barrier_wait(ring.free + 8 * stage, parity);
      matrix(i, stage);
      x(i, stage);
      if (i + 1 + kLate == count()) let_successor_start();
      if (++stage == job.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
};

// The copying warp. It has no part in what the others do with the sums, but in the cluster's
// meetings, which count every warp.
template <int kGroups>
__device__ void copy(const Job& job, const Block& block, const Ring& ring) {
  const bool first = threadIdx.x % 32 == 0;
  const Copies copies{job, block, ring};
  if (first) copies.begin<kGroups>();
  __syncthreads();  // the barriers are there
  if (first) copies.finish();
  __syncwarp();
  if (job.cluster > 1) {
    cluster_meeting();
    cluster_meeting();
  }
}

// A warpgroup's sums over the block's columns. The two forms share no loop: with a branch between
// products the compiler would let one wait for the other.
template <int kRows, bool kLow>
__device__ void add_stages(const Job& job, const Block& block, const Ring& ring, int group,
                           float (&sum)[kRows / 2]) {
  int stage = 0, parity = 0, before = 0;
  const uint32_t own = uint32_t(group) * kGroupTokens * kRowBytes;
#pragma unroll 1
  for (int i = block.first; i < block.end; ++i) {
    barrier_wait(ring.full + 8 * stage, parity);
    const uint64_t high = swizzled_rows(ring.x(stage) + own);
    const uint64_t low = swizzled_rows(ring.x(stage) + own + ring.x_plane);
    const uint64_t matrix = swizzled_rows(ring.matrix(stage));
    products_begin();
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      if constexpr (kLow) multiply<kRows>(sum, low + k * kNextColumns, matrix + k * kNextColumns);
      multiply<kRows>(sum, high + k * kNextColumns, matrix + k * kNextColumns);
    }
    products_commit();
    products_wait<1>();  // those of the stage before are done
    if (i > block.first && threadIdx.x % kGroupThreads == 0) barrier_arrive(ring.free + 8 * before);
    before = stage;
    if (++stage == job.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  products_wait<0>();
}

// A warpgroup's sums, [tokens][stride_of(kRows)].
template <int kRows>
__device__ inline void leave_sums(const Job& job, const float (&sum)[kRows / 2], float* sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = warp * 16 + half * 8 + lane / 4;
    if (token >= job.tokens) continue;
    float* to = sums + token * stride_of(kRows) + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      *reinterpret_cast<float2*>(to + 8 * j) = {sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]};
    }
  }
}

#endif  // 9.0a

// Threads of a block: its warpgroups, the copying warp, and warps that only store: as many as half
// of a multiprocessor's registers allow, or more (see start()); with two warpgroups all of them.
constexpr int registers_of(int rows) { return rows / 2 + 36; }  // of a thread, about
constexpr int most_threads(int rows, int groups) {
  if (groups == 1) return (36000 / registers_of(rows) + 31) / 32 * 32;
  return rows <= 176 ? 512 : 384;
}

template <int kRows, int kGroups>
__global__ __launch_bounds__(most_threads(kRows, kGroups), 1) void linear_kernel(
    const __grid_constant__ Job job) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kAlign) char shared[];
  __shared__ uint64_t barriers[2 * kMostStages];
  __shared__ float scale[kHopperTokens];
  Ring ring{.full = shared_address(barriers), .x_plane = uint32_t(job.padded) * kRowBytes};
  ring.data = (shared_address(shared) + kAlign - 1) / kAlign * kAlign;
  ring.free = ring.full + 8 * kMostStages;
  ring.x_bytes = ring.x_plane * job.planes;
  ring.stage_bytes = ring.x_bytes + kRows * kRowBytes;
  const Block block = block_of(job, job.gated ? kRows / 2 : kRows);
  const int warp = threadIdx.x / 32, group = warp / 4;

  if (warp == 4 * kGroups) return copy<kGroups>(job, block, ring);
  const Team team{int(threadIdx.x) - (group < kGroups ? 0 : 32), int(blockDim.x) - 32};
  __syncthreads();  // the barriers are there
  float* sums = reinterpret_cast<float*>(shared + (ring.data - shared_address(shared)));
  const Share share(job, block);
  Old old;
  if (group >= kGroups) {
    // The others store only once they have met these, so that nothing of the predecessor's is
    // overwritten early.
    wait_for_predecessor();
    constexpr int kFirst = (4 * kGroups + 1) * 32;
    load_scales(job, scale, int(threadIdx.x) - kFirst, int(blockDim.x) - kFirst);
    if (job.alone) return team.leave();
    old = Old(job, block, share, kRows / 4, team.thread);
  } else {
    if (block.first < block.end) {
      barrier_wait(ring.full, 0);  // x is there: the predecessor is done
    } else {
      wait_for_predecessor();
    }
    if (!job.alone) old = Old(job, block, share, kRows / 4, team.thread);
    float sum[kRows / 2] = {};
    if (job.planes == 2) {
      add_stages<kRows, true>(job, block, ring, group, sum);
    } else {
      add_stages<kRows, false>(job, block, ring, group, sum);
    }
    if (job.alone) {
      team.meet();  // the scales are there
      return store_alone<kRows>(job, block, scale, sum);
    }
    // Every warpgroup has read the ring: its room is free.
    asm volatile("bar.sync 1, %0;" ::"n"(kGroups * kGroupThreads) : "memory");
    leave_sums<kRows>(job, sum, sums);
  }
  if (job.cluster > 1) {
    cluster_barrier();  // every block's sums are there
  } else {
    team.meet();  // the block's sums are there
  }
  switch (job.plain ? job.cluster : 0) {
    case 0: store_slowly(job, block, team, sums, scale, kRows); break;
    case 1: store_all<kRows, 1>(job, block, team, sums, scale, old); break;
    case 2: store_all<kRows, 2>(job, block, team, sums, scale, old); break;
    default: store_all<kRows, 4>(job, block, team, sums, scale, old); break;
  }
  __syncwarp();
  if (job.cluster > 1) cluster_meeting();  // no block leaves while its sums are being read
#endif
}

// --- the host's side ---------------------------------------------------------------------------

// Of a multiprocessor's 228 KB of shared memory. 2 KB a block are taken besides.
constexpr size_t kWhole = 217 << 10, kOdd = 231 << 9, kEven = 217 << 9;
// Each of its four parts has 512 registers of a warp, and a quarter of a block's warps.
constexpr int kHalfRegisters = 256;
constexpr int kLeastStages = 5;  // that half of it must hold
// Stages of the matrix that are asked for before x can be, as x then waits for them: where a block
// has all of the shared memory, the predecessor is about to end when it starts, and with two planes
// of x there are half as many; where it has half, the predecessor still reads what it needs.
constexpr int kEarlyStages = 4, kEarlyInHalf = 3;

using Encode = decltype(&cuTensorMapEncodeTiled);

void encode(CUtensorMap& map, const void* data, int rank, const cuuint64_t* size,
            const cuuint64_t* stride, const cuuint32_t* box, const Context& context) {
  const cuuint32_t step[3] = {1, 1, 1};
  const CUresult result = reinterpret_cast<Encode>(context.hopper.encode_map)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, cuuint32_t(rank), const_cast<void*>(data), size,
      stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  WEIR_CHECK(result == CUDA_SUCCESS);
}

// How a Linear is shared out. Not a function of the tokens: a sum's order must not be.
struct Tiling {
  int rows = 0, cluster = 1, tiles = 0;
};

constexpr int kTileRows[] = {32, 64, 72, 96, 104, 128, 144, 176, 208, 248};
constexpr int kMostBlocks = 4;  // of a cluster: the sums of eight take too long to meet

// What a tiling costs is counted in bytes through one multiprocessor: the matrix; some of x, which
// comes from the cache beside it; and the sums that a cluster exchanges, of 128 tokens, one and a
// half times, as nothing else moves meanwhile.
Tiling choose_tiling(const int* slab_rows, int slabs, int in, bool gated, const Context& context) {
  const int chunks = (in + kColumns - 1) / kColumns;
  const double x_bytes = context.keep_low ? 99 : 77;  // a column: fitted to whole steps
  constexpr double kSumBytes = 1.5 * kHopperTokens * sizeof(float);  // a row
  Tiling best;
  double least = 0;
  for (int size = 0; 1 << size <= kMostBlocks; ++size) {
    const int cluster = 1 << size, at_once = context.hopper.clusters[size] * cluster;
    if (at_once == 0 || (cluster > 1 && chunks < 2 * cluster)) break;
    for (const int rows : kTileRows) {
      if (gated && rows % 16 != 0) continue;  // two halves of whole eights
      const int each = gated ? rows / 2 : rows;
      int tiles = 0;
      for (int s = 0; s < slabs; ++s) tiles += (slab_rows[s] + each - 1) / each;
      const int waves = (tiles * cluster + at_once - 1) / at_once;
      const double columns = double((chunks + cluster - 1) / cluster) * kColumns;
      const double bytes =
          waves * columns * (2.0 * rows + x_bytes) + (cluster > 1 ? kSumBytes * rows : 0);
      if (best.rows == 0 || bytes < least) {
        best = {rows, cluster, tiles};
        least = bytes;
      }
    }
  }
  return best;
}

// Slabs' rows; their maps are made when the tiling is known.
int find_slabs(const Linear& op, int (&first_part)[Linear::kParts], int (&rows)[Linear::kParts]) {
  int slabs = 0;
  const char* end = nullptr;
  for (int p = 0; p < op.parts; ++p) {
    if (op.part[p].rows == 0) continue;
    if (op.part[p].data != end) {
      first_part[slabs] = p;
      rows[slabs++] = 0;
    }
    rows[slabs - 1] += op.part[p].rows;
    end = static_cast<const char*>(op.part[p].data) + op.part[p].bytes();
  }
  return slabs;
}

void encode_rows(CUtensorMap& map, const void* data, int in, int rows, int box_rows,
                 const Context& context) {
  const cuuint64_t size[] = {cuuint64_t(in), cuuint64_t(rows)}, row_bytes = cuuint64_t(in) * 2;
  const cuuint32_t box[] = {kColumns, cuuint32_t(box_rows)};
  encode(map, data, 2, size, &row_bytes, box, context);
}

// The matrices' share of the job.
Tiling lay_slabs(const Linear& op, const Context& context, Job& job) {
  int first_part[Linear::kParts], rows[Linear::kParts];
  const int slabs = find_slabs(op, first_part, rows);
  const Tiling tiling = choose_tiling(rows, slabs, op.in, false, context);
  int tile = 0, row = 0;
  for (int s = 0; s < slabs; ++s) {
    encode_rows(job.slabs.map[s], op.part[first_part[s]].data, op.in, rows[s], tiling.rows,
                context);
    job.slabs.first_tile[s] = tile;
    job.slabs.first_row[s] = row;
    job.slabs.rows[s] = rows[s];
    job.plain = job.plain && row % 4 == 0 && rows[s] % 4 == 0;
    tile += (rows[s] + tiling.rows - 1) / tiling.rows;
    row += rows[s];
  }
  job.slabs.first_tile[slabs] = tile;
  return tiling;
}

// The same for a gate and its other half, whose rows go side by side.
Tiling lay_halves(const Linear& op, const Context& context, Job& job) {
  const int rows = op.part[0].rows;
  const Tiling tiling = choose_tiling(&rows, 1, op.in, true, context);
  for (int half = 0; half < 2; ++half) {
    encode_rows(job.slabs.map[half], op.part[half].data, op.in, rows, tiling.rows / 2, context);
  }
  job.slabs.rows[0] = rows;
  job.slabs.first_tile[1] = tiling.tiles;
  return tiling;
}

// What else the job reads and leaves beside y.
void lay_epilogue(const Epilogue& epilogue, int tiles, Context& context, Job& job) {
  if (context.split.squares > 0) {
    job.squares = squares_of(context.split, context);
    job.squares_count = context.split.squares;
    job.eps = context.split.eps;
  }
  if (epilogue.gate != nullptr) {
    const Swiglu& gate = *epilogue.gate;
    job.split = leave_split(gate.out, gate.dim, gate.tokens, context);
    job.split_alone = epilogue.split_alone;
  }
  if (epilogue.norm != nullptr) {
    const RmsNorm& norm = *epilogue.norm;
    job.split = leave_split(norm.out, norm.dim, norm.tokens, context);
    WEIR_CHECK(job.split.high != nullptr && tiles <= kSquaresMost);
    context.next_split.squares = tiles;
    context.next_split.eps = norm.eps;
    job.norm_weight = norm.weight;
    job.squares_to = squares_of(context.next_split, context);
  }
}

Job job_of(const Linear& op, const Epilogue& epilogue, Context& context, Tiling& tiling) {
  const SplitVectors x = split(op.x, op.in, op.tokens, context);
  const bool gated = epilogue.gate != nullptr;
  Job job{.tokens = op.tokens, .padded = (op.tokens + 7) / 8 * 8,
          .planes = context.keep_low ? 2 : 1, .chunks = (op.in + kColumns - 1) / kColumns,
          .in = op.in, .accumulate = op.accumulate, .gated = gated,
          .y = gated ? epilogue.gate->out : op.y};
  job.plain = by_fours(job.y);
  tiling = gated ? lay_halves(op, context, job) : lay_slabs(op, context, job);
  job.cluster = tiling.cluster;
  lay_epilogue(epilogue, tiling.tiles, context, job);

  int end = 0;
  for (int p = 0; p < op.parts; ++p) {
    job.part_end[p] = end += op.part[p].rows;
    job.bias[p] = op.bias[p];
    job.plain = job.plain && op.bias[p] == nullptr;
  }
  const cuuint64_t size[] = {cuuint64_t(op.in), cuuint64_t(job.padded), cuuint64_t(job.planes)};
  const cuuint64_t stride[] = {size[0] * 2, size[0] * 2 * size[1]};
  const cuuint32_t box[] = {kColumns, cuuint32_t(job.padded), cuuint32_t(job.planes)};
  encode(job.x, x.high, 3, size, stride, box, context);
  return job;
}

template <int kRows, int kGroups>
void start(Job& job, const Tiling& tiling, Context& context) {
  const auto kernel = linear_kernel<kRows, kGroups>;
  const size_t x_plane = size_t(job.padded) * kRowBytes;
  const size_t stage = x_plane * job.planes + size_t(kRows) * kRowBytes;
  // Unused tokens of a warpgroup are read up to here.
  const size_t read = x_plane * (job.planes - 1) + size_t(kGroups) * kGroupTokens * kRowBytes;
  const size_t beyond = kAlign + (read > stage ? read - stage : 0);
  const size_t sums = kAlign + size_t(job.tokens) * (stride_of(kRows) * sizeof(float) + kRows);
  size_t shared = kWhole;
  int threads = most_threads(kRows, kGroups);
  // Where half of the shared memory keeps enough on its way, a block leaves room for its
  // successor's. Two of one launch on a multiprocessor would take twice as long, so there is no
  // room for that: odd launches take more than half of the shared memory, even ones more than half
  // of the registers. Warps come in fours, so that all parts of a multiprocessor have as many.
  if (kGroups == 1 && sums <= kEven && beyond + kLeastStages * stage <= kEven) {
    context.odd = !context.odd;
    shared = context.odd ? kOdd : kEven;
    cudaFuncAttributes attributes;
    WEIR_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    const int registers = (attributes.numRegs + 7) / 8 * 8;
    const int fours = context.odd ? kGroups + 1 : kHalfRegisters / registers + 1;
    threads = std::min(threads, fours * kGroupThreads);
  }
  WEIR_CHECK(threads > kGroups * kGroupThreads + 32);  // a warp that copies, one that reads scales
  const int share = (job.chunks + job.cluster - 1) / job.cluster;
  job.stages = std::min({int((shared - beyond) / stage), share, kMostStages});
  job.early = shared == kWhole ? kEarlyStages / job.planes : kEarlyInHalf;
  job.alone = job.cluster == 1 && job.plain && !job.accumulate && job.norm_weight == nullptr &&
              kRows % (job.gated ? 32 : 16) == 0;
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(shared)));
  launch(context,
         {.grid = dim3(tiling.tiles * tiling.cluster),
          .block = dim3(threads),
          .shared = shared,
          .cluster = tiling.cluster},
         kernel, job);
}

template <int kRows>
void start(Job& job, const Tiling& tiling, Context& context) {
  if (job.tokens <= kGroupTokens) return start<kRows, 1>(job, tiling, context);
  start<kRows, 2>(job, tiling, context);
}

}  // namespace

Hopper find_hopper(int compute) {
  Hopper hopper;
  if (compute != 90) return hopper;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &hopper.encode_map, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &hopper.encode_map,
                                                    cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return {};
  const auto kernel = linear_kernel<64, 1>;
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(kWhole)));
  for (int size = 0; size < Hopper::kClusters; ++size) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {1u << size, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1u << size);
    config.blockDim = dim3(kGroupThreads + 32);
    config.dynamicSmemBytes = kWhole;
    config.attrs = &attribute;
    config.numAttrs = 1;
    WEIR_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&hopper.clusters[size], kernel, &config));
  }
  return hopper;
}

void run_hopper(const Linear& op, const Epilogue& epilogue, Context& context) {
  Tiling tiling;
  Job job = job_of(op, epilogue, context, tiling);
  switch (tiling.rows) {
    case 32: return start<32>(job, tiling, context);
    case 64: return start<64>(job, tiling, context);
    case 72: return start<72>(job, tiling, context);
    case 96: return start<96>(job, tiling, context);
    case 104: return start<104>(job, tiling, context);
    case 128: return start<128>(job, tiling, context);
    case 144: return start<144>(job, tiling, context);
    case 176: return start<176>(job, tiling, context);
    case 208: return start<208>(job, tiling, context);
    case 248: return start<248>(job, tiling, context);
    default: WEIR_UNREACHABLE("one of kTileRows");
  }
}

}  // namespace weir::cuda
