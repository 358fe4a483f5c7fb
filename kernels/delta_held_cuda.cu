#include <bit>

#include "kernels/delta_held_state_cuda.cuh"
#include "kernels/delta_stream_cuda.cuh"
#include "kernels/long_rows_cuda.cuh"

namespace weir::cuda {
namespace {

using namespace held;

// For rows of one token each, heads of 128 keys and 128 values: a block of 16 warps holds a head's
// whole state, 4 KB a warp, and two blocks share a multiprocessor. Everything that a block reads is
// asked for at once; four warps prepare the head's vectors while the state is on its way to shared
// memory, where nothing that waits for a vector waits for it too; and the copy engine brings what a
// later block will read to the L2 cache.
//
// What the state recalls and what it answers are summed together, before the state is changed: with
// P = S diag(exp g),
//
//   u = beta (v - P k),   S' = P + u k',   S' q = P q + u (k' q).
//
// Where writes are deferred (pending.h), P has the updates that wait too, each a dot product with k
// and one with q, and a head that does not write leaves its update with them.
//
// Floor: as delta_mix_kernel, 8 * 128 * 128 bytes a head: 4.3 us of a multiprocessor's share of a
// copy. Deferred, the state read once, a fourth of it written, and what waits: 2.8 us.
constexpr int kResident = 2;  // blocks of a multiprocessor

template <bool kDefers>
struct Shared {
  uint64_t barrier[Landing::kPieces];
  Vectors<kDefers> vectors;
  Answers answers;
};

// out = rms(o) * norm_weight [* gate_act(gate)], by the finisher, which has the factors.
__device__ inline void finish(const DeltaMix& op, const Place& place, float4 factors,
                              Answers& from, const SplitVectors& split) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += from.squares[w];
  const float scale = rsqrtf(sum / float(kDim) + op.norm_eps);
  const float4 out = scaled(times(lane_of(from.answer), factors), scale);
  const int column = place.column(kFinisher);
  store_four(at(op.out, place.token) + column, out);
  store_split(split, int64_t(place.token) * op.value_heads * kDim + column, out);
}

template <Sharing kSharing, bool kDefers>
__global__ __launch_bounds__(kThreads, kResident) void held_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ SplitVectors split,
    const __grid_constant__ HeadPlan plan, bool fresh_state) {
  __shared__ Shared<kDefers> shared;
  let_successor_start();
  const int warp = threadIdx.x / 32, heads = heads_of_block<kSharing>(plan);
  const int block = blockIdx.y * gridDim.x + blockIdx.x, product = warp - kFirstProduct;
  const auto role = Role(warp);
  Row row;
  row.load<kDefers>(op.rows, blockIdx.y);
  const bool brings_states = warp == kWarps - 1 && block + plan.blocks.ahead >= plan.blocks.early;
  const bool brings_vectors = warp == kWarps - 2;
  Ahead<kSharing> next;
  if (brings_states || brings_vectors) next.template load<kDefers>(op.rows, plan.blocks);
  if (!row.steps()) {
    wait_for_predecessor();
    return;
  }
  if (!fresh_state) wait_for_predecessor();
  Place place{.key_head = key_head_of<kSharing>(plan, blockIdx.x),
              .value_head = int(blockIdx.x) * heads, .slot = row.slot, .token = row.token,
              .fresh = row.first == 0, .oldest = ring_row(row.first, kWidth - 1)};
  Landing::open(shared.barrier);
#pragma unroll 1
  for (int i = 0; i < heads; ++i, ++place.value_head) {
    place.decay_head = decay_head_of(op, place.value_head);
    place.keeps = kSharing != Sharing::Turns || i + 1 == heads;
    Pending pending;
    if constexpr (kDefers) pending.open(row, place.value_head);
    const bool first = i == 0 && block < plan.blocks.early;
    if (first) State::load(place.state(op), place.fresh, shared.barrier);
    float4 factors{};
    if (warp <= kFinisher) {
      Raw raw;
      raw.load_kept(op, place, role);
      if (i == 0) wait_for_predecessor();
      raw.load_new(op, place, role);
      if (!first) State::load(place.state(op), place.fresh, shared.barrier);
      factors = prepare<kSharing>(op, place, role, raw, pending, shared.vectors);
      if (role <= kKey) say_made<kHearing<kDefers>>();
    } else {
      Kept kept;
      if (kDefers && multiplies<kDefers>(product)) kept.load(op, place, pending, product);
      if (i == 0) wait_for_predecessor();
      if (!first) State::load(place.state(op), place.fresh, shared.barrier);
      if (i == 0 && brings_states) next.template bring_states<kDefers>(op, plan);
      if (i == 0 && brings_vectors) next.bring_vectors(op, plan);
      if (multiplies<kDefers>(product)) multiply(op, place, product, pending, kept, shared.vectors);
    }
    __syncthreads();  // the head's vectors are there
    if (kSharing == Sharing::Cluster) cluster_started();  // this block has read the history
    State::arrive(place.fresh, i, shared.barrier);
    State::step<kDefers>(op, place, pending, shared.vectors, shared.answers);
    __syncthreads();  // the head's answer is there, and its vectors may be overwritten
    if (role == kFinisher) finish(op, place, factors, shared.answers, split);
  }
  if (kSharing == Sharing::Cluster) {
    wait_for_cluster();  // all blocks that read the history of q and k have done so
    if (role <= kKey && (int(blockIdx.x) & (plan.group - 1)) == plan.group - 1) {
      keep_input(op, place, role, lane_of(shared.vectors.kept[role]));
    }
  }
}

template <Sharing kSharing, bool kDefers>
void start(const DeltaMix& op, Context& context) {
  const SplitVectors split =
      leave_split(op.out, op.value_heads * kDim, op.rows.tokens, context);
  const auto kernel = held_kernel<kSharing, kDefers>;
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Landing::kBytes));
  const int group = op.value_heads / op.key_heads;
  const int blocks = kSharing == Sharing::Cluster ? op.value_heads : op.key_heads;  // of a row
  const int early = context.fresh_state ? kResident * context.multiprocessors : 0;
  const HeadPlan plan{
      .blocks = Plan::of(blocks, early, context.multiprocessors * (kDefers ? 10 : 7) / 8),
      .history = (kWidth - 1) * (2 * op.key_heads + op.value_heads) * kDim / blocks,
      .group = group, .group_bits = std::countr_zero(unsigned(group))};
  launch(context,
         {.grid = dim3(blocks, single_rows(op.rows)), .block = dim3(kThreads),
          .shared = Landing::kBytes, .cluster = kSharing == Sharing::Cluster ? group : 1},
         kernel, op, split, plan, context.fresh_state);
}

template <bool kDefers>
void start(const DeltaMix& op, Context& context) {
  const int group = op.value_heads / op.key_heads;
  if (group == 1) return start<Sharing::Alone, kDefers>(op, context);
  if (context.compute >= 90 && (group == 2 || group == 4 || group == 8)) {
    return start<Sharing::Cluster, kDefers>(op, context);
  }
  start<Sharing::Turns, kDefers>(op, context);
}

bool fours(const float* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
bool fours(const SlotState& state) { return fours(state.data) && state.stride % 4 == 0; }

}  // namespace

bool holds(const DeltaMix& op, const Context& context) {
  bool all = fours(op.state) && fours(op.history) && fours(op.pending);
  for (const Acts& acts : {op.q, op.k, op.v, op.erase, op.write, op.gate, op.out}) {
    all = all && by_fours(acts);
  }
  for (const float* weights : {op.conv_q, op.conv_k, op.conv_v, op.conv_q_bias, op.conv_k_bias,
                               op.conv_v_bias, op.norm_weight}) {
    all = all && fours(weights);
  }
  if (op.decay == Decay::PerChannel) all = all && by_fours(op.decay_in) && fours(op.dt_bias);
  return all && context.compute >= 80 && op.key_dim == kDim && op.value_dim == kDim &&
         op.conv_width == kWidth;
}

void run_held(const DeltaMix& op, Context& context) {
  op.pending.data == nullptr ? start<false>(op, context) : start<true>(op, context);
}

}  // namespace weir::cuda
