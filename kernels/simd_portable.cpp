#define WEIR_SIMD simd_portable
#include "kernels/simd.h"
#include "kernels/simd_vector.inc"
#include "kernels/simd_kernels.inc"
#include "kernels/simd_mixers.inc"

namespace weir::WEIR_SIMD {

const SimdTable& table() {
  static const SimdTable table{
      .name = "portable", .dense = &dense_table(), .mixers = &mixer_table()};
  return table;
}

}  // namespace weir::WEIR_SIMD
