#include <algorithm>

#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

// Channels first .. last - 1 of one row.
void shift(const TokenShift& op, const RowRun& row, int32_t first, int32_t last) {
  float* const history = op.history.at(row.slot);
  if (row.fresh()) std::fill(history + first, history + last, 0.0f);
  for (int64_t t = row.begin; t < row.begin + row.count; ++t) {
    const float* const in = op.in.at(t);
    const float* const before = t == row.begin ? history : op.in.at(t - 1);
    for (int32_t m = 0; m < op.mixes; ++m) {
      const float* const mix = op.mix + int64_t(m) * op.dim;
      float* const out = op.out.at(t) + int64_t(m) * op.dim;
      for (int32_t c = first; c < last; ++c) out[c] = in[c] + (before[c] - in[c]) * mix[c];
    }
  }
  const float* const newest = op.in.at(row.begin + row.count - 1);
  std::copy(newest + first, newest + last, history + first);
}

}  // namespace

void run(const TokenShift& op, const Context& context) {
  constexpr int32_t kBlock = 256;  // channels a thread takes
  const int32_t blocks = (op.dim + kBlock - 1) / kBlock;
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowRun row(op.rows, int32_t(i / blocks));
      const int32_t first = int32_t(i % blocks) * kBlock;
      if (!row.empty()) shift(op, row, first, std::min(op.dim, first + kBlock));
    }
  };
  const int64_t items = int64_t(op.rows.count) * blocks;
  context.plain ? work(0, items) : context.pool.parallel_for(items, work, 1);
}

}  // namespace weir::cpu
