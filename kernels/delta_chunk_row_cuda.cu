#include "kernels/delta_chunk_row_start.cuh"

namespace weir::cuda::chunk {

SplitVectors start_rows(const DeltaMix& op, Context& context) {
  const bool channel = op.decay == Decay::PerChannel || op.erase.data != nullptr;
  return channel ? start_channel_rows(op, context) : start_rows<false>(op, context);
}

}  // namespace weir::cuda::chunk
