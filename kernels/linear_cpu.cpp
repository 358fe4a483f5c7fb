#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/widen.h"

namespace weir::cpu {
namespace {

// Weights that one claim of a thread covers: enough to stream, and well below the share of one
// thread, so that threads end together even when one of them loses its core for a while.
constexpr int64_t kClaimBytes = 128 * 1024;
constexpr int64_t kClaimsPerThread = 8;
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

}  // namespace

void run(const Linear& op, const Context& context) {
  WEIR_CHECK(op.parts >= 0 && op.parts <= Linear::kParts);
  if (context.plain) return run_plain(op);

  const int64_t rows = total_rows(op), tile = context.simd.dense->linear_rows(op.tokens);
  const int64_t row_bytes = std::max<int64_t>(1, op.in * int64_t(size_of(op.part[0].dtype)));
  const int64_t row_products = std::max<int64_t>(1, int64_t(op.in) * op.tokens);
  int64_t grain = std::min(kClaimBytes / row_bytes,
                           rows / (kClaimsPerThread * context.pool.threads()));
  grain = std::max(grain, (kClaimProducts + row_products - 1) / row_products);
  grain = (grain + tile - 1) / tile * tile;
  context.pool.parallel_for(
      rows,
      [&](int64_t begin, int64_t end) { run_rows(op, *context.simd.dense, begin, end); },
      grain);
}

}  // namespace weir::cpu
