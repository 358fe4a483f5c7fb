#pragma once
#include <cstddef>
#include <vector>

#include "kernels/backend.h"

namespace weir {

// Where several small arrays lie in one block, one after the other.
class Layout {
 public:
  template <typename T>
  struct Array {
    size_t offset = 0;
  };

  template <typename T>
  Array<T> reserve(size_t count) {
    const Array<T> array{bytes_};
    bytes_ = (bytes_ + count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return array;
  }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlign = 64;
  size_t bytes_ = 0;
};

// Small arrays that travel between host and device as one block: a part of it, from its beginning.
class Staging {
 public:
  Staging(size_t bytes, Backend& backend)
      : host_(bytes), device_(static_cast<std::byte*>(backend.allocate(bytes))) {}

  template <typename T>
  T* host(Layout::Array<T> array) {
    return reinterpret_cast<T*>(host_.data() + array.offset);
  }
  // Null with a device that gives no memory: a step is also lowered without, to measure it.
  template <typename T>
  T* device(Layout::Array<T> array) const {
    return device_ == nullptr ? nullptr : reinterpret_cast<T*>(device_ + array.offset);
  }
  void upload(size_t bytes, Backend& backend) const {
    backend.upload(device_, host_.data(), bytes);
  }

 private:
  std::vector<std::byte> host_;
  std::byte* device_ = nullptr;
};

}  // namespace weir
