#pragma once
#include "kernels/pending.h"
#include "kernels/types.h"

namespace weir {

enum class Decay : uint8_t { None, PerHead, PerChannel };
// L2Max: x / max(|x|, 1e-6), as the PyTorch forms of the Megatron family normalise.
enum class QkNorm : uint8_t { L2, Sum, L2Max };

// A whole delta-rule mixer between its in- and out-projection, for every token of every row, in
// place on the row's slot. Serves DeltaNet (arXiv 2406.06484), Gated DeltaNet (2412.06464), Kimi
// Delta Attention (2510.26692) and Gated DeltaNet-2. Per token, with * elementwise:
//
//   q, k, v = act(conv(q)), act(conv(k)), silu(conv(v))      conv: causal, depthwise, over time
//   q, k    = x / sqrt(sum x^2 + 1e-6) per head              or x / sum x
//   g       = -a * softplus(x + dt_bias)                     log decay, <= 0
//             lower_bound * sigmoid(a * (x + dt_bias))       when lower_bound < 0
//   S       = S diag(exp g)                                  S is [value_dim, key_dim]
//   u       = beta * (v - S k)                               beta = beta_scale * sigmoid(.)
//             write * v - S (erase * k)                      when erase is set (Gated DeltaNet-2)
//             v                                              when nothing erases: additive memory
//   S       = S + u k'
//   o       = S q / sqrt(key_dim) [+ answer_add]
//   out     = rms(o) * norm_weight [* gate_act(gate)]        per value head, over value_dim
//
// Value head j reads key head j * key_heads / value_heads.
struct DeltaMix {
  Rows rows;
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;

  Acts q, k;  // [tokens, key_heads * key_dim], raw projections
  Acts v;     // [tokens, value_heads * value_dim], raw projection

  int32_t conv_width = 0;                // 0: no convolution
  const float* conv_q = nullptr;         // [key_heads * key_dim, conv_width], newest tap last
  const float* conv_k = nullptr;         // the same
  const float* conv_v = nullptr;         // [value_heads * value_dim, conv_width]
  const float* conv_q_bias = nullptr;    // [key_heads * key_dim], or null; likewise below
  const float* conv_k_bias = nullptr;
  const float* conv_v_bias = nullptr;
  Activation qk_activation = Activation::Silu;
  QkNorm qk_norm = QkNorm::L2;

  Decay decay = Decay::None;
  int32_t decay_heads = 0;           // value head j uses decay head j * decay_heads / value_heads
  Acts decay_in;                     // [tokens, decay_heads] or [tokens, decay_heads * key_dim]
  const float* decay_a = nullptr;    // [decay_heads], exp(A_log)
  const float* dt_bias = nullptr;    // [decay_heads] or [decay_heads * key_dim]
  float lower_bound = 0;             // < 0 selects the bounded gate

  Acts beta;                         // [tokens, value_heads] logits; null: beta = beta_scale
  float beta_scale = 1;              // 2 allows negative eigenvalues; applies to erase too
  bool erases = true;                // false: no beta, erase or write is read
  Acts erase;                        // [tokens, key_heads * key_dim] logits, or null
  Acts write;                        // [tokens, value_heads * value_dim] logits; set with erase

  bool norm_output = true;             // false: out = o, and nothing of the four below is read
  const float* norm_weight = nullptr;  // [value_dim]
  float norm_eps = 0;
  Acts gate;                           // [tokens, value_heads * value_dim], or null: no gate
  Activation gate_activation = Activation::Silu;

  // Cross-layer routing (arXiv 2607.07953) reads and changes what is inside a layer.
  bool values_ready = false;  // v is convolved and activated already; its history is not ours
  bool emits = false;         // writes u, of which later layers or the residual stream take
  Acts emitted;               // [tokens, value_heads * value_dim], when emits
  Acts answer_add;            // the same shape, or null

  Acts out;           // [tokens, value_heads * value_dim]
  // out has one reader: where that is the next op, what it reads split need not be there.
  bool read_once = false;
  SlotState state;    // [value_heads, value_dim, key_dim]
  // [conv_width - 1, q channels | k channels | v channels], a ring (ring.h); v's only when ours
  SlotState history;
  // [value_heads, pending_layout(op).floats()]: rows of one token defer their writes (pending.h),
  // and others have nothing waiting. Null: every row writes. Only where the backend says that it
  // defers_writes().
  SlotState pending;
};

constexpr PendingLayout pending_layout(const DeltaMix& op) {
  return {.values = op.value_dim, .key_dim = op.key_dim};
}
constexpr int32_t pending_heads(const DeltaMix& op) { return op.value_heads; }

}  // namespace weir
