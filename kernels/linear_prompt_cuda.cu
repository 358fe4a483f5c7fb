// Linear on Hopper for the tokens of prompts, bf16: at the speed of the tensor cores.
#include <algorithm>

#include "kernels/linear_cuda.cuh"
#include "kernels/tensor_core.cuh"
#include "kernels/wgmma_cuda.cuh"

namespace weir::cuda {
namespace {

// A cluster of two blocks computes 256 tokens x 192 rows of the matrix at a time: each block 128
// tokens and all rows, by one of its two warpgroups. The other one has the tile after that, so that
// one stores its sums while the other multiplies. Stages of 64 columns go through a ring in shared
// memory, one tile's after the other's; each block brings its tokens and half of the matrix rows,
// which go to both. Blocks stay until all tiles are done.
//
// Tiles of the same 16 MB of vectors follow one another, so that these stay in the L2 cache.
//
// Floor: 2 * tokens * rows * in operations; a stage is 1.6 million products a block, 768 cycles of
// the tensor cores, for which 28 KB come from the L2 cache. Where many tokens follow one another
// the card's power is the limit, not its clock (NOTES): what moves fewer bytes is faster.
constexpr int kColumns = 64;  // of a stage: the 128 bytes of a swizzled row
constexpr int kRowBytes = kColumns * 2;
constexpr int kTokens = 128, kRows = 192;
constexpr int kCluster = 2, kBrought = kRows / kCluster;
constexpr int kStages = 5;
constexpr int kPromptTokens = 3072;  // of fewer the library is about as fast
constexpr int kThreads = 384;  // two warpgroups multiply, one thread of the third brings
constexpr int64_t kTogetherBytes = 16 << 20;

using Leave = PromptProduct::Leave;

struct Job {
  CUtensorMap x[2];  // [tokens, in]: the planes, low and then high, or one alone
  CUtensorMap w[2];  // [rows, in]: of either half of a tile's rows
  // What is left in bf16, in boxes of 64 tokens and kBrought numbers: one plane, or high and low.
  CUtensorMap rounded[2];
  int left;  // of such planes
  CUtensorMap exact;  // y in float32, in boxes of 64 tokens and kExact numbers
  int planes, chunks;  // of 64 columns
  int second;          // where the second half of the first tile's rows begins, in w[1]
  int row_tiles, token_tiles, tile_rows, together;
};

struct alignas(1024) Stage {
  unsigned char x[kTokens * kRowBytes], w[kRows * kRowBytes];
};
constexpr int kOutPitch = kBrought * 2;  // bytes, of bf16 or of half as many of float32
constexpr int kExact = kBrought / 2;
static_assert(kExact % 8 == 0);
struct Shared {
  Stage stage[kStages];
  alignas(128) unsigned char out[2][64 * kOutPitch];  // of either warpgroup
  uint64_t full[kStages], empty[kStages];
  uint64_t turn[2];  // of either warpgroup: all stages before its next tile's have come
};
constexpr size_t kSharedBytes = sizeof(Shared) + 1024;
static_assert(kSharedBytes <= 227 * 1024);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Tells block `rank` of the cluster, where the barrier lies as here. Without a scope: what the
// copy engine writes next is ordered after the tensor cores' reads, which are complete.
__device__ inline void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Tiles in turn: `together` of tokens, for all rows, then the next ones.
struct Tile {
  int token, row;  // the cluster's first ones
  __device__ Tile(const Job& job, int index) {
    const int group = index / (job.together * job.row_tiles);
    const int within = index - group * job.together * job.row_tiles;
    const int wide = min(job.together, job.token_tiles - group * job.together);
    row = within / wide;
    token = (group * job.together + within - row * wide) * kCluster * kTokens;
    row *= job.tile_rows;
  }
};

struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void skip(int stages) {
    stage += stages;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
};

__device__ void bring(const Job& job, Shared& shared, int rank, int first, int step, int tiles) {
  Ring ring;
#pragma unroll 1
  for (int t = first; t < tiles; t += step) {
    const Tile tile(job, t);
    const int token = tile.token + rank * kTokens, row = tile.row + rank * job.second;
#pragma unroll 1
    for (int plane = 0; plane < job.planes; ++plane) {
#pragma unroll 1
      for (int chunk = 0; chunk < job.chunks; ++chunk, ring.next()) {
        barrier_wait(shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
        Stage& stage = shared.stage[ring.stage];
        const uint32_t full = shared_address(&shared.full[ring.stage]);
        barrier_expect(full, sizeof(Stage));
        copy_box(shared_address(stage.x), job.x[plane], chunk * kColumns, token, full, kReadOften);
        copy_box_to_all(shared_address(stage.w + rank * kBrought * kRowBytes), job.w[rank],
                        chunk * kColumns, row, full, (1 << kCluster) - 1);
      }
    }
  }
}

__device__ inline float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
__device__ inline uint32_t packed(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

// What rounding takes away.
__device__ inline float rest(float x) { return x - __bfloat162float(__float2bfloat16_rn(x)); }

// Eight columns, the block-th eight, of a warp's sixteen tokens.
__device__ inline void put(uint32_t out, int block, float a, float b, float c, float d) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(
                   out + row * kOutPitch + block * 16),
               "r"(packed(a, b)), "r"(packed(c, d))
               : "memory");
}

// What a warpgroup leaves of its tile, 64 tokens at a time. A thread has, of tokens lane / 4 and
// eight further on of its warp's sixteen, two neighbouring columns of each eight.
template <Leave kLeave>
struct Leaver {
  const Job& job;
  unsigned char* out;
  int group, token, row;  // token: the first of 64
  int pair = threadIdx.x % 4 * 2;

  __device__ void meet() const { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
  // What lay in `out` has been stored.
  __device__ void begin() const {
    if (threadIdx.x % 128 == 0) bulk_stores_read<0>();
    meet();
  }
  // From column `at` of the tile's on.
  __device__ void store(int at, int plane = 0) const {
    publish_to_copy_engine();
    meet();  // all of it is there
    if (threadIdx.x % 128 == 0) store_box(job.rounded[plane], row + at, token, shared_address(out));
  }

  __device__ void gated(float (&sum)[kRows / 2]) const {
    begin();
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j) {
      float* const x = sum + 4 * j;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = silu(x[i]) * x[kRows / 4 + i];
      put(shared_address(out), j, x[0], x[1], x[2], x[3]);
    }
    store(0);
    if (job.left == 1) return;
    begin();
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j) {
      const float* const x = sum + 4 * j;
      put(shared_address(out), j, rest(x[0]), rest(x[1]), rest(x[2]), rest(x[3]));
    }
    store(0, 1);
  }
  __device__ void exact(const float (&sum)[kRows / 2]) const {
#pragma unroll
    for (int at = 0; at < kRows; at += kExact) {
      begin();
      unsigned char* const to =
          out + (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) * kOutPitch + pair * 4;
#pragma unroll
      for (int column = 0; column < kExact; column += 8) {
        const float* const x = sum + (at + column) / 2;
        *reinterpret_cast<float2*>(to + column * 4) = {x[0], x[1]};
        *reinterpret_cast<float2*>(to + 8 * kOutPitch + column * 4) = {x[2], x[3]};
      }
      publish_to_copy_engine();
      meet();  // all of it is there
      if (threadIdx.x % 128 != 0) continue;
      if constexpr (kLeave == Leave::Added) {
        // Each number is added to once: no order to depend on.
        add_box(job.exact, row + at, token, shared_address(out));
      } else {
        store_box(job.exact, row + at, token, shared_address(out));
      }
    }
  }
  __device__ void leave(float (&sum)[kRows / 2]) const {
    if constexpr (kLeave == Leave::Gated) {
      gated(sum);
    } else {
      exact(sum);
    }
  }
};

template <Leave kLeave>
__device__ void multiply_tiles(const Job& job, Shared& shared, int rank, int first, int step,
                               int tiles) {
  const int group = threadIdx.x / 128, chunks = job.planes * job.chunks;
  const auto release = [&](int stage) {
    if (threadIdx.x % 128 < kCluster) {
      arrive_at(shared_address(&shared.empty[stage]), threadIdx.x % 128);
    }
  };
  Ring ring;
  if (group == 1) ring.skip(chunks);
  uint32_t turn = 1 - group;  // warpgroup 0 begins
#pragma unroll 1
  for (int t = first + group * step; t < tiles; t += 2 * step, ring.skip(chunks)) {
    const Tile tile(job, t);
    const int token = tile.token + rank * kTokens;
    // A phase's parity says nothing of the phase two before it.
    barrier_wait(shared_address(&shared.turn[group]), turn);
    turn ^= 1;
    float sum[2][kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum[i / (kRows / 2)][i % (kRows / 2)] = 0;
    int before = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, ring.next()) {
      barrier_wait(shared_address(&shared.full[ring.stage]), ring.parity);
      if (chunk == chunks - 1 && threadIdx.x % 128 == 0) {
        barrier_arrive(shared_address(&shared.turn[1 - group]));
      }
      const Stage& stage = shared.stage[ring.stage];
      const uint64_t x = swizzled_rows(shared_address(stage.x));
      const uint64_t w = swizzled_rows(shared_address(stage.w));
      constexpr uint64_t kNextTokens = 64 * kRowBytes >> 4;
      products_begin();
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
        multiply<kRows>(sum[0], x + k * kNextColumns, w + k * kNextColumns);
        multiply<kRows>(sum[1], x + kNextTokens + k * kNextColumns, w + k * kNextColumns);
      }
      products_commit();
      products_wait<1>();  // those of the stage before are done
      if (chunk > 0) release(before);
      before = ring.stage;
    }
    products_wait<0>();
    release(before);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      Leaver<kLeave>{job, shared.out[group], group, token + 64 * m, tile.row}.leave(sum[m]);
    }
  }
  if (threadIdx.x % 128 == 0) bulk_stores_read<0>();
}

#endif  // 9.0a

template <Leave kLeave>
__global__ __launch_bounds__(kThreads, 1) void prompt_kernel(const __grid_constant__ Job job) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char space[];
  Shared& shared = *reinterpret_cast<Shared*>(space + (-shared_address(space) & 1023));
  const int rank = int(cluster_rank());
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(&shared.full[s]), 1);
      barrier_init(shared_address(&shared.empty[s]), kCluster);
    }
    for (uint64_t& turn : shared.turn) barrier_init(shared_address(&turn), 1);
    barrier_init_done();
  }
  cluster_barrier();  // both blocks' barriers are there
  wait_for_predecessor();
  const int first = int(blockIdx.x) / kCluster, step = int(gridDim.x) / kCluster;
  const int tiles = job.row_tiles * job.token_tiles;
  if (threadIdx.x < 256) {
    take_registers<240>();
    multiply_tiles<kLeave>(job, shared, rank, first, step, tiles);
  } else {
    give_up_registers<24>();
    if (threadIdx.x == 256) bring(job, shared, rank, first, step, tiles);
  }
  let_successor_start();
  __syncwarp();
  cluster_barrier();  // neither leaves while the other may write to it
#endif
}

// --- the host's side ---------------------------------------------------------------------------

using Encode = decltype(&cuTensorMapEncodeTiled);

// [tokens or rows, columns], in boxes of `wide` of the one and `high` of the other.
CUtensorMap map_of(CUtensorMapDataType type, const void* data, int columns, int rows,
                   int64_t row_bytes, int wide, int high, const Context& context) {
  const cuuint64_t size[] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t stride = cuuint64_t(row_bytes);
  const cuuint32_t box[] = {cuuint32_t(wide), cuuint32_t(high)}, step[] = {1, 1};
  CUtensorMap map;
  const CUresult result = reinterpret_cast<Encode>(context.hopper.encode_map)(
      &map, type, 2, const_cast<void*>(data), size, &stride, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      wide == kColumns ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  WEIR_CHECK(result == CUDA_SUCCESS);
  return map;
}
CUtensorMap narrow_map(const void* data, int columns, int rows, int wide, int high,
                       const Context& context) {
  return map_of(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, columns, rows, int64_t(columns) * 2, wide,
                high, context);
}

template <Leave kLeave>
void start(const Job& job, Context& context) {
  const auto kernel = prompt_kernel<kLeave>;
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(kSharedBytes)));
  const int clusters = std::min(job.row_tiles * job.token_tiles, context.hopper.clusters[1]);
  launch(context,
         {.grid = dim3(kCluster * clusters),
          .block = dim3(kThreads),
          .shared = kSharedBytes,
          .cluster = kCluster},
         kernel, job);
}

int tiles_of(int rows, int tokens) {
  return ((rows + kRows - 1) / kRows) * ((tokens + kCluster * kTokens - 1) / (kCluster * kTokens));
}

}  // namespace

bool suits_prompt(int rows, int in, int tokens, const Context& context) {
  const int clusters = context.hopper.clusters[1];
  if (context.hopper.encode_map == nullptr || clusters == 0 || in % 8 != 0) return false;
  if (tokens < kPromptTokens) return false;
  const int tiles = tiles_of(rows, tokens), rounds = (tiles + clusters - 1) / clusters;
  return 10 * tiles >= 8 * rounds * clusters;
}

void run_prompt(const PromptProduct& product, Context& context) {
  const bool gated = product.leave == Leave::Gated;
  const int in = product.in, rows = product.rows, tokens = product.tokens;
  const int64_t in_bytes = int64_t(in) * 2 * (product.x.low == nullptr ? 1 : 2);
  Job job{.planes = product.x.low == nullptr ? 1 : 2,
          .chunks = (in + kColumns - 1) / kColumns,
          .second = gated ? 0 : kBrought,
          .tile_rows = gated ? kBrought : kRows};
  const auto* const first = product.x.low == nullptr ? product.x.high : product.x.low;
  job.x[0] = narrow_map(first, in, tokens, kColumns, kTokens, context);
  job.x[1] = narrow_map(product.x.high, in, tokens, kColumns, kTokens, context);
  job.w[0] = narrow_map(product.matrix, in, rows, kColumns, kBrought, context);
  job.w[1] = gated ? narrow_map(product.second, in, rows, kColumns, kBrought, context) : job.w[0];
  job.row_tiles = (rows + job.tile_rows - 1) / job.tile_rows;
  job.token_tiles = (tokens + kCluster * kTokens - 1) / (kCluster * kTokens);
  job.together = int(std::max<int64_t>(1, kTogetherBytes / (kCluster * kTokens * in_bytes)));
  if (gated) {
    job.left = product.low == nullptr ? 1 : 2;
    job.rounded[0] = narrow_map(product.y, rows, tokens, kBrought, 64, context);
    job.rounded[1] = job.left == 1 ? job.rounded[0]
                                   : narrow_map(product.low, rows, tokens, kBrought, 64, context);
  } else {
    job.exact = map_of(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, product.y, rows, tokens,
                       product.stride * int64_t(sizeof(float)), kExact, 64, context);
  }
  switch (product.leave) {
    case Leave::Exact: return start<Leave::Exact>(job, context);
    case Leave::Added: return start<Leave::Added>(job, context);
    case Leave::Gated: return start<Leave::Gated>(job, context);
  }
}

}  // namespace weir::cuda
