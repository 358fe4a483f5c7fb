#pragma once
#include "kernels/async_cuda.cuh"
#include "kernels/cached_cuda.cuh"
#include "kernels/held_row_cuda.cuh"

// Which head a block of held_kernel has, and which a later one has, whose states and vectors it
// brings to the L2 cache.
namespace weir::cuda::held {

constexpr int kDim = 128;               // of keys and of values
constexpr int kWidth = 4;               // of the convolutions
constexpr PendingLayout kLayout{.values = kDim, .key_dim = kDim};

// Value heads that share a key head are those of one block, in turn, or of a cluster's blocks: each
// prepares q and k then, and the last one writes their history. Alone: none share one.
enum class Sharing { Alone, Turns, Cluster };

// Which heads are a block's.
struct HeadPlan {
  Plan blocks;
  int history = 0;     // a block's share of its row's history, floats
  int group = 1;       // value heads of a key head
  int group_bits = 0;  // its logarithm, in clusters
};

template <Sharing kSharing>
__device__ inline int heads_of_block(const HeadPlan& plan) {
  return kSharing == Sharing::Turns ? plan.group : 1;
}
template <Sharing kSharing>
__device__ inline int key_head_of(const HeadPlan& plan, int x) {
  return kSharing == Sharing::Cluster ? x >> plan.group_bits : x;
}
__device__ inline int decay_head_of(const DeltaMix& op, int value_head) {
  if (op.decay_heads == op.value_heads) return value_head;
  return value_head * op.decay_heads / op.value_heads;
}

// Of a row of the history.
__device__ inline int channels_of(const DeltaMix& op) {
  return (2 * op.key_heads + op.value_heads) * kDim;
}

template <Sharing kSharing>
struct Ahead : Later {
  // A warp asks for the block's states, to be kept; for its share of its row's history; and for
  // what waits beside the states, of a head alone as far as there is any.
  template <bool kDefers>
  __device__ void bring_states(const DeltaMix& op, const HeadPlan& plan) const {
    const int lane = threadIdx.x % 32, heads = heads_of_block<kSharing>(plan);
    if (lane > 2 || !row.steps() || row.first == 0) return;
    if (lane == 0) {
      constexpr int kFloats = kDim * kDim;
      bulk_prefetch_kept(at(op.state, row.slot) + x * heads * kFloats,
                         uint32_t(heads * kFloats * sizeof(float)));
    } else if (lane == 1) {
      bulk_prefetch(at(op.history, row.slot) + x * plan.history,
                    uint32_t(plan.history * sizeof(float)));
    } else if constexpr (kDefers) {
      constexpr int kFloats = kLayout.floats(), kKeys = kLayout.keys(),
                    kUpdate = kLayout.update_floats();
      const int count = pending_updates(row.first, row.written, x * heads);
      if (count == 0 && heads == 1) return;
      const int floats = heads == 1 ? kKeys + count * kUpdate : heads * kFloats;
      bulk_prefetch(at(op.pending, row.slot) + x * heads * kFloats,
                    uint32_t(floats * sizeof(float)));
    }
  }

  // A warp asks for the raw vectors of the block's first head, 32 floats a lane: where so many
  // states pass through the L2 cache, they are there no longer. Kept until they are read.
  __device__ void bring_vectors(const DeltaMix& op, const HeadPlan& plan) const {
    constexpr int kLines = kDim / 32;  // of a vector
    if (!row.steps()) return;
    const int lane = threadIdx.x % 32, value_head = x * heads_of_block<kSharing>(plan);
    const int key_head = key_head_of<kSharing>(plan, x);
    const float* from = nullptr;
    int64_t stride = 0;
    int head = value_head;
    switch (lane / kLines) {
      case 0: from = op.q.data, stride = op.q.stride, head = key_head; break;
      case 1: from = op.k.data, stride = op.k.stride, head = key_head; break;
      case 2: from = op.v.data, stride = op.v.stride; break;
      case 3: from = op.gate.data, stride = op.gate.stride; break;
      case 4: from = op.write.data, stride = op.write.stride; break;
      case 5: from = op.erase.data, stride = op.erase.stride, head = key_head; break;
      case 6:
        if (op.decay != Decay::PerChannel) return;
        from = op.decay_in.data, stride = op.decay_in.stride;
        head = decay_head_of(op, value_head);
    }
    if (from == nullptr) return;
    prefetch_line_kept(from + row.token * stride + (head * kLines + lane % kLines) * 32);
  }
};

}  // namespace weir::cuda::held
