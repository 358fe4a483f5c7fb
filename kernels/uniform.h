#pragma once
#include <cstdint>

namespace weir {

// Uniform in [0, 1): 53 bits of a mix of seed and position, by the finaliser of splitmix64. The
// same on every device.
constexpr double uniform(uint64_t seed, int32_t position) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  };
  const uint64_t bits = mix(mix(seed + 0x9E3779B97F4A7C15ull) +
                            uint64_t(uint32_t(position)) * 0xD1342543DE82EF95ull);
  return double(bits >> 11) * 0x1.0p-53;
}

}  // namespace weir
