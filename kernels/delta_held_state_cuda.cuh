#pragma once
#include "kernels/delta_held_vectors_cuda.cuh"
#include "kernels/held_landing_cuda.cuh"

// A head's state for held_kernel: each of 16 warps has eight rows, of which eight lanes share one.
namespace weir::cuda::held {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kWarpRows = kDim / kWarps;         // of a warp
constexpr int kRows = 2, kParts = 4;             // of a lane: rows, and of each so many four keys
constexpr int kApart = kWarpRows / kRows;        // a lane's rows are so far from each other
static_assert(Landing::kFloats == kDim * kDim && Landing::kBringer == kThreads - 32);

// What the warps leave.
struct Answers {
  alignas(16) float answer[kDim];
  alignas(16) float squares[kWarps];
};

__device__ inline int first_row() { return int(threadIdx.x) / 32 * kWarpRows; }
// The lane's row number r, of the head's.
__device__ inline int row_of(int r) {
  return first_row() + r * kApart + int(threadIdx.x) % 32 / 8;
}
// Where the lane's part j of it begins, in floats.
__device__ inline int place_of(int r, int j) {
  return row_of(r) * kDim + j * 32 + int(threadIdx.x) % 8 * 4;
}
__device__ inline float4 part(const float* vector, int j) {
  return reinterpret_cast<const float4*>(vector)[j * 8 + threadIdx.x % 8];
}

struct State {
  __device__ static float4& at(int r, int j) { return Landing::at(place_of(r, j)); }
  __device__ static void load(const float* head, bool fresh, uint64_t* barriers) {
    Landing::load(head, fresh, barriers, [](const auto& own) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kParts; ++j) own(place_of(r, j));
      }
    });
  }
  // Before step(), for the block's head number `turn`.
  __device__ static void arrive(bool fresh, int turn, const uint64_t* barriers) {
    Landing::await(fresh, threadIdx.x / (kThreads / Landing::kPieces), turn, barriers);
  }

  // Steps the state and stores it, or leaves the update with those that wait.
  template <bool kDefers>
  __device__ static void step(const DeltaMix& op, const Place& place, const Pending& pending,
                              const Vectors<kDefers>& x, Answers& to) {
    const int lane = threadIdx.x % 32;
    float sum[2 * kRows] = {};
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const float4 recalls = part(x.recalls, j), answers = part(x.answers, j);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 held = at(r, j);
        sum[r] += dot(held, recalls);
        sum[kRows + r] += dot(held, answers);
      }
    }
    // Of eight lanes that share rows, those with a 2 in their number have what row `lane % 2`
    // answers, the others what it recalls; two lanes the same.
    float mine = scatter_sums<2 * kRows>(sum);
    mine += __shfl_xor_sync(0xffffffffu, mine, 4);
    const int own = row_of(lane % 2);
    if constexpr (kDefers) {
#pragma unroll
      for (int i = 0; i < kPendingMost; ++i) {
        mine += x.waiting.value[i][own] * x.product[i + (lane & 2 ? kAnswered : kRecalled)];
      }
    }
    const float q_scale =
        delta::scale_of(op.qk_norm, x.product[kOfQuery]) * rsqrtf(float(kDim));
    const float k_scale = delta::scale_of(op.qk_norm, x.product[kOfKey]);
    const float u = (x.v[own] - mine * k_scale) * k_scale;
    const float answer =
        (mine + __shfl_sync(0xffffffffu, u, lane & ~2) * x.product[kBoth]) * q_scale;
    const bool answers = (lane & 6) == 2;
    if (answers) to.answer[own] = answer;
    float squares = answers ? answer * answer : 0.0f;
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares = sum_over_groups<8>(squares);
    if (lane == 2) to.squares[threadIdx.x / 32] = squares;
    if constexpr (kDefers) {
      if (!pending.writes) {
        if ((lane & 6) == 0) pending.values(op, place, pending.count)[own] = u;
        return;
      }
    }
    float* const head = place.state(op);
    float wrote[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) wrote[r] = __shfl_sync(0xffffffffu, u, (lane & 24) + r);
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const float4 decay = part(x.state_decay(), j), k = part(x.k, j);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float4 next = times(at(r, j), decay);
        if constexpr (kDefers) {
#pragma unroll
          for (int i = 0; i < kPendingMost; ++i) {
            next = plus(next, x.waiting.value[i][row_of(r)], part(x.waiting.key[i], j));
          }
        }
        store_four_as<Stay::Usual>(head + place_of(r, j), plus(next, wrote[r], k));
      }
    }
  }
};

}  // namespace weir::cuda::held
