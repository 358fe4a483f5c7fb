#include "kernels/outer_chunk_kernel.cuh"

namespace weir::cuda::adding {

void start_head(const OuterStep& op, Context& context, int slice) {
  start<By::Head>(op, context, slice);
}

}  // namespace weir::cuda::adding
