#pragma once
#include <cstddef>
#include <vector>

#include "kernels/backend.h"

namespace weir {

// Several small arrays that travel between host and device as one block. Reserve all of them,
// then allocate() once; the pointers stay the same for the block's life.
class Staging {
 public:
  template <typename T>
  struct Array {
    size_t offset = 0;
  };

  template <typename T>
  Array<T> reserve(size_t count) {
    const Array<T> array{host_.size()};
    host_.resize((host_.size() + count * sizeof(T) + kAlign - 1) / kAlign * kAlign);
    return array;
  }
  void allocate(Backend& backend) {
    device_ = static_cast<std::byte*>(backend.allocate(host_.size()));
  }

  template <typename T>
  T* host(Array<T> array) {
    return reinterpret_cast<T*>(host_.data() + array.offset);
  }
  template <typename T>
  T* device(Array<T> array) const {
    return device_ == nullptr ? nullptr : reinterpret_cast<T*>(device_ + array.offset);
  }
  void upload(Backend& backend) const { backend.upload(device_, host_.data(), host_.size()); }
  void download(Backend& backend) { backend.download(host_.data(), device_, host_.size()); }
  size_t bytes() const { return host_.size(); }

 private:
  static constexpr size_t kAlign = 64;
  std::vector<std::byte> host_;
  std::byte* device_ = nullptr;
};

}  // namespace weir
