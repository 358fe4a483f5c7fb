#include <algorithm>

#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

float apply(const Elementwise& op, int64_t t, int32_t i) {
  const float x = op.x.at(t)[i];
  switch (op.function) {
    case Elementwise::Function::Activate: return float(activate(op.activation, x));
    case Elementwise::Function::LogDecay:
      return std::max(float(log_sigmoid(x)) / op.divisor, op.floor);
    case Elementwise::Function::BoundedLogDecay:
      return float(
          log_add_exp(std::log(double(op.a[i])), std::log1p(-double(op.a[i])) + log_sigmoid(x)));
    case Elementwise::Function::OneMinusExp: return -std::expm1(x);
    case Elementwise::Function::SoftplusStep:
      return std::clamp(float(softplus(x + op.a[i])), op.floor, op.ceiling);
    case Elementwise::Function::SigmoidDecay: return op.floor * float(sigmoid(x));
    case Elementwise::Function::SoftplusDecay: return float(log_decay(x + op.b[i], op.a[i], 0));
    case Elementwise::Function::Scale: return x * op.a[i];
    case Elementwise::Function::AddScaled: return x + op.a[i] * op.y.at(t)[i];
    case Elementwise::Function::Multiply: return x * op.y.at(t)[i];
    case Elementwise::Function::ScaleTowards: return x * (1 + (op.y.at(t)[i] - 1) * op.a[i]);
    case Elementwise::Function::Blend: return x + (op.y.at(t)[i] - x) * op.z.at(t)[i];
  }
  return x;
}

// The functions that are an activation, vectorised; false for others.
bool activate_token(const Elementwise& op, const MixerSimd& simd, int64_t t) {
  const bool decay = op.function == Elementwise::Function::SigmoidDecay;
  if (op.function != Elementwise::Function::Activate && !decay) return false;
  float* const out = op.out.at(t);
  if (op.x.at(t) != out) std::copy_n(op.x.at(t), op.dim, out);
  simd.activate(decay ? Activation::Sigmoid : op.activation, out, op.dim);
  if (decay) simd.scale(out, op.floor, op.dim);
  return true;
}

}  // namespace

void run(const Elementwise& op, const Context& context) {
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (!context.plain && activate_token(op, *context.simd.mixers, t)) continue;
      for (int32_t i = 0; i < op.dim; ++i) op.out.at(t)[i] = apply(op, t, i);
    }
  };
  context.plain ? work(0, op.tokens) : context.pool.parallel_for(op.tokens, work, 1);
}

}  // namespace weir::cpu
