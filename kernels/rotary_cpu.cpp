#include <cmath>

#include "kernels/cpu.h"

namespace weir::cpu {

void run(const Rotary& op, const Context& context) {
  const int32_t half = op.dim / 2;
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (op.rows.slot[row] == kPadding) continue;
      for (int32_t t = op.rows.begin[row]; t < op.rows.begin[row + 1]; ++t) {
        const double position = double(op.rows.first[row]) + (t - op.rows.begin[row]);
        for (int32_t i = 0; i < half; ++i) {
          const double angle = position * std::pow(double(op.theta), -2.0 * i / op.dim);
          const auto cosine = float(std::cos(angle)), sine = float(std::sin(angle));
          for (int32_t head = 0; head < op.heads; ++head) {
            float* x = op.x.at(t) + int64_t(head) * op.dim + i;
            const float a = x[0], b = x[half];
            x[0] = a * cosine - b * sine;
            x[half] = b * cosine + a * sine;
          }
        }
      }
    }
  };
  context.plain ? work(0, op.rows.count) : context.pool.parallel_for(op.rows.count, work, 1);
}

}  // namespace weir::cpu
