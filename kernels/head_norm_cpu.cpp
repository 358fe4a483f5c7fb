#include <cmath>

#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

void normalise(const HeadNorm& op, const float* weight, const float* bias, float* y) {
  float mean = 0;
  if (op.kind == HeadNorm::Kind::Centred) {
    for (int32_t i = 0; i < op.dim; ++i) mean += y[i];
    mean /= float(op.dim);
  }
  float squares = 0;
  for (int32_t i = 0; i < op.dim; ++i) squares += (y[i] - mean) * (y[i] - mean);
  if (op.kind == HeadNorm::Kind::L2) {
    const float scale = 1 / std::sqrt(squares + op.eps);
    for (int32_t i = 0; i < op.dim; ++i) y[i] *= scale;
    return;
  }
  const float scale = 1 / std::sqrt(squares / float(op.dim) + op.eps);
  for (int32_t i = 0; i < op.dim; ++i) {
    y[i] = (y[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0);
  }
}

void run_group(const HeadNorm& op, int64_t t, int32_t group) {
  const int64_t offset = int64_t(group) * op.dim;
  const float* x = op.in.at(t) + offset;
  float* y = op.out.at(t) + offset;
  const float* gate = op.gate ? op.gate.at(t) + offset : nullptr;
  const auto apply_gate = [&] {
    for (int32_t i = 0; i < op.dim; ++i) y[i] *= float(activate(op.gate_activation, gate[i]));
  };
  for (int32_t i = 0; i < op.dim; ++i) y[i] = float(activate(op.activation, x[i]));
  if (gate && op.gate_first) apply_gate();
  if (op.kind != HeadNorm::Kind::None) {
    const int64_t first = op.weight_per_group ? offset : 0;
    normalise(op, op.weight + first, op.bias ? op.bias + first : nullptr, y);
  }
  if (op.add) {
    for (int32_t i = 0; i < op.dim; ++i) y[i] += op.add.at(t)[offset + i];
  }
  if (gate && !op.gate_first) apply_gate();
}

}  // namespace

void run(const HeadNorm& op, const Context& context) {
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run_group(op, i / op.groups, int32_t(i % op.groups));
  };
  const int64_t items = int64_t(op.tokens) * op.groups;
  context.plain ? work(0, items) : context.pool.parallel_for(items, work, 4);
}

}  // namespace weir::cpu
