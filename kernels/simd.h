#pragma once
#include <cstdint>

#include "kernels/simd_mixers.h"
#include "kernels/types.h"

namespace weir {

// Some rows of one matrix times all tokens: y[t][r] = W[r] x[t] [+ bias[r]] [+ y[t][r]].
struct LinearBlock {
  const void* weights = nullptr;  // [rows, in]; aligned to its element alone
  DType dtype = DType::F32;
  int32_t rows = 0, in = 0, tokens = 0;
  const float* bias = nullptr;    // [rows], or null
  bool accumulate = false;
  Acts x, y;                      // y begins at the block's first row
};

// The inner loops of the dense ops.
struct DenseSimd {
  // Matrix rows that linear() takes best at a time, for this many tokens.
  int32_t (*linear_rows)(int32_t tokens);
  void (*linear)(const LinearBlock& block);
  void (*widen)(const void* in, DType dtype, float* out, int32_t count);
  void (*rms_norm)(const float* in, const float* weight, float eps, float* out, int32_t dim);
  void (*swiglu)(const float* gate, const float* up, float* out, int32_t dim);
};

// All inner loops for one instruction set.
struct SimdTable {
  const char* name = nullptr;  // "AVX-512"
  const DenseSimd* dense = nullptr;
  const MixerSimd* mixers = nullptr;
};

// Level 0 portable, 1 AVX2, 2 AVX-512; null when this machine lacks it. -1: the best it has.
inline constexpr int kSimdLevels = 3;
const SimdTable* simd_table(int level);

// Each is defined in its own source, compiled for its instruction set.
namespace simd_portable { const SimdTable& table(); }
namespace simd_avx2 { const SimdTable& table(); }
namespace simd_avx512 { const SimdTable& table(); }

}  // namespace weir
