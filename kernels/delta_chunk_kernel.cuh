#pragma once
#include "kernels/delta_chunk_products.cuh"

namespace weir::cuda::chunk {


// The warps that hold the state: 16 values of the head each, all keys. Every product of a chunk is
// the warp's own, from the state on; only the norm needs the others.
template <int K, bool kChannel, int kWarps>
struct Consumer {
  using Shared = Layout<K, kChannel, kWarps>;
  static constexpr int kTiles = K / 8, kTokenTiles = kTokens / 8, kThreads = 32 * kWarps;
  const DeltaMix& op;
  const Place& place;
  Shared& shared;
  int warp, g, p;  // of the consumers; the lane's row and column of a fragment
  float S[kTiles][4];           // [value, key]
  float R[kTokenTiles][4];      // [value, token]: what the state recalls, then U
  float O[kTokenTiles][4];      // [value, token]

  __device__ Consumer(const DeltaMix& op, const Place& place, Shared& shared)
      : op(op), place(place), shared(shared), warp((threadIdx.x - kPreparers) / 32),
        g(threadIdx.x % 32 / 4), p(threadIdx.x % 4 * 2) {}

  __device__ float* state_row(float* state, int half_row) const {
    const int value = place.value + 16 * warp + g + 8 * half_row;
    return state + (int64_t(place.value_head) * op.value_dim + value) * K + p;
  }
  __device__ void load_state(float* state) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 pair{0, 0};
        if (!place.fresh) pair = *reinterpret_cast<float2*>(state_row(state, h) + 8 * n);
        S[n][2 * h] = pair.x;
        S[n][2 * h + 1] = pair.y;
      }
    }
  }
  __device__ void store_state(float* state) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<float2*>(state_row(state, h) + 8 * n) = {S[n][2 * h], S[n][2 * h + 1]};
      }
    }
  }

  // R = S k and O = S q for every token, as the chunk's first state has them.
  __device__ void ask_state(const typename Shared::Stage& in) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) R[n][i] = O[n][i] = 0;
    }
    const uint32_t keys = rows_of_b(in.k, Shared::kKeyPitch);
    const uint32_t queries = rows_of_b(in.q, Shared::kKeyPitch);
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      uint32_t state[4];
      narrow(state, S[2 * i], S[2 * i + 1]);
#pragma unroll
      for (int n = 0; n < kTokens / 16; ++n) {
        const uint32_t at = 2 * (n * 16 * Shared::kKeyPitch + i * 16);
        uint32_t k[4], q[4];
        load_matrices(k, keys + at);
        load_matrices(q, queries + at);
        multiply(R[2 * n], state, k[0], k[1]);
        multiply(R[2 * n + 1], state, k[2], k[3]);
        multiply(O[2 * n], state, q[0], q[1]);
        multiply(O[2 * n + 1], state, q[2], q[3]);
      }
    }
  }

  // A token's number for each of this thread's columns of tile n.
  __device__ float2 columns(const float* of_token, int n) const {
    return *reinterpret_cast<const float2*>(of_token + 8 * n + p);
  }
  __device__ static void scale_columns(float (&tile)[4], float2 by) {
    tile[0] *= by.x;
    tile[1] *= by.y;
    tile[2] *= by.x;
    tile[3] *= by.y;
  }

  // The warp's own values, convolved and activated, from the chunk's first token on.
  __device__ void values(int first) const {
    constexpr int kCount = 8;  // tokens of each lane
    const int lane = threadIdx.x % 32, channel = 16 * warp + lane % 4 * 4;
    const int run = lane / 4 * kCount;
    const bool inside = first > 0 && first + kTokens <= place.count;
    float4 x[kCount + 3];
    convolve<kCount>(op, place, stream(op, place, 2), shared.value_taps[0], 16 * kWarps,
                     first + run, channel, inside, x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = each(x[i], fast_silu);
    if (op.write.data != nullptr) {
      float4 logit[kCount];
      gather<kCount>(op.write, place, first + run,
                     int64_t(place.value_head) * op.value_dim + place.value + channel, logit);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = times(x[i], each(logit[i], fast_sigmoid));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool valid = first + run + i < place.count;
      store_halves(&shared.v[(run + i) * Shared::kValuePitch + channel], valid ? x[i] : zero4());
    }
    __syncwarp();
  }

  // R = w v - S k, [value, token].
  __device__ void subtract_recalled(const typename Shared::Stage& in) {
    const uint32_t values = rows_of_b(shared.v + 16 * warp, Shared::kValuePitch);
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) {
      uint32_t v[4];
      load_transposed(v, values + 2 * n * 16 * Shared::kValuePitch);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float(&tile)[4] = R[2 * n + h];
        if (!kChannel) {
          scale_columns(tile, columns(in.recalled, 2 * n + h));
          scale_columns(O[2 * n + h], columns(in.asked, 2 * n + h));
        }
        const float2 upper = unpack(v[2 * h]), lower = unpack(v[2 * h + 1]);
        const float2 written = columns(in.written, 2 * n + h);
        tile[0] = written.x * upper.x - tile[0];
        tile[1] = written.y * upper.y - tile[1];
        tile[2] = written.x * lower.x - tile[2];
        tile[3] = written.y * lower.y - tile[3];
      }
    }
  }

  // U from R, block of 16 tokens after block; U as the left operand of the products to come, also
  // with what its tokens keep until the chunk's end; O += U P'.
  __device__ void solve(const typename Shared::Stage& in, uint32_t (&U)[4][4],
                        uint32_t (&kept)[4][4]) {
    const uint32_t rows_a = rows_of_b(in.a, Shared::kTokenPitch);
    const uint32_t rows_p = rows_of_b(in.p, Shared::kTokenPitch);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      float(&left)[4] = R[2 * b], (&right)[4] = R[2 * b + 1];
      uint32_t m[4], rest[4];
#pragma unroll
      for (int c = 0; c < b; ++c) {
        load_matrices(m, rows_a + 2 * (b * kBlock * Shared::kTokenPitch + c * kBlock));
        multiply(left, U[c], m[0], m[1]);
        multiply(right, U[c], m[2], m[3]);
      }
      narrow(rest, left, right);
      load_matrices(m, rows_a + 2 * (b * kBlock * Shared::kTokenPitch + b * kBlock));
#pragma unroll
      for (int i = 0; i < 4; ++i) left[i] = right[i] = 0;
      multiply(left, rest, m[0], m[1]);
      multiply(right, rest, m[2], m[3]);
      narrow(U[b], left, right);
      if (!kChannel) {
        scale_columns(left, columns(in.kept, 2 * b));
        scale_columns(right, columns(in.kept, 2 * b + 1));
        narrow(kept[b], left, right);
      }
#pragma unroll
      for (int c = 0; c <= b; ++c) {
        load_matrices(m, rows_p + 2 * (b * kBlock * Shared::kTokenPitch + c * kBlock));
        multiply(O[2 * b], U[c], m[0], m[1]);
        multiply(O[2 * b + 1], U[c], m[2], m[3]);
      }
    }
  }

  // S = S diag(decay) + U' K
  __device__ void advance(const typename Shared::Stage& in, const uint32_t (&U)[4][4]) {
    const half* const keys = kChannel ? in.end : in.k;
    const uint32_t rows = rows_of_a(keys, Shared::kKeyPitch);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float whole = in.decay[0];
      scale_columns(S[n], kChannel ? columns(in.decay, n) : float2{whole, whole});
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < K / 16; ++i) {
        uint32_t k[4];
        load_transposed(k, rows + 2 * (c * kBlock * Shared::kKeyPitch + i * 16));
        multiply(S[2 * i], U[c], k[0], k[1]);
        multiply(S[2 * i + 1], U[c], k[2], k[3]);
      }
    }
  }

  __device__ void run(const typename Shared::Stage& in) {
    uint32_t U[4][4], kept[4][4];
    ask_state(in);
    subtract_recalled(in);
    solve(in, U, kept);
    advance(in, kChannel ? U : kept);
  }

  // The head's answers to a chunk, normalised where the block has all of the head's values.
  __device__ void write(int first) {
    if (op.value_dim == 16 * kWarps) normalise(first);
    float* token = at(op.out, place.begin + first + p) + column();
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* const to = token + i * op.out.stride;
        if (first + 8 * n + p + i < place.count) {
          to[0] = O[n][i];
          to[8] = O[n][i + 2];
        }
      }
      token += 8 * op.out.stride;
    }
  }
  __device__ int64_t column() const {
    return int64_t(place.value_head) * op.value_dim + place.value + 16 * warp + g;
  }

  // out = rms(o) * norm_weight [* gate_act(gate)]
  __device__ void normalise(int first) {
    float gate[kTokenTiles][4];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = min(first + 8 * n + p + i % 2, place.count - 1);
        const float* from = at(op.gate, place.begin + t) + column() + i / 2 * 8;
        gate[n][i] = op.gate.data != nullptr ? *from : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float squares = O[n][i] * O[n][i] + O[n][i + 2] * O[n][i + 2];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          squares += __shfl_xor_sync(0xffffffffu, squares, step);
        }
        if (g == 0) shared.squares[warp][8 * n + p + i] = squares;
      }
    }
    meet(kConsumeBarrier, kThreads);
    for (int t = threadIdx.x - kPreparers; t < kTokens; t += kThreads) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared.squares[w][t];
      shared.scale[t] = rsqrtf(sum / float(op.value_dim) + op.norm_eps);
    }
    meet(kConsumeBarrier, kThreads);
    const int value = place.value + 16 * warp + g;
    const float weight[2] = {op.norm_weight[value], op.norm_weight[value + 8]};
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      scale_columns(O[n], columns(shared.scale, n));
#pragma unroll
      for (int i = 0; i < 4; ++i) O[n][i] *= weight[i / 2];
    }
    if (op.gate.data == nullptr) return;
    const bool silu = op.gate_activation == Activation::Silu;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        O[n][i] *= fast_sigmoid(gate[n][i]) * (silu ? gate[n][i] : 1.0f);
      }
    }
  }
};

template <int K, bool kChannel, int kWarps>
__device__ inline void prepare_row(const DeltaMix& op, const Place& place,
                                   Layout<K, kChannel, kWarps>& shared) {
  constexpr int kAll = kPreparers + 32 * kWarps;
  const int chunks = (place.count + kTokens - 1) / kTokens;
  ScalarLogits logits;
  if (threadIdx.x < 32) logits.load(op, place, 0);
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    auto& stage = shared.stage[c % 2];
    const int first = c * kTokens;
    if (c >= 2) {
      meet(kEmpty + c % 2, kAll);
    } else {
      meet_preparers();
    }
    prefetch<K, 16 * kWarps>(op, place, first + kTokens);
    const Preparer<K, kChannel, kWarps> preparer{op, place, shared, stage, first};
    const Products<K, kChannel, kWarps> products{shared, stage};
    if (threadIdx.x < 32) {
      preparer.scalar_gates(logits);
      logits.load(op, place, first + kTokens);
    }
    if constexpr (kChannel) {
      preparer.channel_logs();
      meet_preparers();
      preparer.join_logs();
      preparer.keys();
      meet_preparers();
      products.channel();
    } else {
      preparer.keys();
      meet_preparers();
      products.scalar();
    }
    arrive(kFull + c % 2, kAll);
  }
}

template <int K, bool kChannel, int kWarps>
__device__ inline void consume_row(const DeltaMix& op, const Place& place, float* state,
                                   Layout<K, kChannel, kWarps>& shared) {
  constexpr int kAll = kPreparers + 32 * kWarps;
  const int chunks = (place.count + kTokens - 1) / kTokens;
  Consumer<K, kChannel, kWarps> consumer(op, place, shared);
  consumer.load_state(state);
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    consumer.values(c * kTokens);
    meet(kFull + c % 2, kAll);
    consumer.run(shared.stage[c % 2]);
    if (c + 2 < chunks) arrive(kEmpty + c % 2, kAll);
    consumer.write(c * kTokens);
  }
  consumer.store_state(state);
}

template <int K, bool kChannel, int kWarps>
__global__ __launch_bounds__(kPreparers + 32 * kWarps, 1) void delta_chunk_kernel(
    const __grid_constant__ DeltaMix op, int slices) {
  extern __shared__ __align__(16) unsigned char space[];
  auto& shared = *reinterpret_cast<Layout<K, kChannel, kWarps>*>(space);
  const int row = blockIdx.y;
  let_successor_start();
  wait_for_predecessor();
  const Slot slot = op.rows.slot[row];
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  if (slot == kPadding || count <= kStepTokensMost) return;
  const int value_head = blockIdx.x / slices;
  const Place place{.key_head = value_head * op.key_heads / op.value_heads,
                    .value_head = value_head,
                    .decay_head = value_head * op.decay_heads / op.value_heads,
                    .value = int(blockIdx.x) % slices * 16 * kWarps,
                    .begin = begin,
                    .count = count,
                    .fresh = op.rows.first[row] == 0,
                    .history = op.history.data == nullptr ? nullptr : at(op.history, slot),
                    .channels = 2 * int64_t(op.key_heads) * K +
                                int64_t(op.value_heads) * op.value_dim};
  for (int which = 0; which < 2; ++which) {
    keep_taps(stream(op, place, which), op.conv_width, K, shared.key_taps[which][0]);
  }
  keep_taps(stream(op, place, 2), op.conv_width, 16 * kWarps, shared.value_taps[0]);
  __syncthreads();
  // 65,536 registers: 128 a thread at the start, where there are eight warps of each kind.
  if (threadIdx.x < kPreparers) {
    if constexpr (kWarps == 8) give_up_registers<88>();
    prepare_row<K, kChannel, kWarps>(op, place, shared);
  } else {
    if constexpr (kWarps == 8) take_registers<168>();
    consume_row<K, kChannel, kWarps>(op, place, at(op.state, slot), shared);
  }
}

template <int K, bool kChannel, int kWarps>
void start(const DeltaMix& op, Context& context) {
  const auto kernel = delta_chunk_kernel<K, kChannel, kWarps>;
  const size_t bytes = sizeof(Layout<K, kChannel, kWarps>);
  static_assert(sizeof(Layout<K, kChannel, kWarps>) <= 227 * 1024);
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
  const int slices = op.value_dim / (16 * kWarps);
  launch(context,
         {.grid = dim3(op.value_heads * slices, op.rows.count),
          .block = dim3(kPreparers + 32 * kWarps),
          .shared = bytes},
         kernel, op, slices);
}

template <int K, bool kChannel>
void start(const DeltaMix& op, Context& context, int slice) {
  switch (slice) {
    case 128: return start<K, kChannel, 8>(op, context);
    case 64: return start<K, kChannel, 4>(op, context);
    case 32: return start<K, kChannel, 2>(op, context);
    default: return start<K, kChannel, 1>(op, context);
  }
}

}  // namespace weir::cuda::chunk
