#pragma once
#include <cublasLt.h>
#include <cuda_bf16.h>

#include <map>
#include <memory>

#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// Products of a bf16 matrix with float32 vectors by cuBLASLt. The vectors are split into high +
// low bf16 parts, so that a product keeps 16 of their bits, and summed in float32. Which of the
// library's algorithms is fastest is found by trying when a size is first met.
class MatrixProducts {
 public:
  static constexpr size_t kWorkspaceBytes = size_t(32) << 20;

  static std::unique_ptr<MatrixProducts> load();  // null: no library on this machine
  ~MatrixProducts();

  // y = W x, or y += W x; weights is [rows, in].
  void multiply(const void* weights, int rows, int in, const SplitVectors& vectors, int tokens,
                bool accumulate, const Acts& y, Context& context);
  // The same rounded to bf16; y is [tokens, rows], without gaps.
  void multiply_narrow(const void* weights, int rows, int in, const SplitVectors& vectors,
                       int tokens, __nv_bfloat16* y, Context& context);

 private:
  struct Library;
  struct Shape;
  struct Plan;
  MatrixProducts(void* file, std::unique_ptr<Library> library);
  struct Product;
  const Plan& plan(const Shape& shape, const Product& product, Context& context);
  bool supports(const Plan& plan) const;
  void forget_matrix(const Shape& shape, const Product& product, Context& context) const;
  void find_fastest(Plan& plan, const Shape& shape, const Product& product, Context& context);
  void start(const Plan& plan, const Product& product, const void* x, bool accumulate, void* to,
             Context& context) const;

  void* file_ = nullptr;
  std::unique_ptr<Library> library_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t desc_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Shape, Plan> plans_;
  std::map<Shape, cublasLtMatmulAlgo_t> fastest_;  // of about so many tokens
};

}  // namespace weir::cuda
