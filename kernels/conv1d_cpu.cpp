#include <algorithm>

#include "kernels/cpu.h"
#include "kernels/mixer_math.h"
#include "kernels/ring.h"

namespace weir::cpu {
namespace {

// Channels first .. last - 1 of one row.
void convolve(const Conv1d& op, int32_t row, int32_t first, int32_t last) {
  const int32_t begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  const int32_t kept = op.width - 1, position = op.rows.first[row];
  float* const history = op.history.at(op.rows.slot[row]);
  const auto kept_at = [&](int32_t t) {
    return history + int64_t(ring_row(position + t, kept)) * op.channels;
  };
  const auto input = [&](int32_t t, int32_t c) {
    if (t >= 0) return op.in.at(begin + t)[c];
    return position == 0 ? 0.0f : kept_at(t)[c];
  };
  for (int32_t t = 0; t < count; ++t) {
    float* out = op.out.at(begin + t);
    for (int32_t c = first; c < last; ++c) {
      float sum = op.bias ? op.bias[c] : 0;
      for (int32_t i = 0; i < op.width; ++i) {
        sum += op.taps[int64_t(c) * op.width + i] * input(t - kept + i, c);
      }
      out[c] = float(activate(op.activation, sum));
    }
  }
  for (int32_t t = count - kept; t < count; ++t) {
    if (t < 0 && position > 0) continue;  // the row has it already
    float* const to = kept_at(t);
    for (int32_t c = first; c < last; ++c) to[c] = input(t, c);
  }
}

}  // namespace

void run(const Conv1d& op, const Context& context) {
  constexpr int32_t kBlock = 256;  // channels a thread takes
  const int32_t blocks = (op.channels + kBlock - 1) / kBlock;
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = int32_t(i / blocks), first = int32_t(i % blocks) * kBlock;
      const bool empty = op.rows.begin[row] == op.rows.begin[row + 1];
      if (op.rows.slot[row] == kPadding || empty) continue;
      convolve(op, row, first, std::min(op.channels, first + kBlock));
    }
  };
  const int64_t items = int64_t(op.rows.count) * blocks;
  context.plain ? work(0, items) : context.pool.parallel_for(items, work, 1);
}

}  // namespace weir::cpu
