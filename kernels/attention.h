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
struct Attention {
  Rows rows;
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  int32_t window = 0;              // 0: unlimited
  float rope_theta = 0;            // 0: no positions
  const float* q_norm = nullptr;   // [head_dim], or null; set together
  const float* k_norm = nullptr;
  float norm_eps = 0;
  Acts q;                          // [tokens, heads * head_dim]
  Acts k, v;                       // [tokens, kv_heads * head_dim]
  Acts out;                        // [tokens, heads * head_dim]

  SlotState ring;                  // window > 0
  float* pages = nullptr;          // window == 0: page g's block begins at pages + g * page_stride
  int64_t page_stride = 0;         // floats
  int32_t page_tokens = 0;
  const int32_t* page_table = nullptr;  // [rows, pages_per_row]: the row's pages in order
  int32_t pages_per_row = 0;
};

}  // namespace weir
