#pragma once
#include <cstdint>
#include <vector>

#include "engine/lower.h"

namespace weir {

// The concatenated in-projection of a layer: several matrices that read the same vectors, and
// where in the result each one's output lies. An absent matrix may be added; its part is null.
class Projection {
 public:
  explicit Projection(int32_t in) : in_(in) {}

  struct Part {
    int64_t offset = -1;
    Acts of(Acts projected) const { return offset < 0 ? Acts{} : projected.from(offset); }
  };
  Part add(const Matrix& matrix, const float* bias = nullptr);
  // Adds the ops; the result is [tokens, sum of rows], from the layer's workspace.
  Acts lower(LayerContext& layer, Acts x) const;

 private:
  int32_t in_ = 0;
  int64_t rows_ = 0;
  std::vector<Matrix> matrices_;
  std::vector<const float*> biases_;
};

// y = W x + bias, in new workspace.
Acts lower_linear(LayerContext& layer, const Matrix& matrix, const float* bias, Acts x);
// residual += W x [+ bias], or = where the layer replaces it: a layer's out-projection. Of fewer
// wanted tokens than there are: those alone, and the residual is what has been picked.
void lower_residual(LayerContext& layer, const Matrix& matrix, Acts x, const float* bias = nullptr);
// A short convolution into new workspace, with its history at the front of `history`, which moves
// on.
Acts lower_conv(LayerContext& layer, const Convolution& conv, Activation activation, Acts x,
                SlotState& history);
// silu of a short convolution in new workspace, or in place where there is none.
Acts lower_conv_or_activation(LayerContext& layer, const Convolution& conv, int32_t channels,
                              Acts x, SlotState& history);
// An activation in place; None adds no op.
void lower_activation(LayerContext& layer, Activation activation, int32_t dim, Acts x);
// The weight of a gated per-head norm: fla names it after whether the norm and gate were fused.
const float* bind_gated_norm(const std::string& prefix, int32_t size, WeightReader& reader);
// An elementwise function in place.
void lower_elementwise(LayerContext& layer, Elementwise op, int32_t dim, Acts x);

}  // namespace weir
