#pragma once
#include "kernels/types.h"

namespace weir {

// Cross-layer error routing (CLER, arXiv 2607.07953): what the write residuals u_1 .. u_n of lower
// layers, for the same token, add to a layer's values or to its answer. Per head, over dim:
//   r      = (u_1 + .. + u_n) / n        one source may be a mix that another op has made
//   r      = r / sqrt(mean(r^2) + eps)   when normalize
//   value  = v + gamma r
//   answer = gamma r
struct ValueRoute {
  int32_t tokens = 0, heads = 0, dim = 0;
  int32_t count = 0;               // n, at least 1
  Acts sources;                    // u_1: [tokens, heads * dim]
  int64_t source_stride = 0;       // floats from one source to the next
  bool normalize = false;
  float eps = 0;
  const float* gamma = nullptr;    // [heads * dim], or null:
  Acts gate;                       // gamma is one number a token and head: [tokens, heads]
  Acts v;                          // [tokens, heads * dim]; read for value alone
  Acts value, answer;              // [tokens, heads * dim], or null; value may be v
};

}  // namespace weir
