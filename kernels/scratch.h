#pragma once
#include <cstddef>
#include <memory>

#include "kernels/check.h"

namespace weir {

inline constexpr size_t kScratchAlign = 16;  // floats

// Memory of one claim of a thread, handed out piece by piece: on the stack up to kInline floats,
// on the heap for sizes beyond the usual ones.
template <size_t kInline>
class Scratch {
 public:
  explicit Scratch(size_t floats) : capacity_(floats) {
    if (floats <= kInline) return;
    heap_ = std::make_unique_for_overwrite<float[]>(floats);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* take(size_t floats) {
    float* const piece = (heap_ ? heap_.get() : inline_) + taken_;
    taken_ += (floats + kScratchAlign - 1) / kScratchAlign * kScratchAlign;
    WEIR_CHECK(taken_ <= capacity_);
    return piece;
  }

 private:
  size_t capacity_, taken_ = 0;
  std::unique_ptr<float[]> heap_;
  alignas(64) float inline_[kInline];
};

}  // namespace weir
