#include <algorithm>
#include <cmath>

#include "kernels/attention_bring_cuda.cuh"

// Attention for all tokens of a row at once, on Hopper's tensor cores, with the running softmax of
// FlashAttention (Dao et al. 2022, arXiv 2205.14135, algorithm 1). Operands are halves (within 6e-4
// of float32) or high and low halves (within 1e-6, at three times the products), sums and softmax
// float32.
//
// Floor: 4 head_dim products and sums, and one exponential, for each pair of query and key that
// sees it: of 64 columns the tensor cores and the exponentials both allow 16 pairs a cycle of a
// multiprocessor. Queries, keys, values and answers pass through memory once, new keys and values
// once more into the row's memory.
//
// A block has kTile queries of one head: each of its warpgroups 64, whose scores and answers stay
// in registers. One more warpgroup brings keys and values, 64 positions at a time: the copy engine
// reads them as they are kept, in float32; the warpgroup narrows them into the layout that wgmma
// reads, and all others use them.
namespace weir::cuda::attention {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// --- the warpgroups with queries -----------------------------------------------------------------

// A warpgroup's 64 queries as halves in shared memory. Each kLanes lanes take one at a time.
template <typename S>
__device__ void bring_queries(const ChunkJob& job, const Tile& tile, int group, uint32_t to) {
  constexpr int kLanes = S::kDim / 4, kAtOnce = 128 / kLanes, kUnroll = 4;
  const Attention& op = job.op;
  const int column = 4 * (threadIdx.x % kLanes);
  const float* const norm = norm_of(op, op.q_norm, tile.head);
#pragma unroll 1
  for (int base = threadIdx.x % 128 / kLanes; base < 64; base += kUnroll * kAtOnce) {
    float4 x[kUnroll], cosine[kUnroll], sine[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t token = tile.token + min(64 * group + base + u * kAtOnce, tile.count - 1);
      x[u] = load_four(at(op.q, token) + int64_t(tile.head) * S::kDim + column);
      if (op.rope_theta > 0) {
        const float* const angles = job.angles + token * S::kDim + column % (S::kDim / 2);
        cosine[u] = load_four(angles);
        sine[u] = load_four(angles + S::kDim / 2);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      x[u] = normed<kLanes>(x[u], norm, column, op.norm_eps);
      if (op.rope_theta > 0) x[u] = rotated<kLanes>(x[u], cosine[u], sine[u]);
      store_halves<S>(to, base + u * kAtOnce, column, x[u]);
    }
  }
  publish_to_copy_engine();
  meet(2 + group, 128);  // the warpgroup's queries are there
}

// What a thread knows of its two queries, eight rows apart.
template <typename S>
struct Queries {
  int position[2];             // of each
  int first, last, oldest;     // positions of the warpgroup's first and last; the oldest key seen
  float scale;                 // of a product, log2(e) included
  float now[2], now_rest[2];   // sums of log gates
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {};
  float out[S::kDim / 64][32] = {};
};

// Scores in units of log2, what is not seen at -infinity.
template <typename S>
__device__ inline void score(const ChunkJob& job, const Queries<S>& own, int first_key,
                             uint32_t gates, float (&s)[32]) {
  const int column = 2 * (threadIdx.x % 4);
  if constexpr (S::kForgets) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 then = load_shared_two(gates + 4 * (8 * j + column));
      const float2 rest = load_shared_two(gates + 4 * (kUnitKeys + 8 * j + column));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float bias = (own.now[i / 2] - (i % 2 ? then.y : then.x)) +
                           (own.now_rest[i / 2] - (i % 2 ? rest.y : rest.x));
        s[4 * j + i] = s[4 * j + i] * own.scale + bias * kLog2E;
      }
    }
  }
  const int window = job.op.window;
  const int last_key = first_key + kUnitKeys - 1;
  if (last_key <= own.first && (window == 0 || first_key > own.last - window)) return;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int key = first_key + i / 4 * 8 + column + i % 2, position = own.position[i / 2 % 2];
    if (key > position || (window > 0 && key <= position - window)) s[i] = -INFINITY;
  }
}

// Weights of 16 queries of a warp and a unit's keys, as left operands: of 16 keys each.
template <typename S>
struct Weights {
  uint32_t of[S::kPlanes][4][4] = {};

  // Two numbers of at most 1.
  __device__ static uint32_t halves(float low, float high) {
    const half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
  __device__ void set(const float (&s)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float low = s[2 * i], high = s[2 * i + 1];
      uint32_t& first = of[0][i / 4][i % 4];
      first = halves(low, high);
      if constexpr (S::kPlanes == 2) {
        const float2 got = unpack(first);
        of[1][i / 4][i % 4] = halves(low - got.x, high - got.y);
      }
    }
  }
};

// Weights of a unit's keys, as left operand of the product with their values; what was summed
// before shrinks to the new largest score.
template <typename S>
__device__ inline void weigh(Queries<S>& own, float (&s)[32], Weights<S>& weights) {
  const float scale = S::kForgets ? 1.0f : own.scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = own.most[half];
#pragma unroll
    for (int i = 0; i < 16; ++i) most = fmaxf(most, s[i / 2 * 4 + 2 * half + i % 2]);
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const float anchor = most == -INFINITY ? 0.0f : most * scale;
    const float shrink = exp2_fast(own.most[half] * scale - anchor);
    own.most[half] = most;
    float total = own.total[half] * shrink;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& x = s[i / 2 * 4 + 2 * half + i % 2];
      x = exp2_fast(fmaf(x, scale, -anchor));
      total += x;
    }
    own.total[half] = total;
#pragma unroll
    for (int p = 0; p < S::kDim / 64; ++p) {
#pragma unroll
      for (int i = 0; i < 16; ++i) own.out[p][i / 2 * 4 + 2 * half + i % 2] *= shrink;
    }
  }
  weights.set(s);
}

// Products are there: nothing that uses them may be moved to where they were not, and what they
// were made of was not to be overwritten until here.
template <typename S>
__device__ inline void wait_for_products(float (&s)[32], float (&out)[S::kDim / 64][32],
                                         Weights<S>& weights) {
  products_wait<0>();
#pragma unroll
  for (int i = 0; i < 16 * S::kPlanes; ++i) {
    asm volatile("" : "+r"(weights.of[i / 16][i / 4 % 4][i % 4]));
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    asm volatile("" : "+f"(s[i]));
#pragma unroll
    for (int p = 0; p < S::kDim / 64; ++p) asm volatile("" : "+f"(out[p][i]));
  }
}

// Asks for the products of the warpgroup's queries and a unit of keys. Of two planes, low by low is
// left out.
template <typename S>
__device__ inline void ask_scores(uint32_t queries, uint32_t keys, float (&s)[32]) {
#pragma unroll
  for (int low = 0; low < 2 * S::kPlanes - 1; ++low) {
#pragma unroll
    for (int p = 0; p < S::kPanels; ++p) {
      const uint64_t a = swizzled_rows(queries + (low == 1 ? S::kPlane : 0) + p * S::kPanel);
      const uint64_t b = swizzled_rows(keys + (low == 2 ? S::kPlane : 0) + p * S::kPanel);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        multiply_halves(s, a + k * kNextColumns, b + k * kNextColumns, low + p + k > 0);
      }
    }
  }
}
// The same for weights and a unit of values, whose rows are the products' inner dimension.
template <typename S>
__device__ inline void ask_answers(const Weights<S>& weights, uint32_t values,
                                   float (&out)[S::kDim / 64][32]) {
  constexpr uint64_t kNextRows = 16 * 128 >> 4;
#pragma unroll
  for (int low = 0; low < 2 * S::kPlanes - 1; ++low) {
#pragma unroll
    for (int p = 0; p < S::kPanels; ++p) {
      const uint64_t b = swizzled_rows(values + (low == 2 ? S::kPlane : 0) + p * S::kPanel);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        multiply_halves(out[p], weights.of[low == 1][k], b + k * kNextRows);
      }
    }
  }
}

template <typename S>
__device__ inline void store_answers(const ChunkJob& job, const Tile& tile, int group,
                                     const Queries<S>& own) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = own.total[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const int query = 64 * group + threadIdx.x % 128 / 32 * 16 + 8 * half + lane / 4;
    if (query >= tile.count) continue;
    float* const to =
        at(job.op.out, tile.token + query) + int64_t(tile.head) * S::kDim + 2 * (lane % 4);
    const float scale = 1.0f / total;
#pragma unroll
    for (int j = 0; j < S::kDim / 8; ++j) {
      const float* const from = &own.out[j / 8][j % 8 * 4 + 2 * half];
      *reinterpret_cast<float2*>(to + 8 * j) = {from[0] * scale, from[1] * scale};
    }
  }
}

// The units of keys, or those of values, in turn.
template <typename S>
class Units {
 public:
  __device__ Units(const Room<S>& room, int first) : room_(room), at_(first) {}
  // The place of the next unit, which is there.
  __device__ int take() {
    barrier_wait(room_.unit_full + 8 * at_, parity_);
    const int place = at_;
    at_ += 2;
    if (at_ >= S::kUnits) {
      at_ -= S::kUnits;
      parity_ ^= 1;
    }
    return place;
  }
  __device__ uint32_t address(int place) const { return room_.units + place * S::kUnit; }
  __device__ uint32_t gates(int place) const { return room_.gates + place * S::kGates; }
  __device__ void hand_back(int place) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(room_.unit_free + 8 * place);
  }

 private:
  const Room<S>& room_;
  int at_;
  uint32_t parity_ = 0;
};

template <typename S>
__device__ inline Queries<S> find_queries(const ChunkJob& job, const Tile& tile, int group) {
  Queries<S> own;
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  own.first = tile.position + 64 * group;
  own.last = min(own.first + 63, tile.position + tile.count - 1);
  own.oldest = job.op.window > 0 ? max(0, own.first - job.op.window + 1) : 0;
  own.scale = kLog2E / sqrtf(float(S::kDim));
#pragma unroll
  for (int half = 0; half < 2; ++half) own.position[half] = own.first + row + 8 * half;
  return own;
}

template <typename S>
__device__ void answer(const ChunkJob& job, const Tile& tile, int group, const Room<S>& room) {
  const uint32_t queries = room.queries + group * S::kUnit;
  bring_queries<S>(job, tile, group, queries);
  Queries<S> own = find_queries<S>(job, tile, group);
  if constexpr (S::kForgets) {
    const Memory memory{job.op, tile.row, tile.kv_head, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const sum = memory.gate_sum(min(own.position[half], own.last), tile.head);
      own.now[half] = sum[0];
      own.now_rest[half] = sum[memory.sum_rest()];
    }
  }
  Units<S> keys(room, 0), values(room, 1);
  const auto skip = [&](int count) {  // units that none of these queries sees are only handed back
    for (int i = 0; i < count; ++i) {
      keys.hand_back(keys.take());
      values.hand_back(values.take());
    }
  };
  if (own.first > own.last) return skip(tile.end - tile.begin);
  const int begin = own.oldest / kUnitKeys, end = own.last / kUnitKeys + 1;
  skip(begin - tile.begin);
  Weights<S> weights;
  int key = keys.take();
  float s[32];
  products_begin();
  ask_scores<S>(queries, keys.address(key), s);
  products_commit();
  wait_for_products<S>(s, own.out, weights);
  for (int unit = begin; unit + 1 < end; ++unit) {
    score<S>(job, own, unit * kUnitKeys, keys.gates(key), s);
    keys.hand_back(key);
    weigh<S>(own, s, weights);
    const int value = values.take();
    key = keys.take();
    products_begin();
    ask_answers<S>(weights, values.address(value), own.out);
    ask_scores<S>(queries, keys.address(key), s);
    products_commit();
    wait_for_products<S>(s, own.out, weights);
    values.hand_back(value);
  }
  score<S>(job, own, (end - 1) * kUnitKeys, keys.gates(key), s);
  keys.hand_back(key);
  weigh<S>(own, s, weights);
  const int value = values.take();
  products_begin();
  ask_answers<S>(weights, values.address(value), own.out);
  products_commit();
  wait_for_products<S>(s, own.out, weights);
  values.hand_back(value);
  skip(tile.end - end);
  store_answers<S>(job, tile, group, own);
}

#endif  // 9.0a

// One block for each (query head, tile of queries).
template <typename S>
__global__ __launch_bounds__(S::kThreads, 1) void chunk_kernel(
    const __grid_constant__ ChunkJob job) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char shared[];
  __shared__ uint64_t barriers[2 * S::kUnits + 4 * S::kRaws];
  __shared__ Tile found;
  const Room<S> room(shared, barriers);
  let_successor_start();
  if (threadIdx.x < 32) {
    const Tile tile = find_tile(job, S::kTile);
    if (threadIdx.x == 0) {
      found = tile;
      for (int i = 0; i < S::kUnits; ++i) {
        barrier_init(room.unit_full + 8 * i, 4);
        barrier_init(room.unit_free + 8 * i, 4 * S::kGroups);
      }
      for (int i = 0; i < 4 * S::kRaws; ++i) barrier_init(room.raw_full + 8 * i, 1);
      barrier_init_done();
    }
  }
  __syncthreads();  // the tile is known, the barriers are there
  wait_for_predecessor();
  const Tile tile = found;
  if (tile.row < 0) return;
  const int group = threadIdx.x / 128;
  if (group == S::kGroups) {
    give_up_registers<S::kFewRegisters>();
    bring<S>(job, tile, room);
  } else {
    take_registers<S::kManyRegisters>();
    answer<S>(job, tile, group, room);
  }
#endif
}

template <typename S>
void start(const ChunkJob& job, Context& context) {
  const Attention& op = job.op;
  prepare(job, context);
  const auto kernel = chunk_kernel<S>;
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(S::kBytes)));
  const int heads = job.kv_count * (op.heads / op.kv_heads);
  const int tiles = std::min(op.rows.tokens / S::kTile + op.rows.count, op.rows.tokens / 2);
  launch(context,
         {.grid = dim3(heads, tiles), .block = dim3(S::kThreads),
          .shared = S::kBytes},
         kernel, job);
  if (op.window > 0) keep_window(job, context);
}
template <int kDim, int kPlanes>
void start(const ChunkJob& job, Context& context) {
  job.op.forgets ? start<Sizes<kDim, kPlanes, true>>(job, context)
                 : start<Sizes<kDim, kPlanes, false>>(job, context);
}

}  // namespace

bool run_chunks(const Attention& op, Context& context) {
  const size_t row_bytes = size_t(op.rows.tokens) * op.head_dim * sizeof(float);
  const size_t angle_bytes = op.rope_theta > 0 ? row_bytes : 0;
  if (context.compute != 90 || angle_bytes > context.half_bytes) return false;
  const int heads_fit = int((context.half_bytes - angle_bytes) / row_bytes);
  if (op.window > 0 && (op.forgets || heads_fit == 0)) return false;
  ChunkJob job{.op = op};
  auto* const scratch = static_cast<float*>(context.scratch);
  if (op.rope_theta > 0) {
    job.log_theta = std::log2(double(op.rope_theta));
    job.angles = scratch;
  }
  if (op.window == 0 && op.page_tokens % kUnitKeys == 0) job.together = kUnitKeys;
  int at_once = op.kv_heads;
  if (op.window > 0) {
    job.new_keys = scratch + angle_bytes / sizeof(float);
    at_once = std::min(at_once, heads_fit);
  }
  for (; job.kv_first < op.kv_heads; job.kv_first += at_once) {
    job.kv_count = std::min(at_once, op.kv_heads - job.kv_first);
    if (op.head_dim == 64) {
      context.keep_low ? start<64, 2>(job, context) : start<64, 1>(job, context);
    } else {
      context.keep_low ? start<128, 2>(job, context) : start<128, 1>(job, context);
    }
  }
  return true;
}

}  // namespace weir::cuda::attention
