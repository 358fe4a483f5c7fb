#include "kernels/swila_chunk_kernel.cuh"

namespace weir::cuda::swila_chunk {

void start_gated(const SwilaMix& op, const Maps& maps, Context& context, int slice) {
  op.key_mix.data != nullptr ? start_slice<true, true>(op, maps, context, slice)
                             : start_slice<true, false>(op, maps, context, slice);
}

}  // namespace weir::cuda::swila_chunk
