#pragma once
#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/safetensors.h"
#include "engine/spec.h"
#include "kernels/backend.h"

namespace weir {

// Weights as ops take them: matrices in the checkpoint's dtype where the device can read them,
// everything small as float32.

struct DeltaWeights {
  Matrix q, k, v;
  const float *conv_q = nullptr, *conv_k = nullptr, *conv_v = nullptr;  // [channels, width]
  const float *conv_q_bias = nullptr, *conv_k_bias = nullptr, *conv_v_bias = nullptr;
  Matrix a;                       // the full-rank decay map: [numbers a token, dim]
  Matrix f0, f1;                  // the low-rank one of the per-channel gates
  const float* decay_a = nullptr; // exp(A_log)
  const float* dt_bias = nullptr;
  Matrix b;                       // beta logits, or erase logits with Strength::EraseWrite
  Matrix w;                       // write logits
  Matrix g;                       // OutputGate::Silu
  Matrix g0, g1;                  // the low-rank output gates
  const float* g1_bias = nullptr;
  const float* norm = nullptr;    // [value_dim]
  Matrix o;
};

struct AttentionWeights {
  Matrix q, k, v, o;
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;
  Matrix forget;                  // [heads, dim]
  const float* forget_bias = nullptr;
  Matrix g;                       // of the output gate
};

// A short convolution; no channels: there is none.
struct Convolution {
  int32_t channels = 0, width = 0;
  const float* taps = nullptr;  // [channels, width]
  const float* bias = nullptr;  // [channels], or null
};

// Two matrices with nothing between them: y = up (down x).
struct LowRank {
  Matrix down, up;
};

struct SwilaWeights {
  Matrix q, k, v, o;
  const float *conv_q = nullptr, *conv_k = nullptr, *conv_v = nullptr;  // [channels, width]
  LowRank key_router, query_router, beta;
  Matrix key_mix, query_mix;      // temporal
  const float *key_mix_bias = nullptr, *query_mix_bias = nullptr;
  LowRank decay;                  // gated
  const float* decay_a = nullptr; // exp(A_log)
  const float* dt_bias = nullptr;
  const float* norm = nullptr;    // [head_dim]
};

struct GlaWeights {
  Matrix q, k, v, g, o;
  Convolution conv_q, conv_k, conv_v;
  LowRank decay;
  const float* decay_bias = nullptr;  // [kv_heads * key_dim]
  const float* norm = nullptr;        // [value_dim]
};

struct RetNetWeights {
  Matrix q, k, v, g, o;
  const float* log_decay = nullptr;  // [heads]
  const float* norm = nullptr;       // [value_dim]
};

struct Hgrn2Weights {
  Matrix q, f, i, o;
  Convolution conv_q, conv_f, conv_i;
  const float* lower_bound = nullptr;  // [heads * head_dim]; null in layer 0
  const float* norm = nullptr;         // [heads * value_dim]
};

// A learned map of a head's vector, [dim, dim] float32; see FeatureMap.
struct FeatureWeights {
  const float *weight = nullptr, *bias = nullptr, *weight2 = nullptr, *bias2 = nullptr;
};

struct LinearMixerWeights {
  Matrix q, k, v, o;
  FeatureWeights feature_q, feature_k;
  const float* norm = nullptr;  // [value_dim]
};

struct GsaWeights {
  Matrix q, k, v, f, o;
  Convolution conv_q, conv_k, conv_v;
  FeatureWeights feature;
  const float* norm = nullptr;  // [heads * value_dim]
};

struct Mamba2Weights {
  Matrix in, out;
  const float *in_bias = nullptr, *out_bias = nullptr;
  Convolution conv;
  const float* dt_bias = nullptr;  // [heads]
  const float* decay_a = nullptr;  // [heads], -exp(A_log)
  const float* skip = nullptr;     // [inner]
  const float* norm = nullptr;     // [inner], or null
};

// Gated DeltaProduct and Comba.
struct EraseWeights {
  Matrix q, k, v, a, b, g, o;
  Convolution conv_q, conv_k, conv_v;
  const float* decay_a = nullptr;  // [heads], exp(A_log)
  const float* dt_bias = nullptr;  // [heads]
  const float* inner_decay = nullptr;  // Comba: [heads * key_dim], sigmoid(decay) of each head
  const float* correction = nullptr;   // Comba: [heads * key_dim], -D of each head
  const float* norm = nullptr;     // [value_dim]
};

struct Rwkv7Weights {
  struct Lora {
    LowRank maps;                  // with an activation between them
    const float* bias = nullptr;   // or null
  };
  const float* mixes = nullptr;    // [6, dim]
  Matrix r, k, v, o;
  Lora decay, rate, gate, value;
  const float* read_scale = nullptr;  // [heads * key_dim], k_k; likewise the next two
  const float* key_rate = nullptr;    // k_a
  const float* bonus = nullptr;       // r_k
  const float *norm = nullptr, *norm_bias = nullptr;  // [heads * value_dim]
};

struct MomWeights {
  struct Memory {
    Matrix k, v, b, a;
  };
  Matrix q, router, g, o;        // router: [memories, dim]
  std::vector<Memory> memories;  // empty with a single projection
  Memory shared;                 // of the shared memory, or of all
  Convolution conv_q, conv_k, conv_v;
  const float* decay_a = nullptr; // exp(A_log), [heads]
  const float* dt_bias = nullptr; // [heads]
  const float* norm = nullptr;    // [value_dim]
};

using MixerWeights = std::variant<DeltaWeights, AttentionWeights, SwilaWeights, GlaWeights,
                                  RetNetWeights, Hgrn2Weights, LinearMixerWeights, GsaWeights,
                                  Mamba2Weights, EraseWeights, Rwkv7Weights,
                                  MomWeights>;

// See Route and the ops that it becomes.
struct RouteWeights {
  const float* gamma = nullptr;        // [value_heads * value_dim], whatever its kind
  const float* gate_weight = nullptr;  // [value_dim], with gate_bias [1]: Gamma::FromValues
  const float* gate_bias = nullptr;
  const float* query = nullptr;        // [value_heads * value_dim]
  const float* self_bias = nullptr;    // [value_heads]
  const float* signal_gate = nullptr;  // [2]
  const float* ones = nullptr;         // the gain of a signal's norm, which has none
  Matrix down, proj;                   // down only with a rank
};

struct LayerWeights {
  const float* mixer_norm = nullptr;  // [dim]
  MixerWeights mixer;
  RouteWeights route;
  const float* mlp_norm = nullptr;    // [dim]; this and below only with an Mlp
  Matrix gate, up, down;              // no gate with Mlp::Kind::ShiftedSquare
  const float* mlp_mix = nullptr;     // [dim]; of its token shift
  const float *mixer_norm_bias = nullptr, *mlp_norm_bias = nullptr;  // BlockNorm::Layer: [dim]
  const float *mixer_depth = nullptr, *mlp_depth = nullptr;  // [dim]: depth queries, gains included
};

struct ModelWeights {
  Matrix embedding;  // [vocab, dim]
  std::vector<LayerWeights> layers;
  const float *norm = nullptr, *norm_bias = nullptr;
  const float *embedding_norm = nullptr, *embedding_norm_bias = nullptr;
  const float* depth = nullptr;  // [dim]: the head's depth query
  Matrix head;       // [vocab, dim]; the embedding when tied
  size_t bytes = 0;  // of all tensors in use

  // The host memory of what was widened to float32; pointers above may lie in it.
  std::vector<std::vector<float>> converted;
};

// Hands out a checkpoint's tensors by name with shape and dtype checked, and remembers the first
// thing that was wrong (file, tensor, expected, found) instead of returning it each time. Tensors
// never asked for are refused by finish(). Knows the old names of fla checkpoints.
class WeightReader {
 public:
  // Without a backend it only checks: nothing is copied to a device.
  WeightReader(const Safetensors& files, Backend* backend);
  // Without files it hands out shapes with null data and finds nothing wrong.
  WeightReader() = default;

  Matrix matrix(const std::string& name, int32_t rows, int32_t cols);
  // A short tensor as float32: [size], or with further dimensions of 1. Every number is finite.
  const float* vector(const std::string& name, int64_t size);
  const float* vector_exp(const std::string& name, int64_t size);  // exp of each element
  // A short convolution's taps, stored [channels, 1, width], as float32.
  const float* conv(const std::string& name, int32_t channels, int32_t width);
  Convolution convolution(const std::string& name, int32_t channels, int32_t width);  // and bias
  // A short matrix as float32.
  const float* table(const std::string& name, int32_t rows, int32_t cols);
  // For what is computed from tensors at load: numbers() reads one as float32 on the host, keep()
  // stores a result for the weights' life, where the device reads it.
  const float* keep(std::vector<float> values);
  std::vector<float> numbers(const std::string& name, const std::vector<int64_t>& shape);
  bool has(const std::string& name) const;
  int64_t stored_rows(const std::string& name) const;  // the first dimension; 0: absent
  void ignore(const std::string& name);  // known, and of no effect
  // Rows first .. first + rows of a matrix stored with `stored_rows` rows (the old fused MLP).
  Matrix rows_of(const std::string& name, int32_t stored_rows, int32_t first, int32_t rows,
                 int32_t cols);
  void refuse(const std::string& message);
  absl::Status finish();                 // the first error, or the first tensor nobody asked for
  size_t bytes() const { return bytes_; }
  // What the vectors handed out may point into: keep it as long as them.
  std::vector<std::vector<float>> take_converted() { return std::move(converted_); }

 private:
  const TensorView* find(const std::string& name) const;
  const TensorView* take(const std::string& name, const std::vector<int64_t>& shape);
  const float* widen(const std::string& name, const TensorView* tensor, bool exponential);

  const Safetensors* files_ = nullptr;
  Backend* backend_ = nullptr;
  std::set<const TensorView*> asked_;
  std::vector<std::vector<float>> converted_;
  absl::Status status_;
  size_t bytes_ = 0;
};

// Takes over what the tensors say of a model whatever its config.json says: RWKV-7's ranks.
void adopt_stored_ranks(const Safetensors& files, ModelSpec& spec);

// Every matrix of a model as a shape without data: enough to lower a step and measure it.
ModelWeights weight_shapes(const ModelSpec& spec);

// Checks every tensor first, and only then hands anything to the backend.
absl::StatusOr<ModelWeights> read_weights(const ModelSpec& spec, const Safetensors& files,
                                          Backend& backend);

}  // namespace weir
