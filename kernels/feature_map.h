#pragma once
#include "kernels/types.h"

namespace weir {

// A map of each head's vector, for linear attention.
struct FeatureMap {
  enum class Kind : uint8_t {
    Copy,          // x
    Softmax,       // softmax over the head's numbers
    RowLinear,     // W x + b, the same map for every head; with Relu: T2R (arXiv 2103.13076)
    RowProduct,    // (W x + b) * (W2 x + b2)
    SoftmaxPair,   // softmax of [2y, -2y], y = W x + b: 2 dim numbers (Hedgehog, arXiv 2402.04347)
    // y * roll(y, j), j = 1 .. 4, y = [relu x, -relu x]: 8 dim (arXiv 2102.11174, where the second
    // half is relu -x; checkpoints are trained with fla's)
    Dpfp,
  };
  static constexpr int32_t expansion(Kind kind) {
    return kind == Kind::SoftmaxPair ? 2 : kind == Kind::Dpfp ? 8 : 1;
  }

  int32_t tokens = 0, heads = 0, dim = 0;
  Kind kind = Kind::Copy;
  Activation activation = Activation::None;  // of the result
  bool normalise = false;                    // divide by (sum + 1e-4)
  const float *weight = nullptr, *bias = nullptr;    // [dim, dim], [dim] or null
  const float *weight2 = nullptr, *bias2 = nullptr;  // RowProduct's second map
  Acts in;   // [tokens, heads * dim]
  Acts out;  // [tokens, heads * dim * expansion(kind)]; not in
};

}  // namespace weir
