#include <vector>

#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

// In double precision and in one order.
void route_head(const ValueRoute& op, int64_t token, int64_t head) {
  const int64_t at = head * op.dim;
  std::vector<double> r(size_t(op.dim), 0.0);
  double squares = 0;
  for (int32_t j = 0; j < op.dim; ++j) {
    double& one = r[size_t(j)];
    for (int32_t i = 0; i < op.count; ++i) {
      one += double(op.sources.at(token)[i * op.source_stride + at + j]);
    }
    one /= op.count;
    squares += one * one;
  }
  const double scale = op.normalize ? rms_scale(squares, op.dim, double(op.eps)) : 1.0;
  for (int32_t j = 0; j < op.dim; ++j) {
    const float gamma = op.gamma != nullptr ? op.gamma[at + j] : op.gate.at(token)[head];
    const double add = double(gamma) * scale * r[size_t(j)];
    if (op.answer) op.answer.at(token)[at + j] = float(add);
    if (op.value) op.value.at(token)[at + j] = float(double(op.v.at(token)[at + j]) + add);
  }
}

}  // namespace

void run(const ValueRoute& op, const Context& context) {
  WEIR_CHECK(op.count > 0);
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) route_head(op, i / op.heads, i % op.heads);
  };
  const int64_t items = int64_t(op.tokens) * op.heads;
  context.plain ? work(0, items) : context.pool.parallel_for(items, work, 4);
}

}  // namespace weir::cpu
