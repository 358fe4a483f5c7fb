#include <cmath>

#include "kernels/cpu.h"

namespace weir::cpu {
namespace {

constexpr int64_t kClaimValues = 8 * 1024;

void run_plain(const Swiglu& op) {
  for (int64_t t = 0; t < op.tokens; ++t) {
    for (int64_t i = 0; i < op.dim; ++i) {
      const float gate = op.gate.at(t)[i];
      op.out.at(t)[i] = gate / (1 + std::exp(-gate)) * op.up.at(t)[i];
    }
  }
}

}  // namespace

void run(const Swiglu& op, const Context& context) {
  if (context.plain) return run_plain(op);
  context.pool.parallel_for(
      op.tokens,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          context.simd.dense->swiglu(op.gate.at(t), op.up.at(t), op.out.at(t), op.dim);
        }
      },
      kClaimValues / (op.dim + 1) + 1);
}

}  // namespace weir::cpu
