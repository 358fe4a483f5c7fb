#include "kernels/outer_chunk_kernel.cuh"

namespace weir::cuda::adding {

void start_key(const OuterStep& op, Context& context, int slice, const Segments& segments) {
  start<By::Key>(op, context, slice, segments);
}

}  // namespace weir::cuda::adding
