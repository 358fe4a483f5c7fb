#pragma once
#include "kernels/delta_chunk_prepare.cuh"

// The products between a chunk's own tokens: A with the inverses of its diagonal blocks, and P.
namespace weir::cuda::chunk {

// What lane l gives load_matrices() for a fragment whose first number is at `at`.
__device__ inline uint32_t rows_of_a(const half* at, int pitch) {
  const int lane = threadIdx.x % 32;
  return shared_address(at + (lane % 16) * pitch + lane / 16 * 8);
}
// Of two neighbouring B whose columns are rows in memory.
__device__ inline uint32_t rows_of_b(const half* at, int pitch) {
  const int lane = threadIdx.x % 32;
  return shared_address(at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}

// Block row and column of the i-th of the six blocks of 16 x 16 below the diagonal.
__device__ inline int block_row(int i) { return i == 0 ? 1 : i < 3 ? 2 : 3; }
__device__ inline int block_column(int i) { return i == 0 ? 0 : i < 3 ? i - 1 : i - 3; }

// Of 32 numbers in each lane, called with 16: lane l ends with the sum over all lanes of the l-th
// in place of its first.
template <int kStep>
__device__ inline void scatter_sums(float (&x)[32]) {
  const bool upper = threadIdx.x & kStep;
#pragma unroll
  for (int i = 0; i < kStep; ++i) {
    const float given = upper ? x[i] : x[i + kStep];
    x[i] = (upper ? x[i + kStep] : x[i]) + __shfl_xor_sync(0xffffffffu, given, kStep);
  }
  if constexpr (kStep > 1) scatter_sums<kStep / 2>(x);
}

template <int K, bool kChannel, int kWarps>
struct Products {
  using Shared = Layout<K, kChannel, kWarps>;
  static constexpr int kPitch = Shared::kKeyPitch;
  Shared& shared;
  typename Shared::Stage& to;

  // Scalar decay: <k_t, k_s> and <q_t, k_s> of block (b, c), decayed; A's rows times beta.
  __device__ void scalar_block(int b, int c) const {
    float A[2][4] = {}, P[2][4] = {};
    const half *left = &to.k[b * kBlock * kPitch], *asked = &to.q[b * kBlock * kPitch];
    const half* right = &to.k[c * kBlock * kPitch];
#pragma unroll
    for (int i = 0; i < K; i += 16) {
      uint32_t k[4], q[4], s[4];
      load_matrices(k, rows_of_a(left + i, kPitch));
      load_matrices(q, rows_of_a(asked + i, kPitch));
      load_matrices(s, rows_of_b(right + i, kPitch));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        multiply(A[n], k, s[2 * n], s[2 * n + 1]);
        multiply(P[n], q, s[2 * n], s[2 * n + 1]);
      }
    }
    const int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = b * kBlock + g + i / 2 * 8, s = c * kBlock + 8 * n + p + i % 2;
        const float decay = exp2_fast(shared.logs[t] - shared.logs[s]);
        A[n][i] = s < t ? A[n][i] * decay * shared.beta[t] : 0.0f;
        P[n][i] = s <= t ? P[n][i] * decay : 0.0f;
      }
    }
    keep(b, c, A, P);
  }

  // Accumulators of block (b, c) to shared memory.
  __device__ void keep(int b, int c, const float (&A)[2][4], const float (&P)[2][4]) const {
    const int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // rows g and g + 8
        const int row = g + 8 * h, column = 8 * n + p;
        const int at = (b * kBlock + row) * Shared::kTokenPitch + c * kBlock + column;
        *reinterpret_cast<uint32_t*>(&to.p[at]) = pack(P[n][2 * h], P[n][2 * h + 1]);
        if (b == c) {
          *reinterpret_cast<float2*>(&shared.diagonal[b][row * Shared::kDiagonalPitch + column]) =
              {A[n][2 * h], A[n][2 * h + 1]};
        } else {
          *reinterpret_cast<uint32_t*>(&to.a[at]) = pack(-A[n][2 * h], -A[n][2 * h + 1]);
        }
      }
    }
  }

  // (I + A)^-1 of diagonal block b by one warp: each of 16 lanes solves for one column.
  __device__ void invert(int b) const {
    const int column = threadIdx.x % 16;
    const float* A = shared.diagonal[b];
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; ++j) sum -= A[i * Shared::kDiagonalPitch + j] * x[j];
      x[i] = sum;
      if (threadIdx.x % 32 < 16) {
        to.a[(b * kBlock + i) * Shared::kTokenPitch + b * kBlock + column] = __float2half(sum);
      }
    }
  }

  __device__ void scalar() const {
    const int warp = threadIdx.x / 32;
    if (warp < 4) {
      scalar_block(warp, warp);
      __syncwarp();
      invert(warp);
    } else {
      for (int i = warp - 4; i < 6; i += 4) scalar_block(block_row(i), block_column(i));
    }
  }

  // Per channel: row t of a diagonal block, the differences of L themselves as exponents. Each lane
  // has K / 32 channels of every pair; lane l ends with the sum over channels of pair l % 16, of A
  // below 16 and of P from there on.
  __device__ void diagonal_row(int b, int r) const {
    constexpr int kPer = K / 32;
    const int lane = threadIdx.x % 32, t = b * kBlock + r;
    float k[kPer], q[kPer], L[kPer], sum[32];
    const auto halves = [&](const half* row, float (&x)[kPer]) {
#pragma unroll
      for (int i = 0; i < kPer; i += 2) {
        const float2 pair = unpack(*reinterpret_cast<const uint32_t*>(row + kPer * lane + i));
        x[i] = pair.x;
        x[i + 1] = pair.y;
      }
    };
    halves(&to.k[t * kPitch], k);
    halves(&to.q[t * kPitch], q);
#pragma unroll
    for (int i = 0; i < kPer; ++i) L[i] = shared.logs[t * Shared::kLogPitch + kPer * lane + i];
#pragma unroll
    for (int s = 0; s < kBlock; ++s) {
      sum[s] = sum[kBlock + s] = 0;
      if (s > r) continue;  // the same in every lane
      float key[kPer];
      halves(&to.end[(b * kBlock + s) * kPitch], key);
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const float Ls = shared.logs[(b * kBlock + s) * Shared::kLogPitch + kPer * lane + i];
        const float decayed = key[i] * exp2_fast(L[i] - Ls);
        sum[s] += k[i] * decayed;
        sum[kBlock + s] += q[i] * decayed;
      }
    }
    scatter_sums<16>(sum);
    const int s = lane % kBlock;
    if (lane < kBlock) {
      shared.diagonal[b][r * Shared::kDiagonalPitch + s] = s < r ? sum[0] : 0.0f;
    } else {
      to.p[t * Shared::kTokenPitch + b * kBlock + s] = __float2half(s <= r ? sum[0] : 0.0f);
    }
  }

  // Per channel: block (b, c) below the diagonal, both operands decayed to c's last token: behind
  // it on the left, up to it on the right, so that no exponent is positive.
  __device__ void channel_block(int b, int c) const {
    const int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
    const float* last = &shared.logs[(c * kBlock + kBlock - 1) * Shared::kLogPitch];
    const auto decayed = [&](const half* x, int t, int channel, float sign, float2* decay) {
      const float2 L = *reinterpret_cast<const float2*>(
          &shared.logs[t * Shared::kLogPitch + channel]);
      const float2 E = *reinterpret_cast<const float2*>(last + channel);
      *decay = {exp2_fast(sign * (L.x - E.x)), exp2_fast(sign * (L.y - E.y))};
      const float2 pair = unpack(*reinterpret_cast<const uint32_t*>(&x[t * kPitch + channel]));
      return pack(pair.x * decay->x, pair.y * decay->y);
    };
    float A[2][4] = {}, P[2][4] = {};
#pragma unroll 2
    for (int i = 0; i < K; i += 16) {
      uint32_t k[4], q[4], s[2][2];
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        const int t = b * kBlock + g + f % 2 * 8, channel = i + p + f / 2 * 8;
        float2 decay;
        k[f] = decayed(to.k, t, channel, 1, &decay);
        const half* asked = &to.q[t * kPitch + channel];
        const float2 pair = unpack(*reinterpret_cast<const uint32_t*>(asked));
        q[f] = pack(pair.x * decay.x, pair.y * decay.y);
        s[f % 2][f / 2] = decayed(to.end, c * kBlock + g + f % 2 * 8, channel, -1, &decay);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        multiply(A[n], k, s[n][0], s[n][1]);
        multiply(P[n], q, s[n][0], s[n][1]);
      }
    }
    keep(b, c, A, P);
  }

  // Keys and queries as the state meets them: decayed since the chunk's start, or until its end.
  __device__ void decay_in_place() const {
    const Run<K> run;
    const float4 last = load4(&shared.logs[(kTokens - 1) * Shared::kLogPitch + run.channel()]);
#pragma unroll
    for (int i = 0; i < Run<K>::kCount; ++i) {
      const int t = run.first + i, at = t * kPitch + run.channel();
      const float4 L = load4(&shared.logs[t * Shared::kLogPitch + run.channel()]);
      const float4 since = each(L, exp2_fast);
      const float4 until = each(plus(last, scaled(L, -1)), exp2_fast);
      store_halves(&to.k[at], times(load_halves(&to.k[at]), since));
      store_halves(&to.q[at], times(load_halves(&to.q[at]), since));
      store_halves(&to.end[at], times(load_halves(&to.end[at]), until));
    }
    if (run.first == 0) {
      *reinterpret_cast<float4*>(&to.decay[run.channel()]) = each(last, exp2_fast);
    }
  }

  // From keys, queries and L in shared memory, known to all preparing warps.
  __device__ void channel() const {
    const int warp = threadIdx.x / 32;
    for (int b = 0; b < 4; ++b) {
      diagonal_row(b, warp);
      diagonal_row(b, kBlock - 1 - warp);
    }
    meet_preparers();
    if (warp < 4) invert(warp);
    for (int i = (warp + 4) % 8; i < 6; i += 8) channel_block(block_row(i), block_column(i));
    meet_preparers();
    decay_in_place();
  }
};

}  // namespace weir::cuda::chunk
