#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/delta_mix.h"
#include "kernels/route_signal.h"

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
  Additive,         // nothing is erased: additive linear attention
};
enum class OutputGate : uint8_t {
  None,
  Silu,             // silu(g_proj x)
  LowRankSigmoid,   // sigmoid(g_proj.1 (g_proj.0 x) + bias)
  LowRankSilu,      // the same with silu
};

// DeltaNet, Gated DeltaNet, KDA, Gated DeltaNet-2: one state matrix for each value head.
struct DeltaMixer {
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  DecayGate decay = DecayGate::PerHead;
  bool full_rank_decay = false;       // a decay of each channel comes from one matrix, a_proj
  float lower_bound = 0;              // < 0: the bounded decay gate
  Strength strength = Strength::Beta;
  bool negative_eigenvalues = false;  // beta in (0, 2)
  OutputGate output_gate = OutputGate::Silu;
  bool gates_read_residual = false;   // the low-rank maps read x before the layer's norm
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
  bool norm_per_head = false;  // each head has its own part of the norms' weights
  bool forget_gate = false;    // Forgetting Transformer: scores decay with what lies between
  bool output_gate = false;  // answers times sigmoid(g_proj x)
};

// Switching Linear Attention: each head keeps `mixtures` state matrices, weighed by posteriors.
struct SwilaMixer {
  int32_t heads = 0, mixtures = 0, head_dim = 0;
  int32_t router_rank = 0, beta_rank = 0, gate_rank = 0;  // inner widths of the low-rank maps
  bool temporal = false;  // the posterior and the query's prior carry over to the next token
  bool gated = false;     // a decay for each mixture and key channel
  ShortConv conv;
};

// Gated linear attention: a decay for each key channel, nothing erased.
struct GlaMixer {
  int32_t heads = 0, kv_heads = 0, key_dim = 0, value_dim = 0;
  std::optional<ShortConv> conv;
  Activation feature = Activation::None;  // of queries and keys
  std::optional<float> clamp_min;         // of the log decay
  bool output_gate = true;
};

// RetNet: constant decays 1 - 2^(-5 - head), rotary positions.
struct RetNetMixer {
  int32_t heads = 0, kv_heads = 0, key_dim = 0, value_dim = 0;
  Activation feature = Activation::None;
  bool output_gate = true;
};

// HGRN2: keys are what the decays leave free.
struct Hgrn2Mixer {
  int32_t heads = 0, head_dim = 0, value_dim = 0;
  std::optional<ShortConv> conv;
  bool lower_bound = true;             // decays of layer N are at least a learned bound
  int32_t layer = 0, layers = 0;       // which the bound depends on
};

enum class LinearFeature : uint8_t {
  ElementwiseProduct,
  Hedgehog,
  T2r,
  EluPlusOne,
  Relu,
  Identity,
  Dpfp
};

// Additive linear attention.
struct LinearMixer {
  int32_t heads = 0, kv_heads = 0, key_dim = 0, value_dim = 0;
  LinearFeature feature = LinearFeature::ElementwiseProduct;
  bool tied_feature = false;           // one map for queries and keys
  bool norm_q = false, norm_k = false; // features divided by their sum
  bool normalise = false;              // answers divided by the query's product with all keys

  int32_t feature_dim() const;         // numbers that a feature map makes of key_dim
};

// Gated slot attention: `slots` learned slots, written by one recurrence, read by another.
struct GsaMixer {
  int32_t heads = 0, kv_heads = 0, slots = 0, key_dim = 0, value_dim = 0;
  std::optional<ShortConv> conv;
  enum class Feature : uint8_t { Swish, Relu, T2r } feature = Feature::Swish;
  float gate_divisor = 8;
};

// Mamba-2 (arXiv 2405.21060).
struct Mamba2Mixer {
  int32_t heads = 0, head_dim = 0, state_dim = 0, groups = 1;
  ShortConv conv;
  bool bias = false, conv_bias = true;
  bool norm = true, norm_before_gate = false;
  bool skip_per_value = false;         // D has a number for each value
  float dt_min = 0, dt_max = 0;        // clamps of dt; dt_max infinite: none

  int32_t inner() const { return heads * head_dim; }
  int32_t conv_channels() const { return inner() + 2 * groups * state_dim; }
};

// Gated DeltaProduct (arXiv 2502.10297): several updates by the delta rule for each token. Read for
// more than one; with one it is a DeltaMixer.
struct DeltaProductMixer {
  int32_t heads = 0, key_dim = 0, value_dim = 0;
  int32_t updates = 1;                // a token
  bool decay = false;                 // as Gated DeltaNet's, once a token
  bool negative_eigenvalues = false;  // beta in (0, 2)
  bool output_gate = true;
  std::optional<ShortConv> conv = ShortConv{};
};

// Comba (arXiv 2506.02475): a delta rule that reads its state before decaying it, along a key that
// is scaled down per head; so much of it is taken out of the query too.
struct CombaMixer {
  int32_t heads = 0, key_dim = 0, value_dim = 0;
  bool output_gate = true;
  std::optional<ShortConv> conv = ShortConv{};
};

// RWKV-7 (arXiv 2503.14456): what is read along one direction is taken out along it, scaled by a
// rate for each channel; keys and values are written without either. Inputs are shifted in time.
struct Rwkv7Mixer {
  int32_t heads = 0, key_dim = 0, value_dim = 0;
  // Of low-rank maps. Where config.json does not tell them they are the stored tensors'.
  int32_t decay_rank = 0, gate_rank = 0, rate_rank = 0, value_rank = 0;
  bool first = false;       // the model's first layer: its values are mixed into all others'
  bool fused_norm = true;   // lengths of keys are sqrt(sum x^2 + 1e-6); false: without the 1e-6
};

// Mixture-of-Memories: Gated DeltaNet with several states, of which a token uses the `chosen` ones
// that a router gives most, and perhaps one more that all tokens use.
struct MomMixer {
  int32_t heads = 0, key_dim = 0, value_dim = 0;
  int32_t memories = 0, chosen = 0;
  bool shared = true;              // the memory that all tokens use
  bool single_projection = false;  // keys, values and gates are the same for all memories
  bool output_gate = true;
  ShortConv conv;                  // the same taps for all memories, a history for each

  int32_t states() const { return memories + (shared ? 1 : 0); }
  int32_t conv_channels() const { return heads * (2 * key_dim + value_dim); }
};

using Mixer = std::variant<DeltaMixer, AttentionMixer, SwilaMixer, GlaMixer, RetNetMixer,
                           Hgrn2Mixer, LinearMixer, GsaMixer, Mamba2Mixer, DeltaProductMixer,
                           CombaMixer, Rwkv7Mixer, MomMixer>;

struct Mlp {
  enum class Kind : uint8_t {
    Gated,          // down(silu(gate x) * up x)
    ShiftedSquare,  // RWKV's: down(relu(up x)^2) of inputs shifted in time
  };
  int32_t hidden = 0;
  Kind kind = Kind::Gated;
};

// Cross-layer routing (arXiv 2607.07953), inside one token. A recurrent layer emits the residual u
// of its write, beta (v - what the state recalls); what lower layers emitted may change its values.
struct ErrorRoute {
  enum class Mode : uint8_t {
    Latest,   // the nearest lower layer's
    Mean,     // of all lower ones
    Softmax,  // weighed by a learned query
    Attend,   // likewise, the layer's own values among them: they are replaced by the mix
  };
  enum class Gamma : uint8_t { Scalar, PerHead, PerChannel, FromValues };

  Mode mode = Mode::Latest;
  Gamma gamma = Gamma::Scalar;      // with Attend: of the values' own bias, PerHead or FromValues
  bool normalize = false;
  bool to_values = true, to_answers = false;
  float eps = 1e-6f;
  int32_t sources = 0;              // lower layers that emit
};
// After the MLP, projected into the residual stream: something that the layer has computed.
struct HiddenRoute {
  enum class Signal : uint8_t { Error, Value, GatedValue, Both, Self };

  Signal signal = Signal::Value;
  int32_t rank = 0;                 // 0: one matrix; otherwise the inner width of two
  bool normalize = false;

  bool reads_values() const { return signal != Signal::Error && signal != Signal::Self; }
  bool reads_errors() const { return signal != Signal::Value && signal != Signal::Self; }
};
struct Route {
  std::optional<ErrorRoute> error;
  std::optional<HiddenRoute> hidden;
};

struct LayerSpec {
  Mixer mixer;
  std::optional<Mlp> mlp;
  Route route;                      // only with a DeltaMixer
};

// Attention residuals: in place of a residual stream, each half of a layer (mixer, MLP) and the
// head read a softmax mix, over depth, of the embedding and of what the halves before added.
// `block` halves in turn add up to one source of the mix; halves 0, block, 2 block .. begin one.
struct DepthResidual {
  int32_t block = 1;
  float eps = 1e-6f;  // of the norm of a source before it meets a query
  // That norm has a gain. Without gains layer 0's mixer, which has one source, has no query either.
  bool gains = true;
};

// How a checkpoint names its tensors.
enum class TensorNames : uint8_t { Fla, Mamba, Rwkv };

// What stands before each half of a layer, and before the head.
enum class BlockNorm : uint8_t {
  Rms,
  Layer,             // with the mean taken out
  LayerWithoutBias,
};

struct ModelSpec {
  std::string model_type;  // as config.json names it
  TensorNames names = TensorNames::Fla;
  int32_t dim = 0, vocab = 0;
  BlockNorm norm = BlockNorm::Rms;
  bool embedding_norm = false;  // one more norm, of what the residual stream begins with
  float norm_eps = 1e-6f;
  bool tied_embeddings = false;
  Token bos = -1;            // -1: none
  std::vector<Token> eos;    // any of these ends an answer; empty: none
  std::vector<LayerSpec> layers;
  std::optional<DepthResidual> depth_residual;  // then every layer has an MLP
};

// Bytes that a sequence keeps between two tokens, by kind. Everything is float32.
struct StateSize {
  size_t recurrent = 0;     // state matrices
  size_t conv = 0;          // short-convolution histories, and inputs kept for token shifts
  size_t ring = 0;          // windowed attention: as fixed as any other state
  size_t kv_per_token = 0;  // attention without a window; 0 for a purely recurrent model

  size_t slot() const { return recurrent + conv + ring; }
  StateSize& operator+=(const StateSize& other);
};
StateSize state_size(const Mixer& mixer);
StateSize state_size(const LayerSpec& layer, int32_t dim);  // the mixer's, then the MLP's
StateSize state_size(const ModelSpec& spec);
// What waits beside a layer's states where their writes are deferred (kernels/pending.h): further
// bytes of a slot.
size_t waiting_bytes(const LayerSpec& layer);
size_t waiting_bytes(const ModelSpec& spec);

}  // namespace weir
