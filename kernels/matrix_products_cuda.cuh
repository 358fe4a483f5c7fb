#pragma once
#include <cublasLt.h>

#include <map>
#include <memory>

#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// Products of a bf16 matrix with float32 vectors by cuBLASLt. The vectors are split into high +
// low bf16 parts, so that a product keeps 16 of their bits, and summed in float32.
class MatrixProducts {
 public:
  static constexpr size_t kWorkspaceBytes = size_t(32) << 20;

  static std::unique_ptr<MatrixProducts> load();  // null: no library on this machine
  ~MatrixProducts();

  // y = W x, or y += W x, of the vectors that split() has just split; weights is [rows, in].
  void multiply(const void* weights, int rows, int in, int tokens, bool accumulate, const Acts& y,
                Context& context);

 private:
  struct Library;
  struct Shape;
  struct Plan;
  MatrixProducts(void* file, std::unique_ptr<Library> library);
  const Plan& plan(const Shape& shape);

  void* file_ = nullptr;
  std::unique_ptr<Library> library_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t desc_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Shape, Plan> plans_;
};

}  // namespace weir::cuda
