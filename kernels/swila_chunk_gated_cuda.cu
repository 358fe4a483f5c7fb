#include "kernels/swila_chunk_kernel.cuh"

namespace weir::cuda::swila_chunk {

void start_gated(const SwilaMix& op, Context& context, int slice) {
  op.key_mix.data != nullptr ? start_slice<true, true>(op, context, slice)
                             : start_slice<true, false>(op, context, slice);
}

}  // namespace weir::cuda::swila_chunk
