#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/widen.h"

namespace weir::cpu {
namespace {

// Claims of a thread halve from one to the next: the first are long enough to stream memory, the
// last short enough for all threads to end together, even when one lost its core for a while.
constexpr int64_t kHalvings = 4;
// Below this a claim takes less time than handing it out.
constexpr int64_t kClaimProducts = 32 * 1024;

int64_t total_rows(const Linear& op) {
  int64_t rows = 0;
  for (int32_t i = 0; i < op.parts; ++i) rows += op.part[size_t(i)].rows;
  return rows;
}

const char* row_at(const Matrix& matrix, int64_t row) {
  return static_cast<const char*>(matrix.data) +
         row * matrix.cols * int64_t(size_of(matrix.dtype));
}

void run_plain(const Linear& op) {
  for (int64_t t = 0; t < op.tokens; ++t) {
    const float* const x = op.x.at(t);
    float* y = op.y.at(t);
    for (int32_t i = 0; i < op.parts; ++i) {
      const Matrix& part = op.part[size_t(i)];
      const float* const bias = op.bias[size_t(i)];
      for (int64_t r = 0; r < part.rows; ++r) {
        double sum = bias != nullptr ? double(bias[r]) : 0.0;
        for (int64_t k = 0; k < op.in; ++k) {
          sum += double(widen_at(row_at(part, r), part.dtype, k)) * double(x[k]);
        }
        *y = float(op.accumulate ? double(*y) + sum : sum);
        ++y;
      }
    }
  }
}

// Rows begin .. end - 1 of the stacked matrix.
void run_rows(const Linear& op, const DenseSimd& simd, int64_t begin, int64_t end) {
  int64_t part_begin = 0;
  for (int32_t i = 0; i < op.parts; ++i) {
    const Matrix& part = op.part[size_t(i)];
    const float* const bias = op.bias[size_t(i)];
    const int64_t first = std::max(begin, part_begin);
    const int64_t last = std::min(end, part_begin + part.rows);
    const int64_t row = first - part_begin;
    if (first < last) {
      simd.linear({.weights = row_at(part, row),
                   .dtype = part.dtype,
                   .rows = int32_t(last - first),
                   .in = op.in,
                   .tokens = op.tokens,
                   .bias = bias != nullptr ? bias + row : nullptr,
                   .accumulate = op.accumulate,
                   .x = op.x,
                   .y = op.y.from(first)});
    }
    part_begin += part.rows;
  }
}

// Where claim number `claim` begins, as a share of all rows: `threads` claims cover the first half,
// as many the next quarter, and so on; as many as the last ones cover what is left.
double share_before(int64_t claim, int64_t threads, int64_t halvings) {
  const int64_t round = std::min(claim / threads, halvings);
  const double left = 1.0 / double(int64_t{1} << round);
  const double next = round == halvings ? left : left / 2;
  return 1.0 - left + next * double(claim - round * threads) / double(threads);
}

void run_range(const Linear& op, const Context& context) {
  WEIR_CHECK(op.range[0] >= 0 && op.range[0] <= op.range[1] && op.range[1] <= op.tokens);
  Linear part = op;
  part.range = nullptr;
  part.tokens = op.range[1] - op.range[0];
  part.x.data = op.x.at(op.range[0]);
  part.y.data = op.y.at(op.range[0]);
  if (part.tokens > 0) run(part, context);
}

}  // namespace

void run(const Linear& op, const Context& context) {
  WEIR_CHECK(op.in > 0 && op.parts >= 0 && op.parts <= Linear::kParts);
  if (op.range != nullptr) return run_range(op, context);
  if (context.plain) return run_plain(op);

  const DenseSimd& simd = *context.simd.dense;
  const int64_t rows = total_rows(op), tile = simd.linear_rows(op.tokens);
  const int64_t threads = context.pool.threads();
  const auto least = std::max(1.0, double(kClaimProducts) / (double(op.in) * op.tokens + 1));
  int64_t halvings = kHalvings;
  while (halvings >= 0 && double(rows) < least * double(threads << halvings)) --halvings;
  if (halvings < 0 || threads == 1) return run_rows(op, simd, 0, rows);

  const int64_t claims = (halvings + 1) * threads;
  const auto begin_of = [&](int64_t claim) {
    if (claim == claims) return rows;
    return int64_t(double(rows) * share_before(claim, threads, halvings)) / tile * tile;
  };
  context.pool.parallel_for(
      claims,
      [&](int64_t begin, int64_t end) { run_rows(op, simd, begin_of(begin), begin_of(end)); }, 1);
}

}  // namespace weir::cpu
