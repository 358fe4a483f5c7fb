#pragma once
#include "kernels/delta_chunk_prepare.cuh"

// The products between a chunk's own tokens: A with the inverses of its diagonal blocks, and P.
namespace weir::cuda::chunk {

// Block row and column of the i-th of the six blocks of 16 x 16 below the diagonal.
__device__ inline int block_row(int i) { return i == 0 ? 1 : i < 3 ? 2 : 3; }
__device__ inline int block_column(int i) { return i == 0 ? 0 : i < 3 ? i - 1 : i - 3; }

// Of 16 numbers in each lane, called with 8: lanes 2 l and 2 l + 1 end with the sums over all even
// and all odd lanes of the l-th in place of their first.
template <int kStep>
__device__ inline void scatter_sums(float (&x)[16]) {
  const bool upper = threadIdx.x & (2 * kStep);
#pragma unroll
  for (int i = 0; i < kStep; ++i) {
    const float given = upper ? x[i] : x[i + kStep];
    x[i] = (upper ? x[i + kStep] : x[i]) + __shfl_xor_sync(0xffffffffu, given, 2 * kStep);
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
          float* const transposed = &shared.diagonal[b][column * Shared::kDiagonalPitch + row];
          transposed[0] = A[n][2 * h];
          transposed[Shared::kDiagonalPitch] = A[n][2 * h + 1];
        } else {
          *reinterpret_cast<uint32_t*>(&to.a[at]) = pack(-A[n][2 * h], -A[n][2 * h + 1]);
        }
      }
    }
  }

  // (I + A)^-1 of diagonal block b by one warp: each of 16 lanes solves for one column, taking what
  // is known of the solution out of all rows below at once.
  __device__ void invert(int b) const {
    const int column = threadIdx.x % 16;
    const float* A = shared.diagonal[b];  // transposed
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < kBlock - 1; ++j) {
#pragma unroll
      for (int i = (j + 1) / 4 * 4; i < kBlock; i += 4) {
        const float4 below = load4(A + j * Shared::kDiagonalPitch + i);  // zeros down to j
        x[i] -= below.x * x[j];
        x[i + 1] -= below.y * x[j];
        x[i + 2] -= below.z * x[j];
        x[i + 3] -= below.w * x[j];
      }
    }
    if (threadIdx.x % 32 >= 16) return;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      to.a[(b * kBlock + i) * Shared::kTokenPitch + b * kBlock + column] = __float2half(x[i]);
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

  // Per channel: row r of a diagonal block of 8 x 8, the differences of L themselves as exponents.
  // Each lane has K / 32 channels of every pair; lane l ends with the sum over channels of the pair
  // with token l / 2 % 8, of A below lane 16 and of P from there on.
  __device__ void diagonal_row(int block, int r) const {
    constexpr int kPer = K / 32;
    const int lane = threadIdx.x % 32, first = 8 * block, t = first + r;
    float k[kPer], q[kPer], L[kPer], sum[16];
    const auto halves = [&](const half* row, float (&x)[kPer]) {
#pragma unroll
      for (int i = 0; i < kPer; i += 2) {
        const float2 pair = unpack(*reinterpret_cast<const uint32_t*>(row + kPer * lane + i));
        x[i] = pair.x;
        x[i + 1] = pair.y;
      }
    };
    const auto logs = [&](int token, float (&x)[kPer]) {
      const float* row = &shared.logs[token * Shared::kLogPitch + kPer * lane];
#pragma unroll
      for (int i = 0; i < kPer; i += 2) {
        const float2 pair = *reinterpret_cast<const float2*>(row + i);
        x[i] = pair.x;
        x[i + 1] = pair.y;
      }
    };
    halves(&to.k[t * kPitch], k);
    halves(&to.q[t * kPitch], q);
    logs(t, L);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      float key[kPer], Ls[kPer];
      halves(&to.end[(first + s) * kPitch], key);
      logs(first + s, Ls);
      sum[s] = sum[8 + s] = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {  // what is above the diagonal is not kept
        const float decayed = key[i] * exp2_fast(fminf(L[i] - Ls[i], 0.0f));
        sum[s] += k[i] * decayed;
        sum[8 + s] += q[i] * decayed;
      }
    }
    scatter_sums<8>(sum);
    const float all = sum[0] + __shfl_xor_sync(0xffffffffu, sum[0], 1);
    const int s = lane / 2 % 8, b = block / 2, offset = block % 2 * 8;
    if (lane % 2 != 0) return;
    if (lane < 16) {
      shared.diagonal[b][(offset + s) * Shared::kDiagonalPitch + offset + r] =
          s < r ? all : 0.0f;
    } else {
      to.p[t * Shared::kTokenPitch + first + s] = __float2half(s <= r ? all : 0.0f);
    }
  }

  // Per channel: the lower left 8 x 8 of diagonal block b, both operands decayed to token 7 of the
  // block as in channel_block(); keys in the upper and queries in the lower half of the left one.
  // The upper right 8 x 8 is zero.
  __device__ void inner_block(int b) const {
    const int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2, first = b * kBlock;
    const float* last = &shared.logs[(first + 7) * Shared::kLogPitch];
    float sum[4] = {};
#pragma unroll 2
    for (int i = 0; i < K; i += 16) {
      uint32_t left[4], right[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int channel = i + p + 8 * h;
        const float2 end = *reinterpret_cast<const float2*>(last + channel);
        const float2 since = exponentials(first + 8 + g, channel, end, 1);
        left[2 * h] = scaled_pair(to.k, first + 8 + g, channel, since);
        left[2 * h + 1] = scaled_pair(to.q, first + 8 + g, channel, since);
        const float2 until = exponentials(first + g, channel, end, -1);
        right[h] = scaled_pair(to.end, first + g, channel, until);
      }
      multiply(sum, left, right[0], right[1]);
    }
    const int t = first + 8 + g;
    shared.diagonal[b][p * Shared::kDiagonalPitch + 8 + g] = sum[0];
    shared.diagonal[b][(p + 1) * Shared::kDiagonalPitch + 8 + g] = sum[1];
    shared.diagonal[b][(8 + p) * Shared::kDiagonalPitch + g] = 0;
    shared.diagonal[b][(9 + p) * Shared::kDiagonalPitch + g] = 0;
    *reinterpret_cast<uint32_t*>(&to.p[t * Shared::kTokenPitch + first + p]) =
        pack(sum[2], sum[3]);
    *reinterpret_cast<uint32_t*>(&to.p[(t - 8) * Shared::kTokenPitch + first + 8 + p]) = 0;
  }

  // 2^(sign (L - end)) of two neighbouring channels, and them on two halves.
  __device__ float2 exponentials(int t, int channel, float2 end, float sign) const {
    const float2 L =
        *reinterpret_cast<const float2*>(&shared.logs[t * Shared::kLogPitch + channel]);
    return {exp2_fast(sign * (L.x - end.x)), exp2_fast(sign * (L.y - end.y))};
  }
  __device__ static uint32_t scaled_pair(const half* x, int t, int channel, float2 by) {
    const float2 pair = unpack(*reinterpret_cast<const uint32_t*>(&x[t * kPitch + channel]));
    return pack(pair.x * by.x, pair.y * by.y);
  }

  // Per channel: block (b, c) below the diagonal, both operands decayed to c's last token: behind
  // it on the left, up to it on the right, so that no exponent is positive.
  __device__ void channel_block(int b, int c) const {
    const int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
    const float* last = &shared.logs[(c * kBlock + kBlock - 1) * Shared::kLogPitch];
    float A[2][4] = {}, P[2][4] = {};
#pragma unroll 2
    for (int i = 0; i < K; i += 16) {
      uint32_t k[4], q[4], s[2][2];
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        const int row = g + f % 2 * 8, channel = i + p + f / 2 * 8;
        const int t = b * kBlock + row, before = c * kBlock + row;
        const float2 end = *reinterpret_cast<const float2*>(last + channel);
        const float2 since = exponentials(t, channel, end, 1);
        k[f] = scaled_pair(to.k, t, channel, since);
        q[f] = scaled_pair(to.q, t, channel, since);
        s[f % 2][f / 2] =
            scaled_pair(to.end, before, channel, exponentials(before, channel, end, -1));
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
    const float4 last = load4(&shared.logs[(kTokens - 1) * Shared::kLogPitch + run.channel]);
#pragma unroll
    for (int i = 0; i < Run<K>::kCount; ++i) {
      const int t = run.first + i, at = t * kPitch + run.channel;
      const float4 L = load4(&shared.logs[t * Shared::kLogPitch + run.channel]);
      const float4 since = each(L, exp2_fast);
      const float4 until = each(plus(last, scaled(L, -1)), exp2_fast);
      store_halves(&to.k[at], times(load_halves(&to.k[at]), since));
      store_halves(&to.q[at], times(load_halves(&to.q[at]), since));
      store_halves(&to.end[at], times(load_halves(&to.end[at]), until));
    }
    if (run.first == 0) {
      *reinterpret_cast<float4*>(&to.decay[run.channel]) = each(last, exp2_fast);
    }
  }

  // From keys, queries and L in shared memory, known to all preparing warps.
  __device__ void channel() const {
    const int warp = threadIdx.x / 32;
#pragma unroll 1
    for (int r = 0; r < 8; ++r) diagonal_row(warp, r);
    if (warp < 4) {
      inner_block(warp);
    } else {
      channel_block(block_row(warp - 4), block_column(warp - 4));
    }
    meet_preparers();
    if (warp < 4) {
      invert(warp);
    } else if (warp < 6) {
      channel_block(block_row(warp), block_column(warp));
    }
    meet_preparers();
    decay_in_place();
  }
};

}  // namespace weir::cuda::chunk
