#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/op.h"

namespace weir {

// What a backend runs on.
struct DeviceInfo {
  std::string name;          // "CPU, AVX-512, 2 threads"
  size_t memory_bytes = 0;   // in all
  size_t free_bytes = 0;     // now
};

// Memory and execution on one device. All calls come from one thread.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual DeviceInfo info() const = 0;

  // At start-up only. Zeroed, aligned to 64 bytes, freed with the backend.
  virtual void* allocate(size_t bytes) = 0;
  // Constant host data that outlives the backend: the pointer itself where the device can read it,
  // otherwise a copy.
  virtual const void* adopt(const void* host, size_t bytes) = 0;

  virtual void upload(void* device, const void* host, size_t bytes) = 0;
  virtual void download(void* host, const void* device, size_t bytes) = 0;
  virtual void copy(void* target, const void* source, size_t bytes) = 0;
  // The name of the first op that this backend cannot run; null: it runs all. Pointers are not
  // read.
  virtual const char* unserved(const Program& program) const = 0;
  virtual void run(const Program& program) = 0;  // in order
  // Whether it runs this program with the writes of all its states deferred (pending.h), of rows
  // of one token: ops may then have their `pending` set. Nothing that pointers point to is read;
  // without any the answer is that for memory which is aligned as the device's allocations are.
  virtual bool defers_writes(const Program&) const { return false; }
  // Whether a program that has run before runs faster: then steps are padded to few shapes, and
  // those are run at start-up.
  virtual bool remembers_programs() const { return false; }
  virtual void finish() = 0;                     // returns when everything asked for is done
  // Whether run() returns before its work is done: then it pays to ask for a step before the
  // answers of the last are read. mark() names all that has been asked for so far, and await(mark)
  // returns when that is done, whatever was asked for since. Two marks may be waited for at a time.
  virtual bool runs_ahead() const { return false; }
  virtual uint64_t mark() { return 0; }
  virtual void await(uint64_t) { finish(); }
};

struct CpuOptions {
  int threads = 0;      // 0: one for each core this process may use
  bool plain = false;   // the oracle: every op as its formula reads, one thread
  int simd = -1;        // -1: the best the machine has; 0 portable, 1 AVX2, 2 AVX-512
};
std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options = {});

struct CudaOptions {
  // Linear multiplies bf16 matrices by bf16 vectors: an error near 2e-3 an op. Otherwise by the
  // high and low bf16 halves of a float32 vector: near 3e-6, at twice the arithmetic.
  // Attention of rows of many tokens likewise: with halves alone near 6e-4, with high and low ones
  // near 3e-6 at three times the products.
  bool bf16_vectors = false;
  // States are written by each fourth token of a head, where a kernel can do so (pending.h).
  bool defer_writes = true;
};

// NVIDIA GPUs. In a build without CUDA there are none.
int cuda_device_count();
// Null when device is not one of them, or does not start; error then says why.
std::unique_ptr<Backend> make_cuda_backend(int device, std::string* error,
                                           const CudaOptions& options = {});

}  // namespace weir
