#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/cpu.h"

namespace weir {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

// A number of bytes that stands alone in a file; kUnlimited when there is none.
size_t read_bytes(const char* path) {
  std::ifstream file(path);
  size_t bytes = 0;
  return file >> bytes ? bytes : kUnlimited;
}

size_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  size_t kibibytes = 0;
  while (file >> key >> kibibytes) {
    if (key == "MemAvailable:") return kibibytes * 1024;
    std::getline(file, unit);
  }
  return size_t(sysconf(_SC_AVPHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
}

// The machine's memory, or what this process's container may use of it.
void read_memory(DeviceInfo& info) {
  info.memory_bytes = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  info.free_bytes = available_bytes();
  const size_t limit = read_bytes("/sys/fs/cgroup/memory.max");
  const size_t used = read_bytes("/sys/fs/cgroup/memory.current");
  if (limit == kUnlimited || used == kUnlimited) return;
  info.memory_bytes = std::min(info.memory_bytes, limit);
  info.free_bytes = std::min(info.free_bytes, limit - std::min(limit, used));
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const SimdTable& simd, int threads, bool plain)
      : pool_(threads), context_{.pool = pool_, .simd = simd, .plain = plain} {}

  ~CpuBackend() override {
    for (void* block : blocks_) ::operator delete(block, std::align_val_t{kAlign});
  }

  DeviceInfo info() const override {
    const int threads = pool_.threads();
    DeviceInfo info;
    info.name = std::string("CPU, ") + (context_.plain ? "plain" : context_.simd.name) + ", " +
                std::to_string(threads) + (threads == 1 ? " thread" : " threads");
    read_memory(info);
    return info;
  }

  void* allocate(size_t bytes) override {
    void* const block = ::operator new(bytes, std::align_val_t{kAlign});
    std::memset(block, 0, bytes);
    blocks_.push_back(block);
    return block;
  }

  const void* adopt(const void* host, size_t) override { return host; }

  void upload(void* device, const void* host, size_t bytes) override {
    copy(device, host, bytes);
  }
  void download(void* host, const void* device, size_t bytes) override {
    copy(host, device, bytes);
  }
  void copy(void* target, const void* source, size_t bytes) override {
    if (bytes > 0) std::memcpy(target, source, bytes);
  }

  const char* unserved(const Program&) const override { return nullptr; }
  void run(const Program& program) override {
    for (const Op& op : program) {
      std::visit([this](const auto& one) { cpu::run(one, context_); }, op);
    }
  }
  void finish() override {}

 private:
  ThreadPool pool_;
  cpu::Context context_;
  std::vector<void*> blocks_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options) {
  WEIR_CHECK(options.threads >= 0);
  const SimdTable* const simd = simd_table(options.simd);
  WEIR_CHECK(simd != nullptr);  // callers ask simd_table() before they force a level
  const int threads = options.threads > 0 ? options.threads : usable_cores();
  return std::make_unique<CpuBackend>(*simd, options.plain ? 1 : threads, options.plain);
}

}  // namespace weir
