#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {

void run(const HeadDot& op, const Context& context) {
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = i / op.heads, head = i % op.heads;
      const float* const x = op.x.at(token) + head * op.dim;
      double sum = double(op.bias[0]);
      for (int32_t j = 0; j < op.dim; ++j) sum += double(op.weight[j]) * double(x[j]);
      op.out.at(token)[head] = float(activate(op.activation, sum));
    }
  };
  const int64_t items = int64_t(op.tokens) * op.heads;
  context.plain ? work(0, items) : context.pool.parallel_for(items, work, 16);
}

}  // namespace weir::cpu
