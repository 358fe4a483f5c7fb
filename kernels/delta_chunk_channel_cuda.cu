#include "kernels/delta_chunk_kernel.cuh"

namespace weir::cuda::chunk {

void start_channel_64(const DeltaMix& op, Context& context, int slice) {
  start<64, true>(op, context, slice);
}
void start_channel_128(const DeltaMix& op, Context& context, int slice) {
  start<128, true>(op, context, slice);
}

}  // namespace weir::cuda::chunk
