#pragma once
#include "kernels/types.h"

namespace weir {

// Causal softmax attention for every token of every row, appending the row's own keys and values.
//   q, k = rms per head (when q_norm is set), then rotary embedding (when rope_theta > 0):
//          pairs (i, i + d/2), angle = position * rope_theta^(-2i/d)
//   out  = softmax(q k' / sqrt(head_dim)) v   over positions max(0, p - window + 1) .. p
// Query head j reads kv head j * kv_heads / heads.
//
// Keys (after rotation) and values are kept as float32 in blocks [2, kv_heads, block_tokens,
// head_dim], keys first. Without a window, position p lies in the row's page number p /
// page_tokens; with one, the block is a ring in the slot and position p lies at p % window.
//
// With a forget gate (Forgetting Transformer, Lin et al. 2025, arXiv 2503.02130, eq. 5 to 7) the
// score of position s for a query at t gets F_t - F_s, where F_t is the sum of log sigmoid(forget)
// up to t: one a query head. Behind its keys and values a block then keeps F of its positions,
// [2, heads, block_tokens]: first F rounded to float32, then what the rounding left. A sum that
// has come to -10^6 is so kept to 2^-29 and still tells near positions apart, where a float32
// would keep it to 2^-5; and F_t - F_s needs nothing of the positions between.
struct Attention {
  Rows rows;
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  int32_t window = 0;              // 0: unlimited
  float rope_theta = 0;            // 0: no positions
  const float* q_norm = nullptr;   // [head_dim], or null; set together
  const float* k_norm = nullptr;
  bool norm_per_head = false;      // the norms are [heads * head_dim] and [kv_heads * head_dim]
  float norm_eps = 0;
  Acts q;                          // [tokens, heads * head_dim]
  Acts k, v;                       // [tokens, kv_heads * head_dim]
  bool forgets = false;
  Acts forget;                     // [tokens, heads], before the sigmoid; with `forgets` alone
  Acts out;                        // [tokens, heads * head_dim]

  SlotState ring;                  // window > 0
  float* pages = nullptr;          // window == 0: page g's block begins at pages + g * page_stride
  int64_t page_stride = 0;         // floats
  int32_t page_tokens = 0;
  const int32_t* page_table = nullptr;  // [rows, pages_per_row]: the row's pages in order
  int32_t pages_per_row = 0;
};

}  // namespace weir
