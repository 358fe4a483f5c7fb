#include "kernels/delta_chunk_kernel.cuh"

namespace weir::cuda::chunk {

Starts channel_starts(int key_dim) {
  return key_dim == 128 ? starts<128, true>() : starts<64, true>();
}

}  // namespace weir::cuda::chunk
