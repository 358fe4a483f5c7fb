#pragma once
#include "kernels/types.h"

namespace weir {

// Attention over depth (attention residuals): what a sub-layer reads is a mix of what was computed
// for the same token before it. For each token and each of `groups` runs of dim values:
//   score_s = query . source_s / sqrt(mean(source_s^2) + eps)   [+ last_bias, for the last source]
//   out     = sum over the sources s of softmax(score)_s source_s
// A gain of the norm belongs into the query: query . (x / rms(x) * gain) = (query * gain) . x /
// rms(x). One source is copied, exactly.
//
// Source s of token t lies at sources.at(t) + s * source_stride. Nothing is kept between steps.
struct DepthAttention {
  int32_t tokens = 0, groups = 1, dim = 0;
  float eps = 0;
  const float* query = nullptr;   // [groups * dim]; not read when there is one source
  int32_t count = 0;              // sources
  Acts sources;                   // of source 0: [tokens, groups * dim]
  int64_t source_stride = 0;      // floats from one source to the next
  Acts last_bias;                 // [tokens, groups], or null; a stride of 0: one for all tokens
  Acts out;                       // [tokens, groups * dim]; may be one of the sources
};

}  // namespace weir
