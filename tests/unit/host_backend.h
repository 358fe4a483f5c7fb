#pragma once
#include <cstddef>

#include "kernels/backend.h"

namespace weir::test {

// The host as a device, which counts what it was given.
class HostBackend final : public Backend {
 public:
  int adopted = 0;

  DeviceInfo info() const override { return {.name = "host"}; }
  void* allocate(size_t) override { return nullptr; }
  const void* adopt(const void* host, size_t) override {
    ++adopted;
    return host;
  }
  void upload(void*, const void*, size_t) override {}
  void download(void*, const void*, size_t) override {}
  void copy(void*, const void*, size_t) override {}
  const char* unserved(const Program&) const override { return nullptr; }
  void run(const Program&) override {}
  void finish() override {}
};

}  // namespace weir::test
