#pragma once
#include "kernels/held_landing_cuda.cuh"
#include "kernels/swila_held_pending_cuda.cuh"

// A head's state for swila_deferring_kernel, in shared memory, where it lies as in device memory. A
// warp has four values of each mixture; 16 lanes share a row, two rows a load.
namespace weir::cuda::swila_held {

using held::Landing;
static_assert(Landing::kPieces == J && Landing::kPiece == D * D);  // a mixture each

struct HeldState {
  // The lane's row number i is one of mixture i / 2: its value, of the head's.
  __device__ static int value(int i) {
    return int(threadIdx.x / 32 * 4 + threadIdx.x % 32 / kLanes) + i % 2 * 2;
  }
  // Where the lane's part of it begins, in floats.
  __device__ static int place(int i) {
    return (i / 2 * D + value(i)) * D + 4 * int(threadIdx.x % kLanes);
  }
  __device__ static float4& at(int i) { return Landing::at(place(i)); }

  __device__ static void load(const float* head, bool fresh, uint64_t* barriers) {
    Landing::load(head, fresh, barriers, [](const auto& own) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) own(place(i));
    });
  }

  // What a thread has of its own (mixture, value); another thread has the same.
  struct Step {
    float answer, posterior, written;
  };
  template <bool kGated>
  __device__ static Step step(const Vectors& of, const Waiting<kGated>& waiting, int own,
                              bool fresh, const uint64_t* barriers) {
    const int lane = threadIdx.x % kLanes;
    // Lane i has what row i recalls, lane 8 + i what it answers.
    float mine;
    {
      const float* ks = of.vectors + D;
      const float* qs = of.vectors;
      if constexpr (kGated) ks = waiting.decayed.k, qs = waiting.decayed.q;
      float sum[2 * kRows];
#pragma unroll
      for (int j = 0; j < J; ++j) {
        const float4 k = fours(ks + (kGated ? j * D : 0))[lane];
        const float4 q = fours(qs + (kGated ? j * D : 0))[lane];
        Landing::await(fresh, j, 0, barriers);
#pragma unroll
        for (int i = 2 * j; i < 2 * j + 2; ++i) {
          const float4 x = at(i);
          sum[i] = dot(x, k);
          sum[kRows + i] = dot(x, q);
        }
      }
      mine = scatter_sums<2 * kRows>(sum);
    }
    const int group = kGated ? lane % kRows / 2 : 0;
    const float4 product = *fours(waiting.product[group][lane / kRows]);
    mine += waiting.value[0][own] * product.x + waiting.value[1][own] * product.y +
            waiting.value[2][own] * product.z;
    const float other = __shfl_xor_sync(0xffffffffu, mine, kRows);
    const bool answers = lane & kRows;
    const float4 scale = waiting.scale;
    const float delta = of.vectors[2 * D + own % D] - (answers ? other : mine) * scale.y;
    const float posterior = softmax<2>(of.log_prior[own] - delta * delta / 2);
    const float written = of.write[own] * posterior * delta * scale.y;
    return {.answer = ((answers ? mine : other) + written * scale.z) * scale.x,
            .posterior = posterior, .written = written};
  }

  // The state and all that is added to it, to device memory.
  template <bool kGated>
  __device__ static void write(const Vectors& of, const Waiting<kGated>& waiting, float written,
                               float* head) {
    const int lane = threadIdx.x % kLanes, half = threadIdx.x % 32 - lane;
    const float4 k = fours(of.vectors + D)[lane];
    float4 key[kPendingMost];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i == 0 || (kGated && i % 2 == 0)) {
#pragma unroll
        for (int u = 0; u < kPendingMost; ++u) key[u] = fours(waiting.key[u] + i / 2 * D)[lane];
      }
      float4 next = at(i);
      if constexpr (kGated) next = times(next, fours(waiting.decayed.decay + i / 2 * D)[lane]);
#pragma unroll
      for (int u = 0; u < kPendingMost; ++u) {
        next = plus(next, waiting.value[u][i / 2 * D + value(i)], key[u]);
      }
      const float now = __shfl_sync(0xffffffffu, written, half + i);
      store_four_as<Stay::Usual>(head + place(i), plus(next, now, k));
    }
  }
};

}  // namespace weir::cuda::swila_held
