#include "kernels/delta_chunk_row_start.cuh"

namespace weir::cuda::chunk {

SplitVectors start_channel_rows(const DeltaMix& op, Context& context) {
  return start_rows<true>(op, context);
}

}  // namespace weir::cuda::chunk
