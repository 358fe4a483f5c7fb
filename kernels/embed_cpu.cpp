#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/widen.h"

namespace weir::cpu {
namespace {

constexpr int64_t kClaimValues = 32 * 1024;

const char* row_of(const Embed& op, int64_t token) {
  const Token given = op.ids[token];
  const Token id = given >= 0 ? given : std::max(op.drawn[~given], 0);
  WEIR_CHECK(id >= 0 && id < op.table.rows);
  if (op.read != nullptr) op.read[token] = id;
  return static_cast<const char*>(op.table.data) +
         int64_t(id) * op.table.cols * int64_t(size_of(op.table.dtype));
}

}  // namespace

void run(const Embed& op, const Context& context) {
  if (context.plain) {
    for (int64_t t = 0; t < op.tokens; ++t) {
      const char* const row = row_of(op, t);
      for (int64_t i = 0; i < op.table.cols; ++i) {
        op.out.at(t)[i] = widen_at(row, op.table.dtype, i);
      }
    }
    return;
  }
  context.pool.parallel_for(
      op.tokens,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          context.simd.dense->widen(row_of(op, t), op.table.dtype, op.out.at(t), op.table.cols);
        }
      },
      kClaimValues / (op.table.cols + 1) + 1);
}

}  // namespace weir::cpu
