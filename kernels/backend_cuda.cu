#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda_util.cuh"
#include "kernels/device_memory.h"
#include "kernels/matrix_products_cuda.cuh"
#include "kernels/resident_cuda.cuh"

namespace weir {
namespace {

constexpr size_t kAlign = 256;
constexpr size_t kPinnedBytes = size_t(8) << 20;  // each way, of each lane
constexpr size_t kGraphsKept = 512;
constexpr size_t kScratchMost = size_t(192) << 20;  // of each half: 16,384 bf16 vectors of 5,632

// Device memory that is only ever handed out, piece after piece, so that tensors adopted one after
// the other lie next to each other.
class Arena {
 public:
  void* take(size_t bytes) {
    const size_t used = (bytes + kAlign - 1) / kAlign * kAlign;
    if (used > size_ - at_) {
      next_ = std::min(2 * next_, size_t(512) << 20);
      size_ = std::max(used, next_);
      blocks_.push_back(cuda::device_memory(size_));
      at_ = 0;
    }
    void* data = static_cast<std::byte*>(blocks_.back()) + at_;
    at_ += used;
    return data;
  }
  ~Arena() {
    for (void* block : blocks_) cudaFree(block);
  }

 private:
  std::vector<void*> blocks_;
  size_t at_ = 0, size_ = 0, next_ = size_t(4) << 20;
};

// Page-locked host memory that copies pass through.
class Pinned {
 public:
  Pinned() { WEIR_CUDA_CHECK(cudaMallocHost(&data_, kPinnedBytes)); }
  ~Pinned() { cudaFreeHost(data_); }
  bool fits(size_t bytes) const { return bytes <= kPinnedBytes - at_; }
  void* take(size_t bytes) {
    void* data = static_cast<std::byte*>(data_) + at_;
    at_ += std::min(kPinnedBytes - at_, (bytes + 63) / 64 * 64);
    return data;
  }
  void clear() { at_ = 0; }

 private:
  void* data_ = nullptr;
  size_t at_ = 0;
};

// The copies between one mark and the next. Two lanes take turns: while the device works on what
// one holds, the other is filled.
struct Lane {
  struct Pending {
    void* host;
    const void* pinned;
    size_t bytes;
  };
  Pinned up, down;
  std::vector<Pending> pending;  // downloads whose data wait in `down`
  cudaEvent_t done = nullptr;
  uint64_t mark = 0;             // 0: none that is still to be waited for

  // All of it is done: hands over what was downloaded.
  void clear() {
    for (const Pending& item : pending) std::memcpy(item.host, item.pinned, item.bytes);
    pending.clear();
    up.clear();
    down.clear();
    mark = 0;
  }
};

// By a kernel, as the copy engine and the multiprocessors would wait for each other.
__global__ __launch_bounds__(256) void copy_kernel(uint4* to, const uint4* from, int count) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) to[i] = from[i];
}

// A program that has run before, byte for byte, and its graph from the second run on.
struct Recorded {
  std::vector<Op> ops;
  cudaGraphExec_t graph = nullptr;
  uint64_t used = 0;  // the run that used it last
  cuda::resident::Tables tables;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, const CudaOptions& options);
  ~CudaBackend() override;
  DeviceInfo info() const override;
  void* allocate(size_t bytes) override;
  const void* adopt(const void* host, size_t bytes) override;
  void upload(void* device, const void* host, size_t bytes) override;
  void download(void* host, const void* device, size_t bytes) override;
  void copy(void* target, const void* source, size_t bytes) override;
  const char* unserved(const Program& program) const override;
  void run(const Program& program) override;
  bool defers_writes(const Program& program) const override;
  bool remembers_programs() const override { return true; }
  void finish() override;
  bool runs_ahead() const override { return true; }
  uint64_t mark() override;
  void await(uint64_t mark) override;

 private:
  // Start-up and steps may be of different threads, and a thread has a device.
  void use() const { WEIR_CUDA_CHECK(cudaSetDevice(device_)); }
  void copy_pinned(void* target, const void* source, size_t bytes, cudaMemcpyKind kind);
  void enqueue(const Program& program, Recorded& entry, bool changed);
  Recorded& recorded(const Program& program, bool& known);
  void forget(cudaGraphExec_t graph);
  Lane& lane();  // that is being filled

  const int device_;
  const bool defer_writes_;
  cudaDeviceProp properties_{};
  cuda::Context context_;
  std::unique_ptr<cuda::MatrixProducts> products_;
  Lane lanes_[2];
  uint64_t marks_ = 0;
  // Short vectors apart: the matrices of a layer's projection stay next to each other.
  Arena matrices_, vectors_;
  std::map<std::pair<const void*, size_t>, const void*> adopted_;
  std::vector<void*> allocated_;
  std::map<std::pair<const Op*, size_t>, Recorded> recorded_;
  std::vector<const void*> states_;
  uint64_t runs_ = 0;
};

CudaBackend::CudaBackend(int device, const CudaOptions& options)
    : device_(device), defer_writes_(options.defer_writes) {
  WEIR_CUDA_CHECK(cudaGetDeviceProperties(&properties_, device));
  int low = 0, high = 0;
  WEIR_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
  WEIR_CUDA_CHECK(cudaStreamCreateWithPriority(&context_.stream, cudaStreamNonBlocking, high));
  WEIR_CUDA_CHECK(cudaStreamCreateWithPriority(&context_.side, cudaStreamNonBlocking, low));
  for (cudaEvent_t* event : {&context_.forked, &context_.joined}) {
    WEIR_CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  for (Lane& lane : lanes_) {
    WEIR_CUDA_CHECK(cudaEventCreateWithFlags(&lane.done, cudaEventDisableTiming));
  }
  context_.multiprocessors = properties_.multiProcessorCount;
  context_.compute = properties_.major * 10 + properties_.minor;
  context_.half_bytes = std::min(kScratchMost, properties_.totalGlobalMem / 512 / kAlign * kAlign);
  context_.scratch = cuda::device_memory(2 * context_.half_bytes);
  context_.meeting = cuda::resident::make_meeting(context_);
  products_ = cuda::MatrixProducts::load();
  context_.products = products_.get();
  context_.hopper = cuda::find_hopper(context_.compute);
  context_.keep_low = !options.bf16_vectors;
}

CudaBackend::~CudaBackend() {
  use();
  WEIR_CUDA_CHECK(cudaStreamSynchronize(context_.stream));
  for (auto& [key, program] : recorded_) {
    if (program.graph != nullptr) cudaGraphExecDestroy(program.graph);
  }
  for (void* block : allocated_) cudaFree(block);
  cudaFree(context_.scratch);
  for (Lane& lane : lanes_) cudaEventDestroy(lane.done);
  cudaFree(context_.meeting);
  for (cudaEvent_t event : {context_.forked, context_.joined}) cudaEventDestroy(event);
  cudaStreamDestroy(context_.side);
  cudaStreamDestroy(context_.stream);
}

DeviceInfo CudaBackend::info() const {
  size_t free = 0, all = 0;
  WEIR_CUDA_CHECK(cudaMemGetInfo(&free, &all));
  return {.name = std::string(properties_.name) + ", CUDA " + std::to_string(properties_.major) +
                  "." + std::to_string(properties_.minor) +
                  (context_.keep_low ? "" : ", bf16 vectors"),
          .memory_bytes = all,
          .free_bytes = free};
}

void* CudaBackend::allocate(size_t bytes) {
  use();
  allocated_.push_back(cuda::device_memory(std::max(bytes, size_t(1))));
  WEIR_CUDA_CHECK(cudaMemsetAsync(allocated_.back(), 0, bytes, context_.stream));
  return allocated_.back();
}

const void* CudaBackend::adopt(const void* host, size_t bytes) {
  use();
  const auto [place, fresh] = adopted_.try_emplace({host, bytes});
  if (!fresh) return place->second;
  constexpr size_t kVectorMost = 48 * 1024;
  void* device = (bytes < kVectorMost ? vectors_ : matrices_).take(std::max(bytes, size_t(1)));
  WEIR_CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, context_.stream));
  WEIR_CUDA_CHECK(cudaStreamSynchronize(context_.stream));
  return place->second = device;
}

// One of both is page-locked memory of the host, which kernels can reach too.
void CudaBackend::copy_pinned(void* target, const void* source, size_t bytes,
                              cudaMemcpyKind kind) {
  constexpr size_t kByKernelMost = size_t(64) << 10, kEach = sizeof(uint4);
  const auto fits = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kEach == 0; };
  if (bytes > kByKernelMost || bytes % kEach != 0 || !fits(target) || !fits(source)) {
    WEIR_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, kind, context_.stream));
    return;
  }
  const auto count = int(bytes / kEach);
  context_.follows = false;  // it does not begin before all is done
  cuda::launch(context_, {.grid = dim3((count + 255) / 256), .block = dim3(256)}, copy_kernel,
               static_cast<uint4*>(target), static_cast<const uint4*>(source), count);
}

void CudaBackend::upload(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  use();
  if (bytes > kPinnedBytes) {
    WEIR_CUDA_CHECK(
        cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, context_.stream));
    return finish();  // the caller's memory is free again on return
  }
  Lane& lane = this->lane();
  if (!lane.up.fits(bytes)) finish();
  void* const pinned = lane.up.take(bytes);
  std::memcpy(pinned, host, bytes);
  copy_pinned(device, pinned, bytes, cudaMemcpyHostToDevice);
}

void CudaBackend::download(void* host, const void* device, size_t bytes) {
  if (bytes == 0) return;
  use();
  if (bytes > kPinnedBytes) {
    WEIR_CUDA_CHECK(
        cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, context_.stream));
    return;
  }
  Lane& lane = this->lane();
  if (!lane.down.fits(bytes)) finish();
  void* const pinned = lane.down.take(bytes);
  lane.pending.push_back({host, pinned, bytes});
  copy_pinned(pinned, device, bytes, cudaMemcpyDeviceToHost);
}

void CudaBackend::copy(void* target, const void* source, size_t bytes) {
  use();
  WEIR_CUDA_CHECK(
      cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, context_.stream));
}

const char* CudaBackend::unserved(const Program& program) const {
  for (const Op& op : program) {
    const bool served = std::visit(
        [](const auto& o) {
          return requires(cuda::Context & context) { cuda::run(o, context); };
        },
        op);
    if (!served) return name(op);
    const char* const refused = std::visit(
        [](const auto& o) -> const char* {
          if constexpr (requires { cuda::refusal(o); }) return cuda::refusal(o);
          return nullptr;
        },
        op);
    if (refused != nullptr) return refused;
  }
  return nullptr;
}

bool CudaBackend::defers_writes(const Program& program) const {
  bool any = false, all = defer_writes_;
  for (const Op& op : program) {
    std::visit(
        [&](const auto& o) {
          if constexpr (requires { cuda::defers(o, context_); }) {
            any = true;
            all = all && cuda::defers(o, context_);
          }
        },
        op);
  }
  return any && all;
}

void CudaBackend::enqueue(const Program& program, Recorded& entry, bool changed) {
  context_.tables = &entry.tables;
  context_.changed = changed;
  entry.tables.begin();
  context_.follows = false;
  context_.next_split = {};
  states_.clear();
  for (size_t i = 0, together = 0; i < program.size(); ++i) {
    const Op* const next = i + 1 < program.size() ? &program[i + 1] : nullptr;
    context_.split = std::exchange(context_.next_split, {});
    context_.next = next == nullptr ? nullptr : std::get_if<Linear>(next);
    if (together == 0) {
      together = size_t(cuda::resident::run(&program[i], int(program.size() - i), context_));
    }
    if (together == 0) {
      const size_t done = cuda::run_fused(std::span(program).subspan(i), context_);
      if (done > 0) {
        i += done - 1;
        continue;
      }
    }
    std::visit(
        [&](const auto& o) {
          if constexpr (requires { o.rows.computed; }) {
            // A kernel may read its rows before the one before it is done.
            if (o.rows.computed) context_.follows = false;
          }
          if constexpr (requires { o.state.data; }) {
            context_.fresh_state = std::ranges::find(states_, o.state.data) == states_.end();
            states_.push_back(o.state.data);
          }
          if (together > 0) {
            --together;  // the resident kernel has run it
          } else if constexpr (requires { cuda::run(o, context_); }) {
            cuda::run(o, context_);
          } else {
            WEIR_UNREACHABLE("load_model() refuses models whose ops are unserved()");
          }
        },
        program[i]);
  }
}

// A graph takes memory of the device when it is made and when it first runs.
void check_graph(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) cuda::no_room("a step's graph");
  WEIR_CUDA_CHECK(error);
}

// A program is known again by where its ops lie and by every byte of them. Padding bytes may make
// it look new; they never make two programs look the same.
Recorded& CudaBackend::recorded(const Program& program, bool& known) {
  static_assert(std::is_trivially_copyable_v<Op>);
  const auto [place, fresh] = recorded_.try_emplace({program.data(), program.size()});
  Recorded& entry = place->second;
  known = !fresh && std::memcmp(entry.ops.data(), program.data(), program.size() * sizeof(Op)) == 0;
  if (!known) {
    forget(std::exchange(entry.graph, nullptr));
    entry.ops.resize(program.size());
    std::memcpy(static_cast<void*>(entry.ops.data()), program.data(), program.size() * sizeof(Op));
  }
  entry.used = ++runs_;
  if (recorded_.size() > kGraphsKept) {
    const auto oldest = std::ranges::min_element(
        recorded_, {}, [](const auto& item) { return item.second.used; });
    forget(oldest->second.graph);
    recorded_.erase(oldest);
  }
  return entry;
}

// One that still runs is freed once it is done.
void CudaBackend::forget(cudaGraphExec_t graph) {
  if (graph != nullptr) WEIR_CUDA_CHECK(cudaGraphExecDestroy(graph));
}

void CudaBackend::run(const Program& program) {
  if (program.empty()) return;
  use();
  bool known = false;
  Recorded& entry = recorded(program, known);
  if (!known) return enqueue(program, entry, true);
  if (entry.graph == nullptr) {
    cudaGraph_t graph = nullptr;
    WEIR_CUDA_CHECK(cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeThreadLocal));
    enqueue(program, entry, false);
    WEIR_CUDA_CHECK(cudaStreamEndCapture(context_.stream, &graph));
    check_graph(cudaGraphInstantiate(&entry.graph, graph, 0));
    WEIR_CUDA_CHECK(cudaGraphDestroy(graph));
  }
  check_graph(cudaGraphLaunch(entry.graph, context_.stream));
}

void CudaBackend::finish() {
  use();
  WEIR_CUDA_CHECK(cudaStreamSynchronize(context_.stream));
  lanes_[(marks_ + 1) % 2].clear();  // the older one first
  lanes_[marks_ % 2].clear();
}

// Mark m closed the lane that m - 1 marks had chosen; its turn comes again with what follows m + 1.
Lane& CudaBackend::lane() {
  Lane& lane = lanes_[marks_ % 2];
  if (lane.mark != 0) await(lane.mark);
  return lane;
}

uint64_t CudaBackend::mark() {
  use();
  Lane& filled = lane();
  WEIR_CUDA_CHECK(cudaEventRecord(filled.done, context_.stream));
  return filled.mark = ++marks_;
}

void CudaBackend::await(uint64_t mark) {
  use();
  for (const uint64_t one : {mark - 1, mark}) {
    Lane& lane = lanes_[(one + 1) % 2];
    if (one == 0 || lane.mark != one) continue;  // it is done
    WEIR_CUDA_CHECK(cudaEventSynchronize(lane.done));
    lane.clear();
  }
}

// Does nothing: a build that has no code for the device cannot find it there.
__global__ void probe_kernel() {}

// Why a device cannot run our kernels, in CUDA's words.
cudaError_t start(int device) {
  cudaFuncAttributes found;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaFree(nullptr);  // begins a context
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&found, probe_kernel);
  return error;
}

}  // namespace

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::unique_ptr<Backend> make_cuda_backend(int device, std::string* error,
                                           const CudaOptions& options) {
  const std::string name = "CUDA device " + std::to_string(device) + ": ";
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess) count = 0;
  if (device < 0 || device >= count) {
    *error = name + "expected one of the " + std::to_string(count) + " that the driver shows";
    if (counted != cudaSuccess) *error += std::string(" (") + cudaGetErrorString(counted) + ")";
    return nullptr;
  }
  const cudaError_t started = start(device);
  if (started != cudaSuccess) {
    *error = name + cudaGetErrorString(started);
    return nullptr;
  }
  return std::make_unique<CudaBackend>(device, options);
}

}  // namespace weir
