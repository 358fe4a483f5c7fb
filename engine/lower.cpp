#include "engine/lower.h"

#include <algorithm>
#include <type_traits>

#include "engine/projection.h"
#include "kernels/check.h"

namespace weir {
namespace {

// What passes from one half of a layer to the next: a residual stream, or, with attention
// residuals, the sources that the halves before have made, in turn, the last one still growing.
class Residual {
 public:
  Residual(const ModelSpec& spec, int32_t tokens, Workspace& workspace, Program& program)
      : spec_(spec), tokens_(tokens), program_(program) {
    const int64_t halves = 2 * int64_t(spec.layers.size());
    const int64_t block = spec.depth_residual ? spec.depth_residual->block : 1;
    const int64_t most = spec.depth_residual ? 1 + (halves + block - 1) / block : 1;
    sources_ = workspace.take(most * tokens, spec.dim);
  }

  // What the next half, or the head, reads: the stream, or a mix of the sources, made in `space`.
  Acts read(const float* query, Acts space) const {
    if (!spec_.depth_residual) return current();
    program_.push_back(DepthAttention{.tokens = tokens_,
                                      .dim = spec_.dim,
                                      .eps = spec_.depth_residual->eps,
                                      .query = query,
                                      .count = count_,
                                      .sources = sources_,
                                      .source_stride = tokens_ * sources_.stride,
                                      .out = space});
    return space;
  }
  // A half is about to write: where, and whether its output begins there.
  void write(LayerContext& layer) {
    layer.replaces = spec_.depth_residual && half_++ % spec_.depth_residual->block == 0;
    if (layer.replaces) ++count_;
    layer.residual = current();
  }
  // From here on the stream is this one, of so many tokens.
  void replace(Acts stream, int32_t tokens) {
    sources_ = stream;
    tokens_ = tokens;
  }
  // The stream, or the source that grows.
  Acts current() const { return sources_.from((count_ - 1) * tokens_ * sources_.stride); }

 private:
  const ModelSpec& spec_;
  int32_t tokens_ = 0;
  Program& program_;
  Acts sources_;  // [sources * tokens, dim]
  int32_t count_ = 1, half_ = 0;
};

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

// A norm of dim numbers, as the model has them around its halves. read_once: by the next op.
void lower_norm(const ModelSpec& spec, int32_t tokens, const float* weight, const float* bias,
                Acts in, Acts out, bool read_once, Program& program) {
  if (spec.norm == BlockNorm::Rms) {
    program.push_back(RmsNorm{.tokens = tokens,
                              .dim = spec.dim,
                              .eps = spec.norm_eps,
                              .weight = weight,
                              .in = in,
                              .out = out,
                              .read_once = read_once});
    return;
  }
  program.push_back(HeadNorm{.tokens = tokens,
                             .groups = 1,
                             .dim = spec.dim,
                             .eps = spec.norm_eps,
                             .kind = HeadNorm::Kind::Centred,
                             .weight = weight,
                             .bias = bias,
                             .in = in,
                             .out = out});
}

// RWKV's channel mixing. The last token's input lies behind the mixer's part of the state.
void lower_shifted_mlp(const LayerSpec& spec, const LayerWeights& weights, LayerContext& layer) {
  const int32_t dim = layer.spec.dim;
  const Acts shifted = layer.workspace.take(layer.rows.tokens, dim);
  const auto mixer_floats = int64_t(state_size(spec.mixer).slot() / sizeof(float));
  layer.program.push_back(TokenShift{.rows = layer.rows,
                                     .dim = dim,
                                     .mix = weights.mlp_mix,
                                     .in = layer.in,
                                     .out = shifted,
                                     .history = layer.state.from(mixer_floats)});
  const Acts hidden = lower_linear(layer, weights.up, nullptr, shifted);
  lower_activation(layer, Activation::ReluSquared, spec.mlp->hidden, hidden);
  lower_residual(layer, weights.down, hidden);
}

void lower_mlp(const Mlp& mlp, const LayerWeights& weights, LayerContext& layer) {
  const int32_t tokens = layer.wanted;
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
                                 .out = hidden,
                                 .read_once = true});
  layer.program.push_back(Linear{.tokens = tokens,
                                 .in = mlp.hidden,
                                 .parts = 1,
                                 .part = {weights.down},
                                 .accumulate = !layer.replaces,
                                 .x = hidden,
                                 .y = layer.residual});
}

// Whether the layer also wants its input as it was before the norm.
bool reads_raw(const LayerSpec& layer) {
  const auto* mixer = std::get_if<DeltaMixer>(&layer.mixer);
  return mixer != nullptr && mixer->gates_read_residual;
}

// Whether the normalised input of a half is read by the one projection after it and no more.
bool mixer_reads_once(const LayerSpec& layer) {
  return std::holds_alternative<DeltaMixer>(layer.mixer) && !layer.route.error &&
         !layer.route.hidden;
}
bool mlp_reads_once(const LayerSpec& layer) {
  return layer.mlp->kind != Mlp::Kind::ShiftedSquare && !layer.route.hidden;
}

// Of how many tokens a layer's output is wanted: of all, but for the last layer's, which only the
// head reads. What needs every token's output itself: sources that are mixed anew, the shifted
// input of an MLP, what is routed past it.
int32_t wanted_tokens(const ModelSpec& spec, const LayerSpec& layer, const StepShape& shape) {
  const bool last = &layer == &spec.layers.back();
  const bool shifts = layer.mlp && layer.mlp->kind == Mlp::Kind::ShiftedSquare;
  return last && !shifts && !spec.depth_residual && !layer.route.hidden
             ? std::min(shape.outputs, shape.tokens)
             : shape.tokens;
}

// Both halves of a layer, each from the residual through a norm to the residual.
void lower_layer(const LayerSpec& spec, const LayerWeights& weights, Residual& residual,
                 LayerContext& layer) {
  Workspace& workspace = layer.workspace;
  const int32_t tokens = layer.rows.tokens;
  const bool picks = layer.wanted < tokens;
  const auto begin_half = [&](int32_t count, const float* depth, const float* norm,
                              const float* bias, Acts space, bool read_once) {
    layer.raw = residual.read(depth, space);
    lower_norm(layer.spec, count, norm, bias, layer.raw, layer.in, read_once, layer.program);
    residual.write(layer);
  };
  if (picks) layer.picked = workspace.take(layer.wanted, layer.spec.dim);  // the head reads it
  const int64_t before = workspace.mark();
  take_lanes(spec, layer);
  const int64_t mark = workspace.mark();
  const Acts space = reads_raw(spec) ? workspace.take(tokens, layer.spec.dim) : layer.in;
  begin_half(tokens, weights.mixer_depth, weights.mixer_norm, weights.mixer_norm_bias, space,
             mixer_reads_once(spec));
  lower_mixer(spec, weights, layer);
  workspace.release(mark);
  if (picks) residual.replace(layer.picked, layer.wanted);
  if (spec.mlp && layer.wanted > 0) {
    begin_half(layer.wanted, weights.mlp_depth, weights.mlp_norm, weights.mlp_norm_bias, layer.in,
               mlp_reads_once(spec));
    if (spec.mlp->kind == Mlp::Kind::ShiftedSquare) {
      lower_shifted_mlp(spec, weights, layer);
    } else {
      lower_mlp(*spec.mlp, weights, layer);
    }
    workspace.release(mark);
  }
  lower_hidden_route(spec, layer);
  workspace.release(before);
}

// Logits of the wanted tokens, and what is drawn from them. is_picked: the residual is theirs only,
// in their order.
void lower_outputs(const ModelSpec& spec, const ModelWeights& weights, const StepArrays& arrays,
                   int32_t outputs, Acts residual, bool is_picked, Workspace& workspace,
                   Program& program) {
  const Acts normed = workspace.take(outputs, spec.dim);
  Acts picked = residual;
  if (!is_picked) {
    picked = normed;
    program.push_back(Gather{.count = outputs,
                             .dim = spec.dim,
                             .index = arrays.output_token,
                             .in = residual,
                             .out = picked});
  }
  const Acts logits = workspace.take(outputs, spec.vocab);
  lower_norm(spec, outputs, weights.norm, weights.norm_bias, picked, normed, true, program);
  program.push_back(Linear{.tokens = outputs,
                           .in = spec.dim,
                           .parts = 1,
                           .part = {weights.head},
                           .x = normed,
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
  const Rows rows{.count = shape.rows, .tokens = tokens, .slot = arrays.slot,
                  .first = arrays.first, .begin = arrays.begin, .written = arrays.written,
                  .singles = shape.singles, .longer = shape.longer};
  Residual residual(spec, tokens, workspace, program);
  const Acts normed = workspace.take(tokens, spec.dim);
  program.push_back(Embed{.tokens = tokens,
                          .ids = arrays.ids,
                          .drawn = arrays.drawn,
                          .read = arrays.read,
                          .table = weights.embedding,
                          .out = residual.current()});
  if (spec.embedding_norm) {
    lower_norm(spec, tokens, weights.embedding_norm, weights.embedding_norm_bias,
               residual.current(), residual.current(), false, program);
  }
  Lanes lanes = make_lanes(spec, tokens, workspace);

  bool picked = false;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    LayerContext layer{.program = program,
                       .workspace = workspace,
                       .rows = rows,
                       .arrays = arrays,
                       .spec = spec,
                       .route = spec.layers[i].route,
                       .route_weights = weights.layers[i].route,
                       .lanes = lanes,
                       .in = normed,
                       .wanted = wanted_tokens(spec, spec.layers[i], shape),
                       .page_tokens = limits.page_tokens};
    if (pool != nullptr) {
      layer.state = pool->layer_state(int32_t(i));
      layer.pending = pool->layer_pending(int32_t(i));
      layer.pages = pool->layer_pages(int32_t(i));
      layer.page_stride = pool->page_floats();
    }
    picked = layer.wanted < tokens;
    lower_layer(spec.layers[i], weights.layers[i], residual, layer);
  }
  if (shape.outputs == 0) return program;
  const Acts last = residual.read(weights.depth, normed);
  lower_outputs(spec, weights, arrays, shape.outputs, last, picked || shape.wants_all(), workspace,
                program);
  return program;
}

}  // namespace weir
