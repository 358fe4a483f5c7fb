// Linear for many tokens: cuBLASLt, loaded when the program starts and never linked, so that a
// machine without it still runs (on the kernels of linear_cuda.cu). What suits the kernel for
// prompts on Hopper goes there (linear_prompt_cuda.cu).
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <map>
#include <tuple>
#include <utility>

#include "kernels/device_memory.h"
#include "kernels/linear_cuda.cuh"
#include "kernels/matrix_products_cuda.cuh"

namespace weir::cuda {
namespace {

#define WEIR_BLAS_CHECK(call) WEIR_CHECK((call) == CUBLAS_STATUS_SUCCESS)

constexpr int kThreads = 256;
constexpr int kSmallRows = 256;  // a group of parts below this many rows is left to run_small()

__global__ __launch_bounds__(kThreads) void bias_kernel(Acts y, const float* bias, int rows,
                                                        int tokens) {
  let_successor_start();
  wait_for_predecessor();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= rows) return;
  for (int token = blockIdx.y; token < tokens; token += gridDim.y) at(y, token)[i] += bias[i];
}

// Reads what will not be needed, so that the cache forgets the rest.
__global__ __launch_bounds__(kThreads) void read_kernel(const uint4* data, int64_t count,
                                                        uint32_t* never) {
  uint32_t all = 0;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    all |= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  }
  if (all == 0x9E3779B9u && never != nullptr) *never = all;
}

// Rounded up to an eighth of an octave, of many to a quarter: they have one algorithm.
int about_as_many(int tokens) {
  constexpr int kMany = 1024;  // a start tries sizes as near one another (Runner)
  const int octave = int(std::bit_floor(unsigned(std::max(tokens - 1, 1))));
  const int part = std::max(octave / (tokens <= kMany ? 8 : 4), 1);
  return (tokens + part - 1) / part * part;
}

dim3 grid_over(int columns, int tokens) {
  return dim3((columns + kThreads - 1) / kThreads, std::min(tokens, 65535));
}

}  // namespace

// One product's shape: y [rows x tokens] = W' [rows x in] x [in x tokens], column-major.
struct MatrixProducts::Shape {
  int rows = 0, in = 0, tokens = 0;
  int64_t stride = 0;
  bool accumulate = false;
  bool narrow = false;  // y is bf16
  auto operator<=>(const Shape&) const = default;
};

// What it is computed from, and a place for results that nobody wants; null: there is none.
struct MatrixProducts::Product {
  const void* weights;
  SplitVectors x;
  void* y;
  void* spare;
  bool accumulate;
};

struct MatrixProducts::Plan {
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algo{};
};

struct MatrixProducts::Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulAlgoCheck) check;
  decltype(&cublasLtMatmul) matmul;
};

std::unique_ptr<MatrixProducts> MatrixProducts::load() {
  void* file = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) return nullptr;
  auto library = std::make_unique<Library>();
  bool complete = true;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(file, symbol));
    complete = complete && function != nullptr;
  };
  find(library->create, "cublasLtCreate");
  find(library->destroy, "cublasLtDestroy");
  find(library->desc_create, "cublasLtMatmulDescCreate");
  find(library->desc_destroy, "cublasLtMatmulDescDestroy");
  find(library->desc_set, "cublasLtMatmulDescSetAttribute");
  find(library->layout_create, "cublasLtMatrixLayoutCreate");
  find(library->layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(library->preference_create, "cublasLtMatmulPreferenceCreate");
  find(library->preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(library->preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(library->heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(library->check, "cublasLtMatmulAlgoCheck");
  find(library->matmul, "cublasLtMatmul");
  if (!complete) {
    dlclose(file);
    return nullptr;
  }
  return std::unique_ptr<MatrixProducts>(new MatrixProducts(file, std::move(library)));
}

MatrixProducts::MatrixProducts(void* file, std::unique_ptr<Library> library)
    : file_(file), library_(std::move(library)) {
  WEIR_BLAS_CHECK(library_->create(&handle_));
  WEIR_BLAS_CHECK(library_->desc_create(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  WEIR_BLAS_CHECK(library_->desc_set(desc_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                     sizeof transposed));
  workspace_ = device_memory(kWorkspaceBytes);
}

MatrixProducts::~MatrixProducts() {
  for (auto& [shape, plan] : plans_) {
    for (cublasLtMatrixLayout_t layout : {plan.w, plan.x, plan.y}) {
      library_->layout_destroy(layout);
    }
  }
  library_->desc_destroy(desc_);
  library_->destroy(handle_);
  cudaFree(workspace_);
  dlclose(file_);
}

const MatrixProducts::Plan& MatrixProducts::plan(const Shape& shape, const Product& product,
                                                 Context& context) {
  if (const auto found = plans_.find(shape); found != plans_.end()) return found->second;
  Plan made;
  const auto layout = [&](cublasLtMatrixLayout_t& to, cudaDataType type, int rows, int columns,
                          int64_t stride) {
    WEIR_BLAS_CHECK(library_->layout_create(&to, type, uint64_t(rows), uint64_t(columns), stride));
  };
  layout(made.w, CUDA_R_16BF, shape.in, shape.rows, shape.in);
  layout(made.x, CUDA_R_16BF, shape.in, shape.tokens, shape.in);
  layout(made.y, shape.narrow ? CUDA_R_16BF : CUDA_R_32F, shape.rows, shape.tokens, shape.stride);
  Shape about = shape;
  about.tokens = about_as_many(shape.tokens);
  if (const auto found = fastest_.find(about); found != fastest_.end()) {
    made.algo = found->second;
    if (supports(made)) return plans_.emplace(shape, made).first->second;
  }
  find_fastest(made, shape, product, context);
  fastest_[about] = made.algo;
  return plans_.emplace(shape, made).first->second;
}

bool MatrixProducts::supports(const Plan& plan) const {
  cublasLtMatmulHeuristicResult_t result{};
  return library_->check(handle_, desc_, plan.w, plan.x, plan.y, plan.y, &plan.algo, &result) ==
             CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= kWorkspaceBytes;
}

// Leaves the cache as a step does: the vectors are there, the matrix is not.
void MatrixProducts::forget_matrix(const Shape& shape, const Product& product,
                                   Context& context) const {
  constexpr int64_t kCacheBytes = int64_t(80) << 20;
  const auto read = [&](const void* data, int64_t bytes) {
    const int blocks = 4 * context.multiprocessors;
    read_kernel<<<blocks, kThreads, 0, context.stream>>>(static_cast<const uint4*>(data),
                                                         bytes / int64_t(sizeof(uint4)), nullptr);
    WEIR_CUDA_CHECK(cudaGetLastError());
  };
  read(context.scratch, std::min(kCacheBytes, int64_t(2 * context.half_bytes)));
  read(product.x.high, std::min(kCacheBytes / 2, int64_t(shape.tokens) * shape.in * 2));
  context.follows = false;
}

// Of the algorithms that the library thinks best, the one that takes the least time here. They are
// tried in turn, several times: how fast the device is changes meanwhile.
void MatrixProducts::find_fastest(Plan& plan, const Shape& shape, const Product& product,
                                  Context& context) {
  constexpr int kTried = 16, kTurns = 5;
  cublasLtMatmulPreference_t preference = nullptr;
  WEIR_BLAS_CHECK(library_->preference_create(&preference));
  const size_t bytes = kWorkspaceBytes;
  WEIR_BLAS_CHECK(library_->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &bytes, sizeof bytes));
  const uint32_t aligned = 16;
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    WEIR_BLAS_CHECK(library_->preference_set(preference, attribute, &aligned, sizeof aligned));
  }
  cublasLtMatmulHeuristicResult_t result[kTried] = {};
  int found = 0;
  WEIR_BLAS_CHECK(library_->heuristic(handle_, desc_, plan.w, plan.x, plan.y, plan.y, preference,
                                      kTried, result, &found));
  WEIR_CHECK(found >= 1);
  library_->preference_destroy(preference);
  plan.algo = result[0].algo;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  WEIR_CUDA_CHECK(cudaStreamIsCapturing(context.stream, &capturing));
  // What is tried must not change y where y is added to.
  void* to = product.accumulate ? product.spare : product.y;
  if (found == 1 || to == nullptr || capturing != cudaStreamCaptureStatusNone) return;

  cudaEvent_t begin = nullptr, end = nullptr;
  WEIR_CUDA_CHECK(cudaEventCreate(&begin));
  WEIR_CUDA_CHECK(cudaEventCreate(&end));
  cublasLtMatmulAlgo_t fastest = plan.algo;
  float least[kTried], least_of_all = 0;
  for (int turn = -1; turn < kTurns; ++turn) {  // the first one is not counted
    for (int i = 0; i < found; ++i) {
      if (result[i].state != CUBLAS_STATUS_SUCCESS) continue;
      Plan tried = plan;
      tried.algo = result[i].algo;
      forget_matrix(shape, product, context);
      WEIR_CUDA_CHECK(cudaEventRecord(begin, context.stream));
      start(tried, product, product.x.high, product.accumulate, to, context);
      WEIR_CUDA_CHECK(cudaEventRecord(end, context.stream));
      WEIR_CUDA_CHECK(cudaEventSynchronize(end));
      float milliseconds = 0;
      WEIR_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
      least[i] = turn <= 0 ? milliseconds : std::min(least[i], milliseconds);
      if (turn + 1 < kTurns || (least_of_all > 0 && least[i] >= least_of_all)) continue;
      least_of_all = least[i];
      fastest = result[i].algo;
    }
  }
  plan.algo = fastest;
  WEIR_CUDA_CHECK(cudaEventDestroy(begin));
  WEIR_CUDA_CHECK(cudaEventDestroy(end));
}

void MatrixProducts::start(const Plan& plan, const Product& product, const void* x,
                           bool accumulate, void* to, Context& context) const {
  const float one = 1, zero = 0;
  WEIR_BLAS_CHECK(library_->matmul(handle_, desc_, &one, product.weights, plan.w, x, plan.x,
                                   accumulate ? &one : &zero, product.y, plan.y, to, plan.y,
                                   &plan.algo, workspace_, kWorkspaceBytes, context.stream));
  context.follows = false;
}

void MatrixProducts::multiply(const void* weights, int rows, int in, const SplitVectors& vectors,
                              int tokens, bool accumulate, const Acts& y, Context& context) {
  Product product{weights, vectors, y.data, nullptr, accumulate};
  if (size_t(tokens) * size_t(y.stride) * sizeof(float) <= context.half_bytes) {
    product.spare = static_cast<char*>(context.scratch) +
                    (1 - context.split.half) * context.half_bytes;
  }
  const Plan& use = plan({rows, in, tokens, y.stride, accumulate}, product, context);
  for (const auto* x : {vectors.low, vectors.high}) {
    if (x == nullptr) continue;
    start(use, product, x, accumulate, y.data, context);
    accumulate = true;
  }
}

void MatrixProducts::multiply_narrow(const void* weights, int rows, int in,
                                     const SplitVectors& vectors, int tokens, __nv_bfloat16* y,
                                     Context& context) {
  const Product product{weights, vectors, y, nullptr, false};
  const Shape shape{.rows = rows, .in = in, .tokens = tokens, .stride = rows, .narrow = true};
  start(plan(shape, product, context), product, vectors.high, false, y, context);
}

namespace {

// Consecutive parts that lie next to each other in memory are one matrix.
struct Group {
  int first = 0, count = 0, rows = 0;
};

Group group_at(const Linear& op, int first) {
  Group group{first, 1, op.part[first].rows};
  const char* end = static_cast<const char*>(op.part[first].data) + op.part[first].bytes();
  while (first + group.count < op.parts && op.part[first + group.count].data == end) {
    const Matrix& next = op.part[first + group.count++];
    group.rows += next.rows;
    end += next.bytes();
  }
  return group;
}

bool fits(const Linear& op, const Group& group, int row) {
  return group.rows >= kSmallRows && group.rows % 4 == 0 && row % 4 == 0 && op.y.stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(op.y.data) % 16 == 0;
}

Linear part_of(const Linear& op, const Group& group, int row) {
  Linear part{.tokens = op.tokens, .in = op.in, .parts = group.count,
              .accumulate = op.accumulate, .x = op.x, .y = {op.y.data + row, op.y.stride}};
  for (int p = 0; p < group.count; ++p) {
    part.part[p] = op.part[group.first + p];
    part.bias[p] = op.bias[group.first + p];
  }
  return part;
}

// A group's product, by whichever is faster.
void multiply(const Linear& part, int rows, const SplitVectors& vectors, Context& context) {
  const bool adds_once = part.accumulate && vectors.low == nullptr;
  if (adds_once || !suits_prompt(rows, part.in, part.tokens, context)) {
    context.products->multiply(part.part[0].data, rows, part.in, vectors, part.tokens,
                               part.accumulate, part.y, context);
    return;
  }
  using Leave = PromptProduct::Leave;
  run_prompt({.matrix = part.part[0].data, .rows = rows, .in = part.in, .tokens = part.tokens,
              .x = vectors, .y = part.y.data, .stride = part.y.stride,
              .leave = part.accumulate ? Leave::Added : Leave::Exact},
             context);
}

}  // namespace

bool is_one_matrix(const Linear& op) {
  const Group all = group_at(op, 0);
  return all.count == op.parts && fits(op, all, 0);
}

void run_large_gated(const Linear& op, const Swiglu& gate, Context& context) {
  const SplitVectors vectors = split(op.x, op.in, op.tokens, context);
  if (suits_prompt(2 * gate.dim, op.in, op.tokens, context)) {
    const SplitVectors out = leave_split(gate.out, gate.dim, gate.tokens, context);
    run_prompt({.matrix = op.part[0].data, .second = op.part[1].data, .rows = gate.dim,
                .in = op.in, .tokens = op.tokens, .x = vectors, .y = out.high, .low = out.low,
                .leave = PromptProduct::Leave::Gated},
               context);
    return;
  }
  context.products->multiply_narrow(op.part[0].data, total_rows(op), op.in, vectors, op.tokens,
                                    reinterpret_cast<__nv_bfloat16*>(op.y.data), context);
  context.split = std::exchange(context.next_split, {});
  run_narrow(gate, context);
}

void run_large(const Linear& op, Context& context) {
  const SplitVectors vectors = split(op.x, op.in, op.tokens, context);
  int row = 0;
  for (Group group; group.first + group.count < op.parts || group.count == 0;) {
    group = group_at(op, group.first + group.count);
    const Linear part = part_of(op, group, row);
    row += group.rows;
    if (!fits(op, group, row - group.rows)) {
      run_small(part, context);
      continue;
    }
    multiply(part, group.rows, vectors, context);
    int below = 0;
    for (int p = 0; p < part.parts; below += part.part[p++].rows) {
      if (part.bias[p] == nullptr) continue;
      const Acts y{part.y.data + below, part.y.stride};
      launch(context,
             {.grid = grid_over(part.part[p].rows, op.tokens), .block = dim3(kThreads)},
             bias_kernel, y, part.bias[p], part.part[p].rows, op.tokens);
    }
  }
}

}  // namespace weir::cuda
