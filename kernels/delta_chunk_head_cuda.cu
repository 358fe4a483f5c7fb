#include "kernels/delta_chunk_kernel.cuh"

namespace weir::cuda::chunk {

Starts head_starts(int key_dim) {
  return key_dim == 128 ? starts<128, false>() : starts<64, false>();
}

}  // namespace weir::cuda::chunk
