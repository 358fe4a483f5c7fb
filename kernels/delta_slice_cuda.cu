#include "kernels/delta_channel_cuda.cuh"
#include "kernels/delta_stream_cuda.cuh"

namespace weir::cuda {
namespace {

using namespace channel;

// For rows of one token each, heads of 256 keys: what held_kernel does for a head of 128x128, a
// block does for 64 values of a head, whose state has 64 KB too. The blocks of a key head are a
// cluster: each prepares the whole q and k, the last one writes their history, and what the gated
// norm sums over a value head's slices is exchanged. Two blocks share a multiprocessor.
//
// Floor: as delta_mix_kernel.
constexpr int kKeys = 256, kSlice = 64, kClusterMost = 8;
constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = kSlice / kWarps, kResident = 2;
constexpr int kParts = kKeys / 128;      // of 16 bytes, of a row, in a lane
constexpr int kPieces = 4;               // of a state, each of four warps' rows
constexpr int kBringer = kThreads - 32;  // the thread that asks for them
static_assert(kThreads == 2 * kKeys);

struct Shared {
  uint64_t barrier[kPieces];
  alignas(16) float q[kKeys], k[kKeys], decay[kKeys], erase[kKeys];
  float v[kSlice], answer[kSlice];
  float factor[kSlice];           // what the normed answer is multiplied with
  alignas(16) float sums[kWarps];  // of q's eight warps, then of k's: what normalises them
  alignas(16) float squares[kWarps];
  float slices[kClusterMost];     // what the value head's slices sum up for the norm
  float kept[2 * kKeys];          // what joins the history of q and k
};

// Part j of a lane's keys.
__device__ inline float4 part(const float* vector, int j) {
  return reinterpret_cast<const float4*>(vector)[32 * j + threadIdx.x % 32];
}
__device__ inline float sum_of_eight(const float* sums) {
  const float4 a = reinterpret_cast<const float4*>(sums)[0],
               b = reinterpret_cast<const float4*>(sums)[1];
  return sum_of(a) + sum_of(b);
}

// Where the warp's rows land in shared memory, as they lie in device memory.
__device__ inline float4* landing() {
  extern __shared__ float4 space[];
  return space + threadIdx.x / 32 * kRows * kKeys / 4 + threadIdx.x % 32;
}

// state: the slice's first row.
__device__ inline void bring(const float* state, bool fresh, Shared& shared) {
  extern __shared__ float4 space[];
  constexpr int kPiece = kSlice * kKeys / kPieces;
  if (fresh) {
#pragma unroll
    for (int i = 0; i < kRows * kParts; ++i) landing()[32 * i] = {};
    return;
  }
  if (threadIdx.x != kBringer) return;
#pragma unroll 1
  for (int i = 0; i < kPieces; ++i) {
    const uint32_t barrier = shared_address(shared.barrier + i);
    barrier_expect(barrier, kPiece * sizeof(float));
    bulk_load(space + i * kPiece / 4, state + i * kPiece, kPiece * sizeof(float), barrier);
  }
}

// Steps the warp's rows and stores them; leaves their answers and the sum of those's squares.
__device__ inline void step(const DeltaMix& op, Shared& shared, float* state) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRows;
  float mine, both = 0;
  {
    float sum[2 * kRows] = {};
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const float4 q = part(shared.q, j), decay = part(shared.decay, j);
      both += dot(q, part(shared.k, j));
      const float4 recalls = times(decay, part(shared.erase, j)), answers = times(decay, q);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 x = landing()[32 * (r * kParts + j)];
        sum[r] += dot(x, recalls);
        sum[kRows + r] += dot(x, answers);
      }
    }
    both = sum_over_lanes(both);
    // Lane r has what row r recalls, lane 4 + r what it answers.
    mine = sum_over_groups<2 * kRows>(scatter_sums<2 * kRows>(sum));
  }
  asm volatile("" ::: "memory");  // vectors are read again: kept, they would be spilled
  const float q_scale =
      delta::scale_of(op.qk_norm, sum_of_eight(shared.sums)) * rsqrtf(float(kKeys));
  const float k_scale = delta::scale_of(op.qk_norm, sum_of_eight(shared.sums + kWarps / 2));
  const float u = (shared.v[first + lane % kRows] - mine * k_scale) * k_scale;
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const float4 decay = part(shared.decay, j), k = part(shared.k, j);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float wrote = __shfl_sync(0xffffffffu, u, r);
      const float4 x = landing()[32 * (r * kParts + j)];
      store_four(state + (first + r) * kKeys + 128 * j + 4 * lane, plus(times(x, decay), wrote, k));
    }
  }
  const float wrote = __shfl_sync(0xffffffffu, u, lane % kRows);
  const float answer = (mine + wrote * both) * q_scale;
  const float squares = sum_over_lanes<kRows>(answer * answer);
  if (lane / kRows != 1) return;
  shared.answer[first + lane % kRows] = answer;
  if (lane == kRows) shared.squares[threadIdx.x / 32] = squares;
}

// Where a block's slice is: `place`'s value head, its values from `value0` on.
struct Slice {
  int group, slices, value0;
};

// A warp asks for the state that block number `block` will read, and for its share of its row's
// history, to be brought to the L2 cache.
__device__ inline void bring_ahead(const DeltaMix& op, int block) {
  const int lane = threadIdx.x % 32, row = block / gridDim.x;
  if (lane > 1 || row >= int(gridDim.y)) return;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || op.rows.first[row] == 0) return;
  const int floats = lane == 0 ? op.value_heads * op.value_dim * kKeys
                               : (kWidth - 1) * channels_of<kKeys>(op);
  const int each = floats / int(gridDim.x);
  bulk_prefetch(at(lane == 0 ? op.state : op.history, slot) + int64_t(block % gridDim.x) * each,
                uint32_t(each) * sizeof(float));
}

// out = rms(o) * norm_weight [* gate_act(gate)], once the cluster's blocks have met.
__device__ inline void finish(const DeltaMix& op, const Place& place, const Slice& slice,
                              const Own& own, const Shared& shared, const SplitVectors& split) {
  float sum = 0;
  for (int i = 0; i < slice.slices; ++i) sum += shared.slices[i];
  const float scale = rsqrtf(sum / float(op.value_dim) + op.norm_eps);
  const float out = shared.answer[own.i] * scale * shared.factor[own.i];
  at(op.out, place.token)[own.column] = out;
  store_split(split, int64_t(place.token) * op.value_heads * op.value_dim + own.column, out);
}

// This block's part of the norm's sum to all slices of its value head; then the cluster meets.
__device__ inline void exchange(const Slice& slice, int rank, Shared& shared) {
  const int own = rank % slice.slices, peer = threadIdx.x;
  wait_for_cluster();  // all blocks have started
  if (peer < slice.slices) {
    const float sum = sum_of_eight(shared.squares) + sum_of_eight(shared.squares + kWarps / 2);
    write_peer(shared.slices + own, uint32_t(rank - own + peer), sum);
  }
  cluster_barrier();
}

// The first `early` blocks have their states brought before the predecessor is done. `ahead`: how
// many blocks later the one is whose states a block brings to L2.
__global__ __launch_bounds__(kThreads, kResident) void slice_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ SplitVectors split,
    bool fresh_state, int early, int ahead) {
  __shared__ Shared shared;
  let_successor_start();
  const int row = blockIdx.y, block = blockIdx.y * gridDim.x + blockIdx.x;
  const Slice slice{op.value_heads / op.key_heads, op.value_dim / kSlice,
                    int(blockIdx.x) * kSlice % op.value_dim};
  const Slot slot = op.rows.slot[row];
  const int token = op.rows.begin[row];
  if (slot == kPadding || op.rows.begin[row + 1] - token != 1) {
    wait_for_predecessor();
    return;
  }
  cluster_started();
  const int blocks = slice.group * slice.slices, rank = int(blockIdx.x) % blocks;
  const int value_head = int(blockIdx.x) / slice.slices;
  const Place place{.key_head = int(blockIdx.x) / blocks, .value_head = value_head,
                    .decay_head = value_head * op.decay_heads / op.value_heads, .token = token,
                    .fresh = op.rows.first[row] == 0, .keeps = rank + 1 == blocks,
                    .oldest = ring_row(op.rows.first[row], kWidth - 1),
                    .history = at(op.history, slot)};
  if (threadIdx.x == kBringer) {
    for (uint64_t& barrier : shared.barrier) barrier_init(shared_address(&barrier), 1);
    barrier_init_done();
  }
  // All threads have a channel of q or k; the first four warps another one of v, or a factor.
  const int thread = threadIdx.x, i = thread % kKeys;
  const Own own{thread < kKeys ? kQuery : kKey, i, place.key_head * kKeys + i};
  const bool again = thread < 2 * kSlice;
  const Own other{thread < kSlice ? kValue : kFinisher, thread % kSlice,
                  value_head * op.value_dim + slice.value0 + thread % kSlice};
  float* const state = at(op.state, slot) + int64_t(blockIdx.x) * kSlice * kKeys;
  if (!fresh_state) wait_for_predecessor();
  Raw raw, more;
  load_kept<kKeys>(op, place, own, 0, raw);
  if (again) load_kept<kKeys>(op, place, other, slice.value0, more);
  if (block < early) bring(state, place.fresh, shared);
  wait_for_predecessor();
  load_new<kKeys>(op, place, own, raw);
  if (again) load_new<kKeys>(op, place, other, more);
  if (block >= early) bring(state, place.fresh, shared);
  if (thread / 32 == kWarps - 1) bring_ahead(op, block + ahead);
  prepare<kKeys>(op, place, own, raw, shared);
  if (again) prepare<kKeys>(op, place, other, more, shared);
  __syncthreads();  // the slice's vectors are there
  if (!place.fresh) barrier_wait(shared_address(shared.barrier + thread / (kThreads / kPieces)), 0);
  step(op, shared, state);
  __syncthreads();  // the slice's answers are there
  exchange(slice, rank, shared);
  if (again && other.role == kFinisher) finish(op, place, slice, other, shared, split);
  remember<kKeys>(op, place, own, shared);
}

bool fours(const float* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace

bool slices(const DeltaMix& op, const Context& context) {
  const int blocks = op.value_heads / op.key_heads * (op.value_dim / kSlice);
  return context.compute >= 90 && op.key_dim == kKeys && op.value_dim % kSlice == 0 &&
         (blocks == 1 || blocks == 2 || blocks == 4 || blocks == kClusterMost) &&
         op.conv_width == kWidth && fours(op.conv_q) && fours(op.conv_k) && fours(op.conv_v) &&
         fours(op.state.data) && op.state.stride % 4 == 0 && fours(op.history.data) &&
         op.history.stride % 4 == 0;
}

void run_slices(const DeltaMix& op, Context& context) {
  const size_t landing = kSlice * kKeys * sizeof(float);
  const SplitVectors split =
      leave_split(op.out, op.value_heads * op.value_dim, op.rows.tokens, context);
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(slice_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(landing)));
  launch(context,
         {.grid = dim3(op.value_heads * (op.value_dim / kSlice), op.rows.count),
          .block = dim3(kThreads), .shared = landing,
          .cluster = op.value_heads / op.key_heads * (op.value_dim / kSlice)},
         slice_kernel, op, split, context.fresh_state,
         context.fresh_state ? kResident * context.multiprocessors : 0, context.multiprocessors);
}

}  // namespace weir::cuda
