// What a build without the CUDA toolkit answers.
#include "kernels/backend.h"

#if !defined(WEIR_HAVE_CUDA)

namespace weir {

int cuda_device_count() { return 0; }

std::unique_ptr<Backend> make_cuda_backend(int, std::string* error, const CudaOptions&) {
  *error = "this program was built without CUDA";
  return nullptr;
}

}  // namespace weir

#endif
