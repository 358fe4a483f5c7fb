#include "kernels/simd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace weir {
namespace {

#if defined(__x86_64__)
// clang 14 does not know "f16c" as a feature to ask for.
bool supports_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

bool supported(int level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (level) {
    case 0: return true;
    case 1:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && supports_f16c();
    case 2:
      return supported(1) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    default: return false;
  }
#else
  return level == 0;
#endif
}

}  // namespace

const SimdTable* simd_table(int level) {
  if (level < 0) {
    level = kSimdLevels - 1;
    while (!supported(level)) --level;
  }
  if (!supported(level)) return nullptr;
  switch (level) {
    case 2: return &simd_avx512::table();
    case 1: return &simd_avx2::table();
    default: return &simd_portable::table();
  }
}

}  // namespace weir
