#include "kernels/outer_chunk_kernel.cuh"

namespace weir::cuda::adding {

void start_sum(const OuterStep& op, Context& context, int slice, const Segments& segments) {
  start<By::Sum>(op, context, slice, segments);
}

}  // namespace weir::cuda::adding
