#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/delta_mix.h"

namespace weir {

// What a model is, as data. No weights, no pointers, no behaviour. read_spec() makes one from a
// checkpoint's config.json; lower() turns it into ops.

struct ShortConv {
  int32_t width = 4;
};

enum class DecayGate : uint8_t {
  None,             // DeltaNet
  PerHead,          // Gated DeltaNet: -exp(A_log) softplus(a_proj x + dt_bias), one a value head
  PerChannel,       // KDA: the same through a low-rank f_proj, one a value head and key channel
  PerKeyChannel,    // Gated DeltaNet-2: one a key head and key channel
};
enum class Strength : uint8_t {
  One,              // beta = 1
  Beta,             // one number a value head
  EraseWrite,       // Gated DeltaNet-2: an erase vector over keys, a write vector over values
};
enum class OutputGate : uint8_t {
  None,
  Silu,             // silu(g_proj x)
  LowRankSigmoid,   // sigmoid(g_proj.1 (g_proj.0 x) + bias)
};

// DeltaNet, Gated DeltaNet, KDA, Gated DeltaNet-2: one state matrix for each value head.
struct DeltaMixer {
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  DecayGate decay = DecayGate::PerHead;
  float lower_bound = 0;              // < 0: the bounded decay gate
  Strength strength = Strength::Beta;
  bool negative_eigenvalues = false;  // beta in (0, 2)
  OutputGate output_gate = OutputGate::Silu;
  Activation qk_activation = Activation::Silu;
  QkNorm qk_norm = QkNorm::L2;
  std::optional<ShortConv> conv = ShortConv{};
};

// Softmax attention: the one mixer whose memory grows with the sequence, unless it has a window.
struct AttentionMixer {
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  int32_t window = 0;      // 0: unlimited; otherwise the query and the window - 1 tokens before it
  float rope_theta = 0;    // 0: no positions
  bool qkv_bias = false;
  bool qk_norm = false;    // rms per head, eps 1e-5, before the rotation
};

using Mixer = std::variant<DeltaMixer, AttentionMixer>;

struct Mlp {
  int32_t hidden = 0;  // down(silu(gate x) * up x)
};

struct LayerSpec {
  Mixer mixer;
  Mlp mlp;
};

struct ModelSpec {
  std::string model_type;  // as config.json names it
  int32_t dim = 0, vocab = 0;
  float norm_eps = 1e-6f;
  bool tied_embeddings = false;
  Token bos = -1;            // -1: none
  std::vector<Token> eos;    // any of these ends an answer; empty: none
  std::vector<LayerSpec> layers;
};

// Bytes that a sequence keeps between two tokens, by kind. Everything is float32.
struct StateSize {
  size_t recurrent = 0;     // state matrices
  size_t conv = 0;          // short-convolution histories
  size_t ring = 0;          // windowed attention: as fixed as any other state
  size_t kv_per_token = 0;  // attention without a window; 0 for a purely recurrent model

  size_t slot() const { return recurrent + conv + ring; }
  StateSize& operator+=(const StateSize& other);
};
StateSize state_size(const Mixer& mixer);
StateSize state_size(const ModelSpec& spec);

}  // namespace weir
