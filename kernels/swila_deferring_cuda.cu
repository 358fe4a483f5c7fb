#include "kernels/long_rows_cuda.cuh"
#include "kernels/swila_held_state_cuda.cuh"

namespace weir::cuda::swila {
namespace {

using namespace swila_held;

// As swila_held_kernel with the state passing through shared memory, for heads that leave their
// updates waiting (pending.h) and write their state each in turn. With P = S diag(decay) +
// sum_i u_i key_i', the state as it is remembered, a row recalls P k = S (decay * k) +
// sum_i u_i (key_i' k), and answers likewise; the products of the keys are made once a head, by the
// warps that have no mixtures to prepare.
//
// Floor: the state read once, and a fourth of it written once, 5 J D^2 bytes per head and row.
template <bool kGated>
struct Shared {
  uint64_t barrier[Landing::kPieces];
  Vectors vectors;
  Waiting<kGated> waiting;
};

// A block's head is its x.
struct Ahead : held::Later {
  // A warp asks for the block's state, to be kept, for what waits beside it, for its distributions
  // and for its share of its row's history.
  template <bool kGated>
  __device__ void bring_states(const SwilaMix& op) const {
    constexpr int kPast = (kWidth - 1) * 3 * D;  // the history's floats of a head
    const int lane = threadIdx.x % 32;
    if (lane > 4 || !row.steps() || row.first == 0) return;
    if (lane == 0) {
      bulk_prefetch_kept(at(op.state, row.slot) + x * J * D * D, J * D * D * sizeof(float));
      return;
    }
    const float* from = at(op.history, row.slot) + x * kPast;
    int floats = kPast;
    if (lane == 2) {
      const Pending<kGated> pending(op, row, x);
      from = pending.data;
      floats = pending.floats();
    } else if (lane > 2) {
      from = at(lane == 3 ? op.posterior : op.prior, row.slot) + x * J * D;
      floats = op.key_mix.data == nullptr ? 0 : J * D;
    }
    if (floats > 0) bulk_prefetch(from, uint32_t(floats * sizeof(float)));
  }
  __device__ void bring_vectors(const SwilaMix& op, bool mixtures) const {
    if (row.steps()) swila_held::bring_vectors(op, row.token, x, mixtures);
  }
};

template <bool kGated>
__global__ __launch_bounds__(kThreads, kResident) void swila_deferring_kernel(
    const __grid_constant__ SwilaMix op, const __grid_constant__ SplitVectors split,
    const __grid_constant__ held::Plan plan, bool fresh_state) {
  __shared__ Shared<kGated> shared;
  let_successor_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = threadIdx.x % kRows;
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  held::Row row;
  row.load<true>(op.rows, blockIdx.y);
  const bool brings_states = warp == Landing::kBringer / 32 && block + plan.ahead >= plan.early;
  const bool brings_vectors = warp == 0 || warp == kWarps - 2;
  Ahead next;
  if (brings_states || brings_vectors) next.load<true>(op.rows, plan);
  if (!row.steps()) {
    wait_for_predecessor();
    return;
  }
  const Here here{int(blockIdx.x), row.token, row.first == 0, ring_row(row.first, kWidth - 1),
                  row.slot};
  float* const state = at(op.state, here.slot) + here.head * (J * D * D);
  const int value = HeldState::value(i), own = i / 2 * D + value;  // of the thread's own row
  const float weight = op.norm_weight[value];
  if (!fresh_state) wait_for_predecessor();
  Landing::open(shared.barrier);
  const Pending<kGated> pending(op, row, here.head);
  Input in;
  Kept<kGated> kept;
  load_kept<kGated>(op, here, in);
  if (!mixes()) kept.load(pending);
  if (block < plan.early) HeldState::load(state, here.fresh, shared.barrier);
  wait_for_predecessor();
  load_new<kGated>(op, here, in);
  if (block >= plan.early) HeldState::load(state, here.fresh, shared.barrier);
  if (brings_states) next.bring_states<kGated>(op);
  if (brings_vectors) next.bring_vectors(op, warp == 0);
  prepare<kGated>(op, here, in, shared.vectors);
  if (!mixes()) multiply(pending, kept, shared.vectors, shared.waiting);
  __syncthreads();  // the head's vectors are there
  const HeldState::Step step =
      HeldState::step(shared.vectors, shared.waiting, own, here.fresh, shared.barrier);
  const bool keeps = lane % kLanes < kRows;  // of two threads of a row, this one
  if (pending.writes) {
    HeldState::write(shared.vectors, shared.waiting, step.written, state);
  } else if (keeps) {
    pending.value(pending.count)[own] = step.written;
  }
  const float out = sum_over_mixtures<2>(step.answer * shared.vectors.prior[own]);
  float squares = out * out;
  squares += __shfl_xor_sync(0xffffffffu, squares, 1);
  squares += __shfl_xor_sync(0xffffffffu, squares, kLanes);
  if (lane == 0) shared.vectors.squares[warp] = squares;
  if (op.key_mix.data != nullptr && keeps) {
    at(op.posterior, here.slot)[here.mixed(own)] = step.posterior;
  }
  __syncthreads();  // all sums are there
  if (lane % kLanes < 2) finish(op, here, value, out, weight, shared.vectors, split);
}

template <bool kGated>
void start(const SwilaMix& op, Context& context) {
  // Longer rows have their answers from kernels that do not leave them split.
  const bool alone = op.rows.tokens == op.rows.count;
  const SplitVectors split =
      alone ? leave_split(op.out, op.heads * D, op.rows.tokens, context) : SplitVectors{};
  const auto kernel = swila_deferring_kernel<kGated>;
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Landing::kBytes));
  const int early = context.fresh_state ? kResident * context.multiprocessors : 0;
  const auto plan = held::Plan::of(op.heads, early, context.multiprocessors * 5 / 4);
  launch(context,
         {.grid = dim3(op.heads, single_rows(op.rows)), .block = dim3(kThreads),
          .shared = Landing::kBytes},
         kernel, op, split, plan, context.fresh_state);
}

}  // namespace

void run_deferring(const SwilaMix& op, Context& context) {
  if (single_rows(op.rows) == 0) return;
  op.gated ? start<true>(op, context) : start<false>(op, context);
}

}  // namespace weir::cuda::swila
