#pragma once
#include <cmath>

#include "kernels/types.h"

namespace weir {

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
inline float log_sigmoid(float x) {
  return std::fmin(x, 0.0f) - std::log1p(std::exp(-std::fabs(x)));
}
// log(exp(a) + exp(b)).
inline float log_add_exp(float a, float b) {
  const float larger = std::fmax(a, b);
  return std::isinf(larger) ? larger : larger + std::log1p(std::exp(-std::fabs(a - b)));
}

inline float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::None: return x;
    case Activation::Silu: return x * sigmoid(x);
    case Activation::Sigmoid: return sigmoid(x);
    case Activation::Relu: return x > 0 ? x : 0;
    case Activation::EluPlusOne: return x > 0 ? x + 1 : std::exp(x);
    case Activation::LogSigmoid: return log_sigmoid(x);
    case Activation::ReluSquared: return x > 0 ? x * x : 0;
    case Activation::GeluTanh:
      return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::Tanh: return std::tanh(x);
  }
  return x;
}

}  // namespace weir
