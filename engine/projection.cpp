#include "engine/projection.h"

#include <algorithm>

namespace weir {

Projection::Part Projection::add(const Matrix& matrix, const float* bias) {
  if (matrix.rows == 0) return {};
  const Part part{rows_};
  rows_ += matrix.rows;
  matrices_.push_back(matrix);
  biases_.push_back(bias);
  return part;
}

Acts Projection::lower(LayerContext& layer, Acts x) const {
  const int32_t tokens = layer.rows.tokens;
  const Acts y = layer.workspace.take(tokens, rows_);
  int64_t row = 0;
  for (size_t begin = 0; begin < matrices_.size(); begin += Linear::kParts) {
    const size_t end = std::min(matrices_.size(), begin + Linear::kParts);
    Linear op{.tokens = tokens, .in = in_, .parts = int32_t(end - begin), .x = x, .y = y.from(row)};
    for (size_t i = begin; i < end; ++i) {
      op.part[i - begin] = matrices_[i];
      op.bias[i - begin] = biases_[i];
      row += matrices_[i].rows;
    }
    layer.program.push_back(op);
  }
  return y;
}

Acts lower_linear(LayerContext& layer, const Matrix& matrix, const float* bias, Acts x) {
  const Acts y = layer.workspace.take(layer.rows.tokens, matrix.rows);
  layer.program.push_back(Linear{.tokens = layer.rows.tokens,
                                 .in = matrix.cols,
                                 .parts = 1,
                                 .part = {matrix},
                                 .bias = {bias},
                                 .x = x,
                                 .y = y});
  return y;
}

void lower_residual(LayerContext& layer, const Matrix& matrix, Acts x, const float* bias) {
  if (layer.wanted == 0) return;
  if (layer.wanted < layer.rows.tokens) {
    const auto pick = [&](int32_t dim, Acts from, Acts to) {
      layer.program.push_back(Gather{.count = layer.wanted,
                                     .dim = dim,
                                     .index = layer.arrays.output_token,
                                     .in = from,
                                     .out = to});
      return to;
    };
    layer.residual = pick(layer.spec.dim, layer.residual, layer.picked);
    x = pick(matrix.cols, x, layer.workspace.take(layer.wanted, matrix.cols));
  }
  layer.program.push_back(Linear{.tokens = layer.wanted,
                                 .in = matrix.cols,
                                 .parts = 1,
                                 .part = {matrix},
                                 .bias = {bias},
                                 .accumulate = !layer.replaces,
                                 .x = x,
                                 .y = layer.residual});
}

Acts lower_conv(LayerContext& layer, const Convolution& conv, Activation activation, Acts x,
                SlotState& history) {
  const Acts out = layer.workspace.take(layer.rows.tokens, conv.channels);
  layer.program.push_back(Conv1d{.rows = layer.rows,
                                    .channels = conv.channels,
                                    .width = conv.width,
                                    .taps = conv.taps,
                                    .bias = conv.bias,
                                    .activation = activation,
                                    .in = x,
                                    .out = out,
                                    .history = history});
  history = history.from(int64_t(conv.channels) * (conv.width - 1));
  return out;
}

Acts lower_conv_or_activation(LayerContext& layer, const Convolution& conv, int32_t channels,
                              Acts x, SlotState& history) {
  if (conv.channels > 0) return lower_conv(layer, conv, Activation::Silu, x, history);
  lower_activation(layer, Activation::Silu, channels, x);
  return x;
}

void lower_activation(LayerContext& layer, Activation activation, int32_t dim, Acts x) {
  if (activation == Activation::None) return;
  lower_elementwise(layer, {.activation = activation}, dim, x);
}

const float* bind_gated_norm(const std::string& prefix, int32_t size, WeightReader& reader) {
  const std::string fused = prefix + "g_norm_swish_gate.weight";
  return reader.vector(reader.has(fused) ? fused : prefix + "g_norm.weight", size);
}

void lower_elementwise(LayerContext& layer, Elementwise op, int32_t dim, Acts x) {
  op.tokens = layer.rows.tokens;
  op.dim = dim;
  op.x = op.out = x;
  layer.program.push_back(op);
}

}  // namespace weir
