#pragma once
#include "kernels/cuda_util.cuh"
#include "kernels/ring.h"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda::swila {

// The state of a head in registers. With J mixtures, 32 / J neighbouring threads share a row
// S[j][d] and a warp holds, of each mixture, as many value dims d: after the dot products are
// summed and handed out, each thread of the warp has one (j, d) for itself, with which it computes
// priors, posterior and write strength; the mixtures of one d are 32 / J threads apart. Every
// thread holds D numbers of the state, whatever J is.
//
// Floor, one token a row: the state read once and written once, 8 J D^2 bytes per head and row.
template <int kMixtures, int kDim>
struct Layout {
  static constexpr int J = kMixtures, D = kDim;
  static constexpr int kLanes = 32 / J;                // threads of a row, value dims of a warp
  static constexpr int kParts = D / (4 * kLanes);      // of 16 bytes, of a row, in a thread
  static constexpr int kThreads = J * D, kWarps = kThreads / 32;  // of a block: of a head
  static constexpr int kOwn = (3 * D + kThreads - 1) / kThreads;  // channels a thread convolves
  static constexpr int kResident = 65536 / 128 / kThreads;  // blocks of 128 registers a thread
  static_assert(D % (4 * kLanes) == 0 && kThreads % 32 == 0);
};

inline constexpr int kWidth = 4;  // of the convolution

template <class L>
struct Shared {
  alignas(16) float vectors[3 * L::D];    // q, k (not normalised), v
  alignas(16) float decay[L::J * L::D];   // [mixture, key dim], exp(g)
  float squares[L::kWarps];               // of each warp's outputs
};

// Where the thread is.
struct Place {
  int head;
  int mixture, value;    // the thread's own (j, d)
  int begin;             // the token it starts with, in the step
  int first;             // that token's position
  Slot slot;

  __device__ bool fresh() const { return first == 0; }  // from a zero state
};

template <class L>
__device__ inline Place place_of(int head, int begin, int first, Slot slot) {
  const int lane = threadIdx.x % 32;
  return {.head = head, .mixture = lane / L::kLanes,
          .value = int(threadIdx.x) / 32 * L::kLanes + lane % L::kLanes, .begin = begin,
          .first = first, .slot = slot};
}

// What a thread's own (j, d) needs for one token, and carries to the next.
struct Mixed {
  float posterior, prior;  // r and rho
  float log_prior, write;  // of the key; sigmoid(beta)
};

// The logits of a thread's own (j, d), and of the mixes of d with the last token's distributions.
struct Logits {
  float key_router, query_router, beta, key_mix = 0, query_mix = 0;
};

template <int kLanes>
__device__ inline float softmax_over_mixtures(float x) {
  float largest = x;
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  x = expf(x - largest);
  return x / sum_over_groups<kLanes>(x);
}

template <class L>
__device__ inline void mix(const Logits& in, bool temporal, Mixed& mine) {
  float key = softmax_over_mixtures<L::kLanes>(in.key_router);
  float query = softmax_over_mixtures<L::kLanes>(in.query_router);
  if (temporal) {
    const float from_key = sigmoid(in.key_mix), from_query = sigmoid(in.query_mix);
    key = (1.0f - from_key) * mine.posterior + from_key * key;
    query = (1.0f - from_query) * mine.prior + from_query * query;
  }
  mine.log_prior = logf(key);
  mine.prior = query;
  mine.write = sigmoid(in.beta);
}

// The thread's part of the head's state.
template <class L>
struct State {
  float4 row[L::kLanes][L::kParts];

  // Where it begins in a head's state.
  __device__ static int64_t first(const Place& place) {
    const int lane = int(threadIdx.x) % L::kLanes;
    return (place.mixture * L::D + place.value - lane) * L::D + 4 * lane;
  }
  __device__ static float4* part(float* first, int r, int c) {
    return reinterpret_cast<float4*>(first) + (r * L::D / 4 + c * L::kLanes);
  }
  __device__ void load(float* first, bool fresh) {
#pragma unroll
    for (int r = 0; r < L::kLanes; ++r) {
#pragma unroll
      for (int c = 0; c < L::kParts; ++c) {
        row[r][c] = fresh ? float4{0, 0, 0, 0} : *part(first, r, c);
      }
    }
  }
  __device__ void store(float* first) const {
#pragma unroll
    for (int r = 0; r < L::kLanes; ++r) {
#pragma unroll
      for (int c = 0; c < L::kParts; ++c) *part(first, r, c) = row[r][c];
    }
  }

  // One token: the state moves on, and the thread's own (j, d) answers sum_e S[j][d][e] q[e]. Given
  // are q, k and v, one after the other, and exp(g).
  template <bool kGated>
  __device__ float step(const float* q_k_v, const float* decays, Mixed& mine) {
    const int lane = threadIdx.x % L::kLanes, group = threadIdx.x % 32 - lane;
    const auto* vectors = reinterpret_cast<const float4*>(q_k_v);
    float4 k[L::kParts], q[L::kParts];
    const auto read = [&](float4 (&part)[L::kParts], int vector) {
      float squares = 0;
#pragma unroll
      for (int c = 0; c < L::kParts; ++c) {
        part[c] = vectors[vector * L::D / 4 + c * L::kLanes + lane];
        squares += dot(part[c], part[c]);
      }
      return 1.0f / sqrtf(sum_over_lanes<L::kLanes>(squares) + 1e-6f);
    };
    const float k_scale = read(k, 1);
    float sum[L::kLanes];
#pragma unroll
    for (int r = 0; r < L::kLanes; ++r) sum[r] = 0;
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      k[c] = scaled(k[c], k_scale);
      float4 decay;
      if constexpr (kGated) {
        const int mixture = threadIdx.x % 32 / L::kLanes;
        decay = reinterpret_cast<const float4*>(
            decays)[mixture * L::D / 4 + c * L::kLanes + lane];
      }
#pragma unroll
      for (int r = 0; r < L::kLanes; ++r) {
        if constexpr (kGated) row[r][c] = times(row[r][c], decay);
        sum[r] += dot(row[r][c], k[c]);
      }
    }
    const float recalled = scatter_sums<L::kLanes>(sum);
    const int value = threadIdx.x / 32 * L::kLanes + lane;
    const float delta = q_k_v[2 * L::D + value] - recalled;
    mine.posterior = softmax_over_mixtures<L::kLanes>(mine.log_prior - delta * delta / 2);
    const float written = mine.write * mine.posterior * delta;
    const float q_scale = read(q, 0);
#pragma unroll
    for (int r = 0; r < L::kLanes; ++r) {
      const float u = __shfl_sync(0xffffffffu, written, group + r);
      sum[r] = 0;
#pragma unroll
      for (int c = 0; c < L::kParts; ++c) {
        row[r][c] = plus(row[r][c], u, k[c]);
        sum[r] += dot(row[r][c], q[c]);
      }
    }
    return scatter_sums<L::kLanes>(sum) * q_scale;
  }
};

// One channel that a thread convolves, with its last inputs, oldest first.
struct Channel {
  const float* in = nullptr;   // of the row's first token
  int64_t stride = 0;
  float tap[kWidth], x[kWidth];

  // The next input's answer.
  __device__ float push(float next) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      x[j] = j + 1 < kWidth ? x[j + 1] : next;
      sum += tap[j] * x[j];
    }
    return sum * sigmoid(sum);
  }
};

// Channel i of the head: of q, k or v (group 0, 1, 2).
template <class L>
__device__ inline float* history_of(const SwilaMix& op, const Place& place, int i) {
  const int channels = op.heads * L::D;
  return at(op.history, place.slot) + (i / L::D * channels + place.head * L::D + i % L::D);
}

// Rows of one token, heads of four mixtures of 64x64, if they are enough (swila_held_cuda.cu).
bool holds(const SwilaMix& op);
void run_held(const SwilaMix& op, Context& context);
// The same with deferred writes (swila_deferring_cuda.cu). Longer rows are left alone.
void run_deferring(const SwilaMix& op, Context& context);

// Any number of mixtures, dim and width of the convolution (swila_any_cuda.cu); slow.
void run_any(const SwilaMix& op, Context& context);

}  // namespace weir::cuda::swila
