#define WEIR_SIMD simd_avx512
#include "kernels/simd.h"
#include "kernels/simd_vector.inc"
#include "kernels/simd_kernels.inc"
#include "kernels/simd_mixers.inc"

namespace weir::WEIR_SIMD {

const SimdTable& table() {
  static const SimdTable table{
      .name = "AVX-512", .dense = &dense_table(), .mixers = &mixer_table()};
  return table;
}

}  // namespace weir::WEIR_SIMD
