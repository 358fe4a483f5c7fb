#pragma once
#include "kernels/types.h"

namespace weir {

// out[t] = table[id], widened to float32. id is ids[t]; where that is below 0, it is what the step
// before has drawn for its output ~ids[t], or 0 if that is no token: then nobody reads the answer.
struct Embed {
  int32_t tokens = 0;
  const Token* ids = nullptr;    // [tokens]
  const Token* drawn = nullptr;  // of the step before; null: no id is below 0
  Token* read = nullptr;         // [tokens], null unless wanted: each id as it was read
  Matrix table;                  // [vocab, dim]
  Acts out;                      // [tokens, dim]
};

}  // namespace weir
