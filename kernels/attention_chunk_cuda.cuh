#pragma once
#include "kernels/attention_cuda.cuh"

// Attention for all tokens of a row at once: what its kernels are told.
namespace weir::cuda::attention {

struct ChunkJob {
  Attention op;
  double log_theta = 0;            // to base 2
  float* angles = nullptr;         // [tokens, head_dim]: cosines, sines; null: no positions
  float* new_keys = nullptr;       // with a window: the step's keys, [tokens, kv_count, head_dim]
  int kv_first = 0, kv_count = 0;  // the kv heads of this launch
  int together = 1;                // positions from a multiple of kUnitKeys on that lie end to end
};

constexpr int kUnitKeys = 64;

// Rows of one token take the steps.
__device__ inline bool chunked(const Rows& rows, int row) {
  return rows.slot[row] != kPadding && rows.begin[row + 1] - rows.begin[row] > 1;
}

// Keys and values into the row's memory (with a window: keys into new_keys alone), angles for the
// queries, sums of log forget gates.
void prepare(const ChunkJob& job, Context& context);
// With a window, when all have attended: the last keys and values into the row's ring.
void keep_window(const ChunkJob& job, Context& context);

}  // namespace weir::cuda::attention
