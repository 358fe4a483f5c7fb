#include "kernels/async_cuda.cuh"
#include "kernels/swila_held_vectors_cuda.cuh"

namespace weir::cuda::swila {
namespace {

using namespace swila_held;

// For rows of one token each, heads of four mixtures of 64x64: a block of 16 warps holds a head's
// state, 4 KB a warp, two blocks on a multiprocessor. What a block reads is asked for at once, the
// state last; the vectors are prepared while it is on its way. Where there are many blocks the
// state passes through shared memory, so that nothing that waits for a vector waits for it too.
// Each block has the copy engine bring what a later one will read to the L2 cache, the state to be
// kept. Where there are few, states that have been stepped make room for it instead, and those of
// the first blocks, which bring ahead while they wait for the predecessor.
//
// A warp has four values of each mixture; 16 lanes share a row, two rows a load. What the state
// recalls and what it answers are summed together, before it is changed: with P = S diag(exp g),
// S' q = P q + u (k' q), where u is what is written.
//
// Floor: as swila_mix_kernel.
constexpr int kHeads = 16;        // from so many on this kernel is the faster one,
constexpr int kManyHeads = 1024;  // and faster with the state passing through shared memory

// The warp's rows of the state. Landed ones with decays stay in shared memory and are read twice:
// there would be too few registers.
template <bool kGated, bool kLanded>
struct Held {
  static constexpr bool kKept = !kLanded || !kGated;
  float4 row[kKept ? kRows : 1];

  // Where the thread's part of row i begins, in floats.
  __device__ static int place(int i) {
    const int lane = threadIdx.x % 32;
    return (i / 2 * D + int(threadIdx.x) / 32 * 4 + i % 2 * 2) * D + 4 * lane;
  }
  // Where it lands in shared memory: no other thread reads it.
  __device__ static float4& landing(int i) {
    extern __shared__ float4 space[];
    return space[i * kThreads + threadIdx.x];
  }
  __device__ float4 decayed(const Vectors& shared, int i) const {
    const float4 x = kKept ? row[kKept ? i : 0] : landing(i);
    if constexpr (!kGated) return x;
    const auto* decay = reinterpret_cast<const float4*>(shared.decay);
    return times(x, decay[i / 2 * D / 4 + threadIdx.x % kLanes]);
  }
  // `early`: of one of the first blocks.
  __device__ void load(const float* state, bool fresh, bool early) {
    if (fresh) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) (kLanded ? landing(i) : row[kKept ? i : 0]) = {};
      return;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kLanded) {
        copy_16_bytes(&landing(i), state + place(i));
      } else {
        const float* const from = state + place(i);
        row[i] = early ? load_four_as<Stay::Passing>(from) : load_four_as<Stay::Usual>(from);
      }
    }
    if constexpr (kLanded) copies_commit();
  }
  // Before step().
  __device__ void arrive(bool fresh) {
    if (kLanded && !fresh) copies_wait();
    if constexpr (kLanded && kKept) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) row[i] = landing(i);
    }
  }

  // Steps and stores them. A thread has a (mixture, value) for itself, and another has the same:
  // `answer` is what it answers; returns the posterior.
  __device__ float step(const Vectors& shared, float* state, int own, float& answer) const {
    constexpr int kHalf = kRows / 2;
    const int lane = threadIdx.x % kLanes, half = threadIdx.x % 32 - lane;
    const auto* vectors = reinterpret_cast<const float4*>(shared.vectors);
    float q_scale, k_scale, both, mine[2];
    {
      const float4 q = vectors[lane], k = vectors[D / 4 + lane];
      q_scale = rsqrtf(sum_over_lanes<kLanes>(dot(q, q)) + 1e-6f);
      k_scale = rsqrtf(sum_over_lanes<kLanes>(dot(k, k)) + 1e-6f);
      both = sum_over_lanes<kLanes>(dot(q, k));
      // Of each half of the rows, lane i of 8 has what row i recalls, lane 4 + i what it answers.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum[kRows];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
          const float4 x = decayed(shared, h * kHalf + i);
          sum[i] = dot(x, k);
          sum[kHalf + i] = dot(x, q);
        }
        mine[h] = scatter_sums<kRows>(sum);
        mine[h] += __shfl_xor_sync(0xffffffffu, mine[h], kRows);
      }
    }
    const float other[2] = {__shfl_xor_sync(0xffffffffu, mine[0], kHalf),
                            __shfl_xor_sync(0xffffffffu, mine[1], kHalf)};
    const bool later = lane & kHalf;  // the thread's own row, number lane % 8, is of the latter
    const float recalled = (later ? other[1] : mine[0]) * k_scale;
    const float answers = later ? mine[1] : other[0];
    asm volatile("" ::: "memory");  // vectors are read again: kept, they would be spilled
    const float4 k = vectors[D / 4 + lane];
    const float delta = shared.vectors[2 * D + own % D] - recalled;
    const float posterior = softmax<2>(shared.log_prior[own] - delta * delta / 2);
    const float written = shared.write[own] * posterior * delta * k_scale;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float u = __shfl_sync(0xffffffffu, written, half + i);
      store_four_as<kLanded ? Stay::Usual : Stay::Passing>(state + place(i),
                                                           plus(decayed(shared, i), u, k));
    }
    answer = (answers + written * both) * q_scale;
    return posterior;
  }
};

// A warp asks for the state and the distributions that block number `block` will read, and for its
// share of its row's history, to be brought to the L2 cache. kLanded: the state to be kept.
template <bool kLanded>
__device__ inline void bring_ahead(const SwilaMix& op, int block) {
  constexpr int kPast = (kWidth - 1) * 3 * D;  // the history's floats of a head
  const int row = block / gridDim.x, head = block % gridDim.x;
  if (threadIdx.x % 32 != 0 || row >= int(gridDim.y)) return;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || op.rows.first[row] == 0) return;
  const float* const state = at(op.state, slot) + head * J * D * D;
  constexpr uint32_t kBytes = J * D * D * sizeof(float);
  kLanded ? bulk_prefetch_kept(state, kBytes) : bulk_prefetch(state, kBytes);
  bulk_prefetch(at(op.history, slot) + head * kPast, kPast * sizeof(float));
  if (op.key_mix.data == nullptr) return;
  bulk_prefetch(at(op.posterior, slot) + head * J * D, J * D * sizeof(float));
  bulk_prefetch(at(op.prior, slot) + head * J * D, J * D * sizeof(float));
}
// The same for a token's own vectors.
__device__ inline void bring_vectors_ahead(const SwilaMix& op, int block, bool mixtures) {
  const int row = block / gridDim.x;
  if (row < int(gridDim.y)) {
    bring_vectors(op, op.rows.begin[row], int(block % gridDim.x), mixtures);
  }
}

// The first `early` blocks have their states brought before the predecessor is done. `ahead`: how
// many blocks later the one is whose states a block brings to L2.
template <bool kGated, bool kLanded>
__global__ __launch_bounds__(kThreads, kResident) void swila_held_kernel(
    const __grid_constant__ SwilaMix op, const __grid_constant__ SplitVectors split,
    bool fresh_state, int early, int ahead) {
  __shared__ Vectors shared;
  let_successor_start();
  const int row = blockIdx.y, token = op.rows.begin[row];
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || op.rows.begin[row + 1] - token != 1) {
    wait_for_predecessor();
    return;
  }
  const Here here{int(blockIdx.x), token, op.rows.first[row] == 0,
                  ring_row(op.rows.first[row], kWidth - 1), slot};
  float* const state = at(op.state, slot) + int64_t(here.head) * J * D * D;
  // The thread's own mixture and value; another thread's too.
  const int lane = threadIdx.x % 32, i = lane % kRows, warp = threadIdx.x / 32;
  const int value = warp * 4 + i % 2 * 2 + lane / kLanes, own = i / 2 * D + value;
  const float weight = op.norm_weight[value];
  if (!fresh_state) wait_for_predecessor();
  Input in;
  Held<kGated, kLanded> held;
  load_kept<kGated>(op, here, in);
  const bool brings = warp == kWarps - 1 && block + ahead >= early;
  if (block < early) held.load(state, here.fresh, true);
  if (!kLanded && brings && block < early) bring_ahead<kLanded>(op, block + ahead);
  wait_for_predecessor();
  load_new<kGated>(op, here, in);
  if (block >= early) held.load(state, here.fresh, false);
  if ((kLanded || block >= early) && brings) bring_ahead<kLanded>(op, block + ahead);
  if (kLanded && (warp == 0 || warp == kWarps - 2)) {
    bring_vectors_ahead(op, block + ahead, warp == 0);
  }
  prepare<kGated>(op, here, in, shared);
  __syncthreads();  // the head's vectors are there
  held.arrive(here.fresh);
  float answer;
  const float posterior = held.step(shared, state, own, answer);
  const float out = sum_over_mixtures<2>(answer * shared.prior[own]);
  float squares = out * out;
  squares += __shfl_xor_sync(0xffffffffu, squares, 1);
  squares += __shfl_xor_sync(0xffffffffu, squares, kLanes);
  if (lane == 0) shared.squares[warp] = squares;
  if (op.key_mix.data != nullptr && lane % kLanes < kRows) {
    at(op.posterior, slot)[here.mixed(own)] = posterior;
  }
  __syncthreads();  // all sums are there
  if (lane % kLanes < 2) finish(op, here, value, out, weight, shared, split);
}

template <bool kGated, bool kLanded>
void start(const SwilaMix& op, Context& context) {
  const size_t landing = kLanded ? J * D * D * sizeof(float) : 0;
  const SplitVectors split = leave_split(op.out, op.heads * D, op.rows.tokens, context);
  const auto kernel = swila_held_kernel<kGated, kLanded>;
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(landing)));
  launch(context,
         {.grid = dim3(op.heads, op.rows.count), .block = dim3(kThreads), .shared = landing},
         kernel, op, split, context.fresh_state,
         context.fresh_state ? kResident * context.multiprocessors : 0, context.multiprocessors);
}

}  // namespace

bool holds(const SwilaMix& op) {
  return op.mixtures == J && op.dim == D && op.conv_width == kWidth &&
         op.rows.count * op.heads >= kHeads && !op.rows.computed;
}

void run_held(const SwilaMix& op, Context& context) {
  if (op.rows.count * op.heads < kManyHeads) {
    return op.gated ? start<true, false>(op, context) : start<false, false>(op, context);
  }
  op.gated ? start<true, true>(op, context) : start<false, true>(op, context);
}

}  // namespace weir::cuda::swila
