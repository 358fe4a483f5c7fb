#pragma once
#include "kernels/delta_chunk_products.cuh"
#include "kernels/wgmma_cuda.cuh"

// The products of a chunk with the state: 16 rows of the state, or of U, belong to a warp.
namespace weir::cuda::chunk {

// Four warps together have the tensor cores read keys and queries themselves; fewer warps, and
// machines other than 9.0a, load fragments.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int kWarps>
constexpr bool kTogether = kWarps % 4 == 0;
#else
template <int kWarps>
constexpr bool kTogether = false;
#endif

// sum = S x', x keys or queries; left(i) makes S's i-th left operand.
template <int K, int kSums, typename Left>
__device__ inline void ask_together(float (&sum)[kSums], const half* x, const Left& left) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma unroll
  for (int panel = 0; panel < K / 64; ++panel) {
    const uint64_t rows = swizzled_rows(shared_address(x + panel * kTokens * 64));
    uint32_t state[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) left(4 * panel + i, state[i]);
    pin(state);
    if (panel > 0) pin(sum);
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply_halves<false>(sum, state[i], rows + i * kNextColumns, panel + i > 0);
    }
    products_commit();
    products_wait<0>();
    pin(sum);
  }
#endif
}
// S += U' x
template <int K>
__device__ inline void advance_together(float (&sum)[K / 2], const half* x,
                                        uint32_t (&left)[4][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const uint64_t rows = swizzled_columns(shared_address(x), kTokens * 128);
  pin(left);
  pin(sum);
  products_begin();
#pragma unroll
  for (int c = 0; c < 4; ++c) multiply_halves<true>(sum, left[c], rows + c * kNextRows, 1);
  products_commit();
  products_wait<0>();
  pin(sum);
#endif
}
// O += U P', P one panel, for as many tokens as O has; kBlocks: U's blocks that they see.
template <int kBlocks, int kSums>
__device__ inline void answer_together(float (&sum)[kSums], const half* p,
                                       uint32_t (&left)[4][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const uint64_t rows = swizzled_rows(shared_address(p));
  pin(left);
  pin(sum);
  products_begin();
#pragma unroll
  for (int c = 0; c < kBlocks; ++c) {
    multiply_halves<false>(sum, left[c], rows + c * kNextColumns, 1);
  }
  products_commit();
  products_wait<0>();
  pin(sum);
#endif
}

// sum = S x' by each warp alone.
template <int K, int kTiles, typename Left>
__device__ inline void ask_alone(float (&sum)[kTiles][4], const half* x, const Left& left) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] = 0;
  }
  const PanelLane rows = PanelLane::of_b(x);
#pragma unroll
  for (int i = 0; i < K / 16; ++i) {
    uint32_t state[4], of_x[4];
    left(i, state);
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
      load_matrices(of_x, rows.at(n * 16, i * 16));
      multiply(sum[2 * n], state, of_x[0], of_x[1]);
      multiply(sum[2 * n + 1], state, of_x[2], of_x[3]);
    }
  }
}
// For as many tokens as sum has.
template <int K, int kWarps, int kTiles, typename Left>
__device__ inline void ask(float (&sum)[kTiles][4], const half* x, const Left& left) {
  if constexpr (kTogether<kWarps>) {
    ask_together<K>(reinterpret_cast<float(&)[4 * kTiles]>(sum), x, left);
  } else {
    ask_alone<K>(sum, x, left);
  }
}

// S += U' x; kept: U as left operands.
template <int K, int kWarps>
__device__ inline void advance_by(float (&S)[K / 8][4], const half* x, uint32_t (&kept)[4][4]) {
  if constexpr (kTogether<kWarps>) {
    advance_together<K>(reinterpret_cast<float(&)[K / 2]>(S), x, kept);
  } else {
    const PanelLane keys = PanelLane::of_a(x);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < K / 16; ++i) {
        uint32_t k[4];
        load_transposed(k, keys.at(c * kBlock, i * 16));
        multiply(S[2 * i], kept[c], k[0], k[1]);
        multiply(S[2 * i + 1], kept[c], k[2], k[3]);
      }
    }
  }
}
// O += U P'; kBlocks: U's blocks that O's tokens see.
template <int kWarps, int kBlocks, int kTiles>
__device__ inline void answer_with(float (&O)[kTiles][4], const half* p, uint32_t (&U)[4][4]) {
  if constexpr (kTogether<kWarps>) {
    answer_together<kBlocks>(reinterpret_cast<float(&)[4 * kTiles]>(O), p, U);
  } else {
    const PanelLane rows = PanelLane::of_b(p);
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
#pragma unroll
      for (int b = 0; b < kTiles / 2; ++b) {
        if (b + kBlocks - kTiles / 2 < c) continue;  // zeros
        uint32_t m[4];
        load_matrices(m, rows.at(b * kBlock, c * kBlock));
        multiply(O[2 * b], U[c], m[0], m[1]);
        multiply(O[2 * b + 1], U[c], m[2], m[3]);
      }
    }
  }
}

// A token's number for each of a thread's columns of tile n, and a tile times them.
__device__ inline float2 columns_of(const float* of_token, int n) {
  return *reinterpret_cast<const float2*>(of_token + 8 * n + threadIdx.x % 4 * 2);
}
__device__ inline void scale_columns(float (&tile)[4], float2 by) {
  tile[0] *= by.x;
  tile[1] *= by.y;
  tile[2] *= by.x;
  tile[3] *= by.y;
}

// U in place of R, block of 16 tokens after block: a known block is taken out of all later ones at
// once. known(b, U): block b's U as the left operand of products with it.
template <typename Known>
__device__ inline void solve_blocks(const half* a, float (&R)[8][4], const Known& known) {
  const uint32_t blocks = pair_lane(a);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    float(&left)[4] = R[2 * b], (&right)[4] = R[2 * b + 1];
    uint32_t m[4], U[4];
    narrow(U, left, right);
    load_matrices(m, blocks + 2 * pair_at(b, b));
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = right[i] = 0;
    multiply(left, U, m[0], m[1]);
    multiply(right, U, m[2], m[3]);
    narrow(U, left, right);
#pragma unroll
    for (int later = b + 1; later < 4; ++later) {
      load_matrices(m, blocks + 2 * pair_at(later, b));
      multiply(R[2 * later], U, m[0], m[1]);
      multiply(R[2 * later + 1], U, m[2], m[3]);
    }
    known(b, U);
  }
}

}  // namespace weir::cuda::chunk
