#pragma once
#include <memory>
#include <utility>

#include "kernels/backend.h"

namespace weir::test {

// What another backend does; for tests that watch or change some of it.
class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  DeviceInfo info() const override { return inner_->info(); }
  void* allocate(size_t bytes) override { return inner_->allocate(bytes); }
  const void* adopt(const void* host, size_t bytes) override { return inner_->adopt(host, bytes); }
  void upload(void* to, const void* from, size_t bytes) override {
    inner_->upload(to, from, bytes);
  }
  void download(void* to, const void* from, size_t bytes) override {
    inner_->download(to, from, bytes);
  }
  void copy(void* to, const void* from, size_t bytes) override { inner_->copy(to, from, bytes); }
  const char* unserved(const Program& program) const override { return inner_->unserved(program); }
  void run(const Program& program) override { inner_->run(program); }
  void finish() override { inner_->finish(); }

 protected:
  Backend& inner() { return *inner_; }

 private:
  std::unique_ptr<Backend> inner_;
};

}  // namespace weir::test
