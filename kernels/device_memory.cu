#include "kernels/device_memory.h"

#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

std::string mib(size_t bytes) {
  constexpr size_t kMib = 1 << 20;
  return std::to_string(bytes / kMib) + "." + std::to_string(bytes % kMib * 10 / kMib) + " MiB";
}

}  // namespace

void no_room(const std::string& what) {
  size_t free = 0, all = 0;
  WEIR_CUDA_CHECK(cudaMemGetInfo(&free, &all));
  give_up(("CUDA: no room for " + what + ", " + mib(free) + " of " + mib(all) +
           " are free: " + cudaGetErrorString(cudaErrorMemoryAllocation))
              .c_str());
}

void* device_memory(size_t bytes) {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    no_room(mib(bytes) + " (" + std::to_string(bytes) + " bytes)");
  }
  WEIR_CUDA_CHECK(error);
  return data;
}

}  // namespace weir::cuda
