#pragma once
#include <algorithm>

#include "kernels/op.h"

// Where the rows of more tokens than `steps_most` are. Most of a step's rows may be of sequences
// that decode, and a block that finds nothing to do still costs a microsecond, so chunk kernels
// start blocks for the long rows alone. The host, which knows how many rows and tokens there are
// but not how long each row is, starts as many as there may be.
namespace weir::cuda {

// How many there are, at most.
inline int most_long_rows(const Rows& rows, int steps_most) {
  const int most = std::clamp(rows.tokens / (steps_most + 1), 1, rows.count);
  return rows.longer < 0 ? most : std::clamp(rows.longer, 1, most);
}

// How many there are as a rule, where nothing is known: all, or, if rows have fewer than `mean`
// tokens in the mean, few prompts among rows that decode.
inline int likely_long_rows(const Rows& rows, int steps_most, int mean) {
  if (rows.longer >= 0) return most_long_rows(rows, steps_most);
  const bool mixed = rows.tokens / rows.count < mean;
  return mixed ? std::clamp(rows.tokens / 1024, 1, rows.count) : most_long_rows(rows, steps_most);
}

// Among how many first rows all those of one token are.
inline int single_rows(const Rows& rows) {
  return rows.singles < 0 ? rows.count : std::min(rows.singles, rows.count);
}

// By each warp for itself: the k-th row of `least` to `most` tokens; -1: there are fewer.
__device__ inline int row_among(const Rows& rows, int k, int least, int most) {
  constexpr int kRuns = 4;  // of 32 rows, asked for together
#pragma unroll 1
  for (int base = 0; base < rows.count; base += 32 * kRuns) {
    int tokens[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int row = base + 32 * i + int(threadIdx.x) % 32, there = min(row, rows.count - 1);
      const int count = rows.begin[there + 1] - rows.begin[there];
      tokens[i] = row == there ? count : 0;
    }
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      uint32_t found = __ballot_sync(0xffffffffu, least <= tokens[i] && tokens[i] <= most);
      const int count = __popc(found);
      if (k < count) {
        for (; k > 0; --k) found &= found - 1;
        return base + 32 * i + __ffs(found) - 1;
      }
      k -= count;
    }
  }
  return -1;
}

// The k-th long row. With a block for each row along y, k itself, which may be short.
__device__ inline int long_row(const Rows& rows, int k, int steps_most) {
  if (int(gridDim.y) == rows.count) return k < rows.count ? k : -1;
  return row_among(rows, k, steps_most + 1, rows.tokens);
}

}  // namespace weir::cuda
