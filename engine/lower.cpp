#include "engine/lower.h"

#include <algorithm>
#include <type_traits>

#include "kernels/check.h"

namespace weir {
namespace {

// A layer's own part of the step, after the norm before it.
void lower_mixer(const LayerSpec& spec, const LayerWeights& weights, LayerContext& layer) {
  std::visit(
      [&](const auto& mixer) {
        using Weights =
            decltype(bind_weights(mixer, 0, std::string(), std::declval<WeightReader&>()));
        lower(mixer, std::get<Weights>(weights.mixer), layer);
      },
      spec.mixer);
}

void lower_mlp(const Mlp& mlp, const LayerWeights& weights, LayerContext& layer) {
  const int32_t tokens = layer.rows.tokens;
  const Acts hidden = layer.workspace.take(tokens, 2 * int64_t(mlp.hidden));
  layer.program.push_back(Linear{.tokens = tokens,
                                 .in = layer.spec.dim,
                                 .parts = 2,
                                 .part = {weights.gate, weights.up},
                                 .x = layer.in,
                                 .y = hidden});
  layer.program.push_back(Swiglu{.tokens = tokens,
                                 .dim = mlp.hidden,
                                 .gate = hidden,
                                 .up = hidden.from(mlp.hidden),
                                 .out = hidden});
  layer.program.push_back(Linear{.tokens = tokens,
                                 .in = mlp.hidden,
                                 .parts = 1,
                                 .part = {weights.down},
                                 .accumulate = true,
                                 .x = hidden,
                                 .y = layer.residual});
}

// Logits of the wanted tokens, and what is drawn from them.
void lower_outputs(const ModelSpec& spec, const ModelWeights& weights, const StepArrays& arrays,
                   int32_t outputs, Acts residual, Workspace& workspace, Program& program) {
  if (outputs == 0) return;
  const Acts picked = workspace.take(outputs, spec.dim);
  const Acts logits = workspace.take(outputs, spec.vocab);
  program.push_back(Gather{.count = outputs,
                           .dim = spec.dim,
                           .index = arrays.output_token,
                           .in = residual,
                           .out = picked});
  program.push_back(RmsNorm{.tokens = outputs,
                            .dim = spec.dim,
                            .eps = spec.norm_eps,
                            .weight = weights.norm,
                            .in = picked,
                            .out = picked});
  program.push_back(Linear{.tokens = outputs,
                           .in = spec.dim,
                           .parts = 1,
                           .part = {weights.head},
                           .x = picked,
                           .y = logits});
  Sample sample = arrays.sample;
  sample.count = outputs;
  sample.vocab = spec.vocab;
  sample.logits = logits;
  program.push_back(sample);
}

}  // namespace

Acts Workspace::take(int64_t tokens, int64_t dim) {
  constexpr int64_t kAlign = 16;  // floats: a cache line
  const int64_t stride = (dim + kAlign - 1) / kAlign * kAlign;
  const Acts acts{data_ == nullptr ? nullptr : data_ + used_, stride};
  used_ += tokens * stride;
  peak_ = std::max(peak_, used_);
  return acts;
}

Program lower(const ModelSpec& spec, const ModelWeights& weights, const StatePool* pool,
              const Limits& limits, const StepArrays& arrays, const StepShape& shape,
              Workspace& workspace) {
  WEIR_CHECK(spec.layers.size() == weights.layers.size());
  Program program;
  const int32_t tokens = shape.tokens;
  const Rows rows{shape.rows, tokens, arrays.slot, arrays.first, arrays.begin};
  const Acts residual = workspace.take(tokens, spec.dim);
  const Acts normed = workspace.take(tokens, spec.dim);
  program.push_back(
      Embed{.tokens = tokens, .ids = arrays.ids, .table = weights.embedding, .out = residual});

  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const LayerWeights& layer_weights = weights.layers[i];
    LayerContext layer{.program = program,
                       .workspace = workspace,
                       .rows = rows,
                       .arrays = arrays,
                       .spec = spec,
                       .in = normed,
                       .residual = residual,
                       .page_tokens = limits.page_tokens};
    if (pool != nullptr) {
      layer.state = pool->layer_state(int32_t(i));
      layer.pages = pool->layer_pages(int32_t(i));
      layer.page_stride = pool->page_floats();
    }
    const auto norm = [&](const float* weight) {
      program.push_back(RmsNorm{.tokens = tokens,
                                .dim = spec.dim,
                                .eps = spec.norm_eps,
                                .weight = weight,
                                .in = residual,
                                .out = normed});
    };
    const int64_t mark = workspace.mark();
    norm(layer_weights.mixer_norm);
    lower_mixer(spec.layers[i], layer_weights, layer);
    workspace.release(mark);
    if (!spec.layers[i].mlp) continue;
    norm(layer_weights.mlp_norm);
    lower_mlp(*spec.layers[i].mlp, layer_weights, layer);
    workspace.release(mark);
  }
  lower_outputs(spec, weights, arrays, shape.outputs, residual, workspace, program);
  return program;
}

}  // namespace weir
