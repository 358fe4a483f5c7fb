#pragma once
#include "kernels/delta_chunk_prepare.cuh"

// The products between a chunk's own tokens: A with the inverses of its diagonal blocks, and P.
namespace weir::cuda::chunk {

// What lane l gives load_matrices() for a fragment of a panel matrix, 16 tokens and 16 channels:
// the address of the first panel's row, and which piece of it, to be permuted by ^ (channel / 8).
struct PanelLane {
  uint32_t row;
  uint32_t piece;  // times 16 bytes

  // Of the left operand, or, transposed, of two neighbouring right ones whose rows are tokens.
  __device__ static PanelLane of_a(const half* panels, int lane = threadIdx.x % 32) {
    const int t = lane % 16;
    return {shared_address(panels + t * 64), uint32_t((lane / 16 ^ t % 8) * 16)};
  }
  // Of two neighbouring right operands whose columns are tokens.
  __device__ static PanelLane of_b(const half* panels, int lane = threadIdx.x % 32) {
    const int t = lane % 8 + lane / 16 * 8;
    return {shared_address(panels + t * 64), uint32_t((lane / 8 % 2 ^ t % 8) * 16)};
  }
  // The fragment from this token (a multiple of 16) and channel (likewise) on.
  __device__ uint32_t at(int token, int channel) const {
    return row + channel / 64 * (kTokens * 128) + token * 128 + (piece ^ channel % 64 * 2);
  }
};
// Of two neighbouring right operands in a 16 x 16 block whose rows are their columns.
__device__ inline uint32_t pair_lane(const half* blocks) {
  const int lane = threadIdx.x % 32;
  return shared_address(blocks + within_pair(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
}

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

// Of the blocks (b, c) of 16 x 16 tokens, of both A and P.
template <int K, bool kChannel, typename Shop = Workshop<K, kChannel>>
struct Products {
  static constexpr int kDiagonalPitch = Workshop<K, kChannel>::kDiagonalPitch;
  static constexpr int kLogPitch = Workshop<K, kChannel>::kLogPitch;
  // Half a block's decay, in powers of two, that float32 exponents surely hold, twice.
  static constexpr float kHalfDecayMost = 60;
  Shop& shop;
  int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;  // the lane's row and column

  // Not of threadIdx.x, from which one of the kernels would keep addresses in registers.
  __device__ int lane() const { return 4 * g + p / 2; }
  __device__ Image<K, kChannel>& image() const { return shop.image; }
  __device__ half* p_at(int t, int s) const { return &shop.image.p[panel_at(t, s)]; }

  // P's blocks above the diagonal ones, 16 bytes at a time.
  __device__ void clear_above() const {
    const int t = int(threadIdx.x) % kPreparers / 4;
    const int s = t / kBlock * kBlock + kBlock + int(threadIdx.x) % 4 * 8;
    if (s < kTokens) *reinterpret_cast<uint4*>(p_at(t, s)) = {0, 0, 0, 0};
    if (s + 32 < kTokens) *reinterpret_cast<uint4*>(p_at(t, s + 32)) = {0, 0, 0, 0};
  }

  // Scalar decay: <k_t, k_s> and <q_t, k_s> of block (b, c), decayed; A's rows times beta.
  __device__ void scalar_block(int b, int c) const {
    float A[2][4] = {}, P[2][4] = {};
    const PanelLane left = PanelLane::of_a(image().k), asked = PanelLane::of_a(image().q);
    const PanelLane right = PanelLane::of_b(image().k);
#pragma unroll
    for (int i = 0; i < K; i += 16) {
      uint32_t k[4], q[4], s[4];
      load_matrices(k, left.at(b * kBlock, i));
      load_matrices(q, asked.at(b * kBlock, i));
      load_matrices(s, right.at(c * kBlock, i));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        multiply(A[n], k, s[2 * n], s[2 * n + 1]);
        multiply(P[n], q, s[2 * n], s[2 * n + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = b * kBlock + g + i / 2 * 8, s = c * kBlock + 8 * n + p + i % 2;
        const float decay = exp2_fast(fminf(shop.logs[t] - shop.logs[s], 0.0f));
        A[n][i] *= decay * shop.beta[t];
        P[n][i] *= decay;
      }
    }
    keep(b, c, A, P);
  }

  // Accumulators of block (b, c) to shared memory; of a diagonal one, what is below the diagonal.
  __device__ void keep(int b, int c, const float (&A)[2][4], const float (&P)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // rows g and g + 8
        const int row = g + 8 * h, column = 8 * n + p;
        float a[2] = {A[n][2 * h], A[n][2 * h + 1]}, ask[2] = {P[n][2 * h], P[n][2 * h + 1]};
        if (b == c) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (column + i >= row) a[i] = 0;
            if (column + i > row) ask[i] = 0;
            shop.diagonal[b][(column + i) * kDiagonalPitch + row] = a[i];
          }
        } else {
          const int at = pair_at(b, c) + within_pair(row, column);
          *reinterpret_cast<uint32_t*>(&image().a[at]) = pack(-a[0], -a[1]);
        }
        *reinterpret_cast<uint32_t*>(p_at(b * kBlock + row, c * kBlock + column)) =
            pack(ask[0], ask[1]);
      }
    }
  }

  // (I + A)^-1 of diagonal block b by one warp: each of 16 lanes solves for one column, taking what
  // is known of the solution out of all rows below at once. The others may have another block.
  __device__ void invert(int b, int lanes = 16) const {
    const int column = kChannel ? lane() % 16 : int(threadIdx.x % 16);
    const float* A = shop.diagonal[b];  // transposed
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < kBlock - 1; ++j) {
#pragma unroll
      for (int i = (j + 1) / 4 * 4; i < kBlock; i += 4) {
        const float4 below = load4(A + j * kDiagonalPitch + i);  // zeros down to j
        x[i] -= below.x * x[j];
        x[i + 1] -= below.y * x[j];
        x[i + 2] -= below.z * x[j];
        x[i + 3] -= below.w * x[j];
      }
    }
    if ((kChannel ? lane() : int(threadIdx.x) % 32) >= lanes) return;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      image().a[pair_at(b, b) + within_pair(i, column)] = __float2half(x[i]);
    }
  }

  // By eight warps.
  __device__ void scalar() const {
    clear_above();
    const int warp = int(threadIdx.x) % kPreparers / 32;
    if (warp < 4) {
      scalar_block(warp, warp);
      __syncwarp();
      invert(warp);
    } else {
      // (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)
      for (int i = warp - 4; i < 6; i += 4) {
        scalar_block(i == 0 ? 1 : i < 3 ? 2 : 3, i == 0 ? 0 : i < 3 ? i - 1 : i - 3);
      }
    }
  }

  __device__ float4 logs(int t, int channel) const {
    return load4(&shop.logs[t * kLogPitch + channel]);
  }
  __device__ float4 numbers(const half* x, int t, int channel) const {
    return load_halves(&x[panel_at(t, channel)]);
  }
  __device__ static float4 power(float4 x) { return each(x, exp2_fast); }
  __device__ static float most(float4 x) {
    return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
  }

  // Per channel: diagonal block b with both operands decayed from or to its middle. The exponents
  // are of both signs, so the products are of tf32, whose range is a float's. Which channels a
  // product sums over is ours to choose: four neighbouring ones in each lane. False: a channel
  // decays too much within the block.
  __device__ bool diagonal_block(int b) const {
    const int t = b * kBlock + g, lane = threadIdx.x % 4;
    float A[2][4] = {}, P[2][4] = {}, far = 0;
#pragma unroll 1
    for (int i = 0; i < K; i += 16) {
      const int channel = i + 4 * lane;
      const float4 middle = logs(b * kBlock + 7, channel);
      float4 k[2], q[2], s[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 L = minus(logs(t + 8 * h, channel), middle);
        far = fmaxf(far, most(L));
        const float4 since = power(L), until = power(scaled(L, -1));
        k[h] = times(numbers(image().k, t + 8 * h, channel), since);
        q[h] = times(numbers(image().q, t + 8 * h, channel), since);
        s[h] = times(numbers(image().end, t + 8 * h, channel), until);
      }
      const auto sum = [&](float4 (&left)[2], float (&to)[2][4]) {
        const uint32_t low[4] = {to_tf32(left[0].x), to_tf32(left[1].x), to_tf32(left[0].y),
                                 to_tf32(left[1].y)};
        const uint32_t high[4] = {to_tf32(left[0].z), to_tf32(left[1].z), to_tf32(left[0].w),
                                  to_tf32(left[1].w)};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_tf32(to[n], low, to_tf32(s[n].x), to_tf32(s[n].y));
          multiply_tf32(to[n], high, to_tf32(s[n].z), to_tf32(s[n].w));
        }
      };
      sum(k, A);
      sum(q, P);
    }
    if (__any_sync(0xffffffffu, far > kHalfDecayMost)) return false;
    keep(b, b, A, P);
    return true;
  }

  // Per channel: row r of a diagonal block of 8 x 8, the differences of L themselves as exponents.
  // Each lane has K / 32 channels of every pair; lane l ends with the sum over channels of the pair
  // with token l / 2 % 8, of A below lane 16 and of P from there on.
  __device__ void diagonal_row(int block, int r) const {
    constexpr int kPer = K / 32;
    const int lane = threadIdx.x % 32, first = 8 * block, t = first + r;
    float k[kPer], q[kPer], L[kPer], sum[16];
    const auto halves = [&](const half* x, int token, float (&to)[kPer]) {
#pragma unroll
      for (int i = 0; i < kPer; i += 2) {
        const half* const from = &x[panel_at(token, kPer * lane + i)];
        const float2 pair = unpack(*reinterpret_cast<const uint32_t*>(from));
        to[i] = pair.x;
        to[i + 1] = pair.y;
      }
    };
    const auto logs = [&](int token, float (&to)[kPer]) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) to[i] = shop.logs[token * kLogPitch + kPer * lane + i];
    };
    halves(image().k, t, k);
    halves(image().q, t, q);
    logs(t, L);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      float key[kPer], Ls[kPer];
      halves(image().end, first + s, key);
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
      shop.diagonal[b][(offset + s) * kDiagonalPitch + offset + r] = s < r ? all : 0.0f;
    } else {
      *p_at(t, first + s) = __float2half(s <= r ? all : 0.0f);
    }
  }

  // Per channel: the lower left 8 x 8 of diagonal block b, both operands decayed to token 7 of the
  // block, so that no exponent is positive; keys in the upper and queries in the lower half of the
  // left one. The upper right 8 x 8 is zero.
  __device__ void inner_block(int b) const {
    const int first = b * kBlock, lane = threadIdx.x % 4;
    float sum[4] = {};
#pragma unroll 1
    for (int i = 0; i < K; i += 16) {
      const int channel = i + 4 * lane;
      const float4 end = logs(first + 7, channel);
      const float4 since = power(minus(logs(first + 8 + g, channel), end));
      const float4 until = power(minus(end, logs(first + g, channel)));
      const uint2 k = packed(times(numbers(image().k, first + 8 + g, channel), since));
      const uint2 q = packed(times(numbers(image().q, first + 8 + g, channel), since));
      const uint2 s = packed(times(numbers(image().end, first + g, channel), until));
      multiply(sum, {k.x, q.x, k.y, q.y}, s.x, s.y);
    }
    float* const below = &shop.diagonal[b][p * kDiagonalPitch + 8 + g];
    below[0] = sum[0];
    below[kDiagonalPitch] = sum[1];
    float* const above = &shop.diagonal[b][(8 + p) * kDiagonalPitch + g];
    above[0] = above[kDiagonalPitch] = 0;
    *reinterpret_cast<uint32_t*>(p_at(first + 8 + g, first + p)) = pack(sum[2], sum[3]);
    *reinterpret_cast<uint32_t*>(p_at(first + g, first + 8 + p)) = 0;
  }

  // Per channel: kCount blocks (b, c), (b, c + 1) below the diagonal, both operands decayed to the
  // last token before b: up to it on the right, behind it on the left, so that no exponent is
  // positive.
  template <int kCount>
  __device__ void channel_blocks(int b, int c) const {
    const int t = b * kBlock + g, lane = threadIdx.x % 4;
    float A[kCount][2][4] = {}, P[kCount][2][4] = {};
#pragma unroll 1
    for (int i = 0; i < K; i += 16) {
      const int channel = i + 4 * lane;
      const float4 end = logs(b * kBlock - 1, channel);
      uint2 k[2], q[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 since = power(minus(logs(t + 8 * h, channel), end));
        k[h] = packed(times(numbers(image().k, t + 8 * h, channel), since));
        q[h] = packed(times(numbers(image().q, t + 8 * h, channel), since));
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int s = (c + j) * kBlock + 8 * n + g;
          const float4 until = power(minus(end, logs(s, channel)));
          const uint2 right = packed(times(numbers(image().end, s, channel), until));
          multiply(A[j][n], {k[0].x, k[1].x, k[0].y, k[1].y}, right.x, right.y);
          multiply(P[j][n], {q[0].x, q[1].x, q[0].y, q[1].y}, right.x, right.y);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) keep(b, c + j, A[j], P[j]);
  }

  // Keys and queries as the state meets them: decayed since the chunk's start, or until its end.
  __device__ void decay_in_place() const {
    const Run<K> run;
    const float4 last = logs(kTokens - 1, run.channel);
#pragma unroll 4
    for (int i = 0; i < Run<K>::kCount; ++i) {
      const int at = panel_at(run.first + i, run.channel);
      const float4 L = logs(run.first + i, run.channel);
      const float4 since = power(L), until = power(minus(last, L));
      store_halves(&image().k[at], times(load_halves(&image().k[at]), since));
      store_halves(&image().q[at], times(load_halves(&image().q[at]), since));
      store_halves(&image().end[at], times(load_halves(&image().end[at]), until));
    }
    if (run.first == 0) {
      *reinterpret_cast<float4*>(&image().decay[run.channel]) = power(last);
    }
  }

  // From keys, queries and L in shared memory, known to the whole block.
  __device__ void channel() const {
    clear_above();
    const int warp = threadIdx.x / 32;
    if (warp < 4) {
      if (!diagonal_block(warp)) {
#pragma unroll 1
        for (int r = 0; r < 16; ++r) diagonal_row(2 * warp + r / 8, r % 8);
        inner_block(warp);
      }
      __syncwarp();
      invert(warp);
    } else if (warp == 4) {
      channel_blocks<1>(1, 0);
    } else if (warp == 5) {
      channel_blocks<2>(2, 0);
    } else if (warp == 6) {
      channel_blocks<2>(3, 0);
    } else {
      channel_blocks<1>(3, 2);
    }
    meet_preparers();
    decay_in_place();
  }
};

}  // namespace weir::cuda::chunk
