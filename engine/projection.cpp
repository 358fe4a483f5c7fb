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

void lower_residual(LayerContext& layer, const Matrix& matrix, Acts x) {
  layer.program.push_back(Linear{.tokens = layer.rows.tokens,
                                 .in = matrix.cols,
                                 .parts = 1,
                                 .part = {matrix},
                                 .accumulate = true,
                                 .x = x,
                                 .y = layer.residual});
}

}  // namespace weir
