#include <cmath>

#include "kernels/cpu.h"

namespace weir::cpu {
namespace {

constexpr int64_t kClaimValues = 16 * 1024;

void run_plain(const RmsNorm& op) {
  for (int64_t t = 0; t < op.tokens; ++t) {
    const float* const in = op.in.at(t);
    double squares = 0;
    for (int64_t i = 0; i < op.dim; ++i) squares += double(in[i]) * double(in[i]);
    const double scale = 1 / std::sqrt(squares / op.dim + double(op.eps));
    for (int64_t i = 0; i < op.dim; ++i) {
      op.out.at(t)[i] = float(double(in[i]) * scale * double(op.weight[i]));
    }
  }
}

}  // namespace

void run(const RmsNorm& op, const Context& context) {
  if (context.plain) return run_plain(op);
  context.pool.parallel_for(
      op.tokens,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          context.simd.dense->rms_norm(op.in.at(t), op.weight, op.eps, op.out.at(t), op.dim);
        }
      },
      kClaimValues / (op.dim + 1) + 1);
}

}  // namespace weir::cpu
