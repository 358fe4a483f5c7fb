#include <algorithm>
#include <cmath>

#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

double length(const float* x, int32_t dim) {
  double squares = 0;
  for (int32_t i = 0; i < dim; ++i) squares += double(x[i]) * double(x[i]);
  return std::sqrt(squares);
}

void run_head(const RouteSignal& op, int64_t token, int64_t head) {
  const float* const v = op.v.at(token) + head * op.dim;
  const float* const u = op.u.at(token) + head * op.dim;
  if (op.kind == RouteSignal::Kind::Both) {
    float* const out = op.out.at(token) + head * 2 * op.dim;
    std::copy_n(u, op.dim, out);
    std::copy_n(v, op.dim, out + op.dim);
    return;
  }
  float* const out = op.out.at(token) + head * op.dim;
  const double surprise = length(u, op.dim) / (length(v, op.dim) + 1e-6);
  const double gate = sigmoid(double(op.gate[0]) * surprise + double(op.gate[1]));
  for (int32_t i = 0; i < op.dim; ++i) out[i] = float(double(v[i]) * gate);
}

}  // namespace

void run(const RouteSignal& op, const Context& context) {
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run_head(op, i / op.heads, i % op.heads);
  };
  const int64_t items = int64_t(op.tokens) * op.heads;
  context.plain ? work(0, items) : context.pool.parallel_for(items, work, 4);
}

}  // namespace weir::cpu
