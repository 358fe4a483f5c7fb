#pragma once
#include <cstdint>
#include <cstring>

#include "kernels/types.h"

namespace weir {

// Internal linkage throughout: sources compiled for different instruction sets include this, and
// must not share one compiled copy.

static inline float widen_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

static inline float widen_f16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu;
  float value;
  if (exponent == 0) {  // zero and subnormals: fraction * 2^-24, exact in float32
    value = float(fraction) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  const uint32_t wide = exponent == 31 ? sign | 0x7f800000u | fraction << 13
                                       : sign | (exponent + 112) << 23 | fraction << 13;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Element `index` of an array that is aligned to nothing.
static inline float widen_at(const void* data, DType dtype, int64_t index) {
  const char* const at = static_cast<const char*>(data) + index * int64_t(size_of(dtype));
  if (dtype == DType::F32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return dtype == DType::BF16 ? widen_bf16(bits) : widen_f16(bits);
}

}  // namespace weir
