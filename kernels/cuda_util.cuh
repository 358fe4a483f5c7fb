#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "kernels/check.h"
#include "kernels/op.h"

#define WEIR_CUDA_CHECK(call)                                                          \
  do {                                                                                 \
    const cudaError_t weir_error = (call);                                             \
    if (weir_error != cudaSuccess) {                                                   \
      ::weir::cuda::broken(__FILE__, __LINE__, weir_error);                            \
    }                                                                                  \
  } while (0)

namespace weir::cuda {

// A device that is lost, or that our code has broken: nothing it holds can be trusted.
[[noreturn]] inline void broken(const char* file, int line, cudaError_t error) {
  die(file, line, (std::string("CUDA: ") + cudaGetErrorString(error)).c_str());
}

class MatrixProducts;  // linear_large_cuda.cu
namespace resident {  // resident_cuda.cuh
struct Meeting;
class Tables;
}  // namespace resident

// Vectors as bf16, high + low = x to 16 bits or high alone: each [tokens, in] without gaps, the
// tokens padded to 8.
struct SplitVectors {
  __nv_bfloat16 *high = nullptr, *low = nullptr;
};

// Which vectors have been split into the scratch, and into which half of it.
struct Split {
  const float* data = nullptr;
  int64_t stride = 0;
  int in = 0, tokens = 0;
  int half = 0;
  // Not 0: the vectors have their norm's weights but not yet its scale. So many sums of squares a
  // token, whose sum is the token's, lie at the half's end.
  int squares = 0;
  float eps = 0;
  bool same_vectors(const Split& o) const {
    return data == o.data && stride == o.stride && in == o.in && tokens == o.tokens;
  }
};

// What the kernels for Hopper need to know of the machine.
struct Hopper {
  static constexpr int kClusters = 4;
  void* encode_map = nullptr;     // cuTensorMapEncodeTiled; null: no such machine
  int clusters[kClusters] = {};   // of 1, 2, 4, 8 blocks, each with a multiprocessor for itself,
                                  // that run at once
};

// What launching an op needs. Owned by the backend.
struct Context {
  cudaStream_t stream = nullptr;
  int multiprocessors = 0;
  int compute = 0;                     // 90: compute capability 9.0
  bool follows = false;                // the launch before this one was ours: it may overlap
  bool odd = false;                    // which of two kinds the last of Hopper's Linear was
  bool fresh_state = true;             // no earlier op of this program wrote this op's state
  MatrixProducts* products = nullptr;  // null: no cuBLASLt, nor the kernel for prompts

  cudaStream_t side = nullptr;  // see Beside
  cudaEvent_t forked = nullptr, joined = nullptr;

  Hopper hopper;
  bool keep_low = true;                // Linear multiplies x by high and low bf16 halves

  resident::Meeting* meeting = nullptr;  // null: the resident kernel does not run here
  resident::Tables* tables = nullptr;    // of the program
  bool changed = true;                   // the program is not the one that was in its place

  // Two halves: a kernel may read split vectors in one and leave others in the other.
  void* scratch = nullptr;
  size_t half_bytes = 0;
  Split split;                         // what the op before has left in the scratch
  Split next_split;                    // what this op leaves there
  const Linear* next = nullptr;        // the op after this one, if it is of this kind
};

// Kernels beside others that have nothing to do with them. What is launched while one of these
// lives begins where fork() was called, and what is launched after it waits for both. Those on the
// stream itself, which are launched before, are the first to get what room there is.
class Beside {
 public:
  static void fork(Context& context) {
    WEIR_CUDA_CHECK(cudaEventRecord(context.forked, context.stream));
  }
  explicit Beside(Context& context) : context_(context) {
    WEIR_CUDA_CHECK(cudaStreamWaitEvent(context.side, context.forked, 0));
    std::swap(context.stream, context.side);
    context.follows = false;
  }
  ~Beside() {
    WEIR_CUDA_CHECK(cudaEventRecord(context_.joined, context_.stream));
    std::swap(context_.stream, context_.side);
    WEIR_CUDA_CHECK(cudaStreamWaitEvent(context_.stream, context_.joined, 0));
    context_.follows = false;
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

 private:
  Context& context_;
};

Hopper find_hopper(int compute);

// The place for an op's output to be left split, for the Linear that may follow; null: no need.
SplitVectors leave_split(const Acts& out, int dim, int tokens, Context& context);
// Whether the next op is a Linear that reads just this output, and reads it split.
bool next_reads_split(const Acts& out, int dim, int tokens, const Context& context);

void run(const Embed& op, Context& context);
void run(const Gather& op, Context& context);
void run(const RmsNorm& op, Context& context);
void run(const Linear& op, Context& context);
void run(const Swiglu& op, Context& context);
// A Linear and the op after it in one, if they fit each other and the kernels; ops done: 2 or 0.
size_t run_fused(std::span<const Op> ops, Context& context);
void run(const DeltaMix& op, Context& context);
void run(const SwilaMix& op, Context& context);
void run(const OuterStep& op, Context& context);
void run(const EraseStep& op, Context& context);
void run(const TokenShift& op, Context& context);
void run(const DepthAttention& op, Context& context);
void run(const Conv1d& op, Context& context);
void run(const Rotary& op, Context& context);
void run(const Elementwise& op, Context& context);
void run(const FeatureMap& op, Context& context);
void run(const HeadNorm& op, Context& context);
void run(const Attention& op, Context& context);
void run(const HeadDot& op, Context& context);
void run(const ValueRoute& op, Context& context);
void run(const RouteSignal& op, Context& context);
void run(const FlushPending& op, Context& context);
void run(const MemoryRoute& op, Context& context);
void run(const MemoryMerge& op, Context& context);
void run(const Sample& op, Context& context);

// Why an op of these sizes has no kernel, as a user reads it; null: it has one.
const char* refusal(const DeltaMix& op);
const char* refusal(const SwilaMix& op);
const char* refusal(const OuterStep& op);
const char* refusal(const FeatureMap& op);
const char* refusal(const Attention& op);

// Whether rows of one token of such an op defer their writes, if it has `pending` set. Pointers are
// not read.
bool defers(const DeltaMix& op, const Context& context);
bool defers(const SwilaMix& op, const Context& context);

// A Linear with a range of tokens.
void run_range(const Linear& op, Context& context);

struct Shape {
  dim3 grid, block;
  size_t shared = 0;  // bytes
  int cluster = 1;    // blocks along x that share their shared memory
};

// Starts a kernel. A kernel of ours that follows another may start while that one still runs: each
// begins with wait_for_predecessor(), before which it may touch only what no kernel of the same
// program writes (weights, the rows' small arrays).
template <typename... Params, typename... Args>
void launch(Context& context, const Shape& shape, void (*kernel)(Params...), const Args&... args) {
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (context.follows && context.compute >= 90) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {unsigned(shape.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.stream = context.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  // Kernels that divide a multiprocessor's memory differently never share it: all divide it alike.
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared));
  WEIR_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Params(args)...));
  context.follows = true;
}

// Returns when all earlier kernels of the stream are done and what they wrote can be read. Every
// kernel that launch() starts calls it, though it reads nothing: the next one relies on it.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel's blocks may take what room this one leaves.
__device__ inline void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Two numbers as high + low bf16 pairs.
__device__ inline void split(float x, float y, uint32_t& high, uint32_t& low) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  const float2 back = __bfloat1622float2(h);
  const __nv_bfloat162 l = __floats2bfloat162_rn(x - back.x, y - back.y);
  high = reinterpret_cast<const uint32_t&>(h);
  low = reinterpret_cast<const uint32_t&>(l);
}
// Four numbers next to each other.
__device__ inline void split(const float4& v, uint2& high, uint2& low) {
  split(v.x, v.y, high.x, low.x);
  split(v.z, v.w, high.y, low.y);
}
// One number of an output that is also left split.
__device__ inline void store_split(const SplitVectors& to, int64_t place, float x) {
  if (to.high == nullptr) return;
  const __nv_bfloat16 high = __float2bfloat16_rn(x);
  to.high[place] = high;
  if (to.low != nullptr) to.low[place] = __float2bfloat16_rn(x - __bfloat162float(high));
}
// Four of them, at a multiple of four.
__device__ inline void store_split(const SplitVectors& to, int64_t place, const float4& v) {
  if (to.high == nullptr) return;
  uint2 high, low;
  split(v, high, low);
  *reinterpret_cast<uint2*>(to.high + place) = high;
  if (to.low != nullptr) *reinterpret_cast<uint2*>(to.low + place) = low;
}

// Whether vectors may be read and written four numbers at a time.
inline bool by_fours(const Acts& acts) {
  return reinterpret_cast<uintptr_t>(acts.data) % 16 == 0 && acts.stride % 4 == 0;
}

__device__ inline float* at(const Acts& acts, int64_t token) {
  return acts.data + token * acts.stride;
}
__device__ inline float* at(const SlotState& state, Slot slot) {
  return state.data + int64_t(slot) * state.stride;
}

// The row of a token: the last one that begins at or before it, past rows without tokens.
__device__ inline int row_of(const Rows& rows, int token) {
  int low = 0, high = rows.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (rows.begin[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The sum over groups of `lanes` neighbouring lanes, in each of them; lanes a power of two.
template <int lanes = 32>
__device__ inline float sum_over_lanes(float value) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

__device__ inline float max_over_lanes(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline float apply(Activation activation, float x) {
  switch (activation) {
    case Activation::None: return x;
    case Activation::Silu: return x * sigmoid(x);
    case Activation::Sigmoid: return sigmoid(x);
    case Activation::Relu: return fmaxf(x, 0.0f);
    case Activation::EluPlusOne: return x > 0 ? x + 1.0f : expf(x);
    case Activation::LogSigmoid: return fminf(x, 0.0f) - log1pf(expf(-fabsf(x)));
    case Activation::ReluSquared: return x > 0 ? x * x : 0.0f;
    case Activation::GeluTanh:
      return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::Tanh: return tanhf(x);
  }
  return x;
}

}  // namespace weir::cuda
