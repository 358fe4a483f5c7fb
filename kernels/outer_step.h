#pragma once
#include "kernels/types.h"

namespace weir {

// The recurrence that only adds: linear attention, RetNet, GLA (arXiv 2312.06635), HGRN2, Mamba-2
// and both halves of gated slot attention. For every token of every row, S of [value_dim, key_dim]:
//   S = decay(S) + v k';   o = scale * S q   [/ (scale * q . z + 1e-10), z the running sum of keys]
// Decays multiply by exp(log_decay): one number a head, one a key channel, or one a value.
//
// There is a state for each head. Head j reads key (and its decay, when PerKey) j * key_heads /
// heads and value j * value_heads / heads; query j reads the state of head j * heads / query_heads,
// or, with fewer queries than heads, head j reads query j * query_heads / heads.
struct OuterStep {
  enum class Decay : uint8_t { None, Constant, PerHead, PerKey, PerValue };

  Rows rows;
  int32_t heads = 0, key_heads = 0, value_heads = 0, query_heads = 0;
  int32_t key_dim = 0, value_dim = 0;
  Decay decay = Decay::None;
  const float* constant = nullptr;  // Constant: [heads] log decays
  // PerHead [tokens, heads], PerKey [tokens, key_heads * key_dim], PerValue [tokens,
  // value_heads * value_dim]
  Acts log_decay;
  float scale = 1;
  bool normalise = false;
  Acts q;          // [tokens, query_heads * key_dim]
  Acts k;          // [tokens, key_heads * key_dim]
  Acts v;          // [tokens, value_heads * value_dim]
  Acts v_scale;    // [tokens, heads]: what is written is v_scale * v; null: v
  const float* skip = nullptr;  // [heads * value_dim], or null: o += skip * v
  Acts out;        // [tokens, max(heads, query_heads) * value_dim]
  SlotState state; // [heads, value_dim, key_dim]
  SlotState sums;  // normalise: [heads, key_dim]
};

}  // namespace weir
