#pragma once
#include <cstdint>

#include "engine/model.h"
#include "engine/state_pool.h"
#include "kernels/op.h"

namespace weir {

// The sizes of one step.
struct StepShape {
  int32_t rows = 0, tokens = 0, outputs = 0;
  int32_t singles = -1, longer = -1;  // as Rows has them; where all rows have one token: -1
  bool operator==(const StepShape&) const = default;
  // Rows of one token, each of which is wanted: output i is token i.
  bool wants_all() const { return rows == tokens && outputs == tokens; }
};

// The small arrays of a step, on the device; sized for the largest step.
struct StepArrays {
  const Token* ids = nullptr;               // [tokens]
  const Token* drawn = nullptr;             // by the step before; see Embed
  Token* read = nullptr;                    // [tokens], written by this one
  const int32_t* slot = nullptr;            // [rows]
  const int32_t* first = nullptr;           // [rows]
  const int32_t* begin = nullptr;           // [rows + 1]
  const int32_t* written = nullptr;         // [rows], see Rows
  const int32_t* page_table = nullptr;      // [rows, pages_per_row]
  int32_t pages_per_row = 0;
  const int32_t* output_token = nullptr;    // [outputs]
  Sample sample;                            // its pointers; count, vocab and logits are lower()'s
};

// Scratch memory for activations, handed out from the bottom and taken back as a stack. Built
// without memory it only measures: run lower() on the largest shape, then read peak().
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(float* data) : data_(data) {}

  Acts take(int64_t tokens, int64_t dim);  // stride = dim rounded up to 16 floats
  int64_t mark() const { return used_; }
  void release(int64_t mark) { used_ = mark; }
  int64_t peak() const { return peak_; }   // floats

 private:
  float* data_ = nullptr;
  int64_t used_ = 0, peak_ = 0;
};

// What crosses layers, or the halves of one, inside a token: buffers of the step's workspace.
struct Lanes {
  Acts values;       // of the layer at hand, convolved and activated: [tokens, heads * value_dim]
  Acts errors;       // its write residuals; the same shape
  Acts emitted;      // those of all layers so far that later ones read, side by side; or the latest
  Acts first_values; // layer 0's, where later layers need them (RWKV-7): [tokens, values]
};

// What the ops of one layer share.
struct LayerContext {
  Program& program;
  Workspace& workspace;
  Rows rows;
  const StepArrays& arrays;
  const ModelSpec& spec;
  const Route& route;
  const RouteWeights& route_weights;
  Lanes& lanes;
  Acts in;              // [tokens, dim], normalised
  Acts raw;             // the same before its norm, for mixers that want it
  Acts residual;        // [tokens, dim]: the mixer adds its output here
  bool replaces = false;  // its output takes the place of what is there
  // Tokens whose output is wanted. Fewer than there are: those of arrays.output_token, and `picked`
  // is where lower_residual() leaves them of the stream, [wanted, dim].
  int32_t wanted = 0;
  Acts picked;
  SlotState state;      // the layer's part of the slots
  SlotState pending;    // what waits of them, where their writes are deferred
  float* pages = nullptr;
  int64_t page_stride = 0;
  int32_t page_tokens = 0;
};

// A whole step: embedding, layers, head, sampling. With writes deferred where the pool has room for
// them: see keep_deferred().
Program lower(const ModelSpec& spec, const ModelWeights& weights, const StatePool* pool,
              const Limits& limits, const StepArrays& arrays, const StepShape& shape,
              Workspace& workspace);

// One mixer: its tensors (names below `prefix`), and its ops.
DeltaWeights bind_weights(const DeltaMixer& mixer, int32_t dim, const std::string& prefix,
                          WeightReader& reader);
AttentionWeights bind_weights(const AttentionMixer& mixer, int32_t dim, const std::string& prefix,
                              WeightReader& reader);
SwilaWeights bind_weights(const SwilaMixer& mixer, int32_t dim, const std::string& prefix,
                          WeightReader& reader);
GlaWeights bind_weights(const GlaMixer& mixer, int32_t dim, const std::string& prefix,
                        WeightReader& reader);
RetNetWeights bind_weights(const RetNetMixer& mixer, int32_t dim, const std::string& prefix,
                           WeightReader& reader);
Hgrn2Weights bind_weights(const Hgrn2Mixer& mixer, int32_t dim, const std::string& prefix,
                          WeightReader& reader);
LinearMixerWeights bind_weights(const LinearMixer& mixer, int32_t dim, const std::string& prefix,
                                WeightReader& reader);
GsaWeights bind_weights(const GsaMixer& mixer, int32_t dim, const std::string& prefix,
                        WeightReader& reader);
MomWeights bind_weights(const MomMixer& mixer, int32_t dim, const std::string& prefix,
                        WeightReader& reader);
Mamba2Weights bind_weights(const Mamba2Mixer& mixer, int32_t dim, const std::string& prefix,
                           WeightReader& reader);
Rwkv7Weights bind_weights(const Rwkv7Mixer& mixer, int32_t dim, const std::string& prefix,
                          WeightReader& reader);
EraseWeights bind_weights(const CombaMixer& mixer, int32_t dim, const std::string& prefix,
                          WeightReader& reader);
EraseWeights bind_weights(const DeltaProductMixer& mixer, int32_t dim, const std::string& prefix,
                          WeightReader& reader);
// Cross-layer routing: the lanes that outlive a layer, those of one layer, its tensors (names below
// the layer's own prefix), what comes to its values before the mixer, what it adds after the MLP.
Lanes make_lanes(const ModelSpec& spec, int32_t tokens, Workspace& workspace);
void take_lanes(const LayerSpec& spec, LayerContext& layer);
RouteWeights bind_route(const LayerSpec& layer, int32_t dim, const std::string& prefix,
                        WeightReader& reader);
void lower_value_route(const DeltaMixer& mixer, LayerContext& layer, DeltaMix& mix);
void lower_hidden_route(const LayerSpec& spec, LayerContext& layer);

void lower(const DeltaMixer& mixer, const DeltaWeights& weights, LayerContext& layer);
void lower(const AttentionMixer& mixer, const AttentionWeights& weights, LayerContext& layer);
void lower(const SwilaMixer& mixer, const SwilaWeights& weights, LayerContext& layer);
void lower(const GlaMixer& mixer, const GlaWeights& weights, LayerContext& layer);
void lower(const RetNetMixer& mixer, const RetNetWeights& weights, LayerContext& layer);
void lower(const Hgrn2Mixer& mixer, const Hgrn2Weights& weights, LayerContext& layer);
void lower(const LinearMixer& mixer, const LinearMixerWeights& weights, LayerContext& layer);
void lower(const GsaMixer& mixer, const GsaWeights& weights, LayerContext& layer);
void lower(const MomMixer& mixer, const MomWeights& weights, LayerContext& layer);
void lower(const Mamba2Mixer& mixer, const Mamba2Weights& weights, LayerContext& layer);
void lower(const Rwkv7Mixer& mixer, const Rwkv7Weights& weights, LayerContext& layer);
void lower(const CombaMixer& mixer, const EraseWeights& weights, LayerContext& layer);
void lower(const DeltaProductMixer& mixer, const EraseWeights& weights, LayerContext& layer);

}  // namespace weir
