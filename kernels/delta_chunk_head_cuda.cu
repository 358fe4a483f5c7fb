#include "kernels/delta_chunk_kernel.cuh"

namespace weir::cuda::chunk {

void start_head_64(const DeltaMix& op, Context& context, int slice) {
  start<64, false>(op, context, slice);
}
void start_head_128(const DeltaMix& op, Context& context, int slice) {
  start<128, false>(op, context, slice);
}

}  // namespace weir::cuda::chunk
