#pragma once
#include "kernels/types.h"

namespace weir {

// Chooses memories for every token (Mixture-of-Memories, Du et al. 2025, arXiv 2502.13685): those
// with the `chosen` largest logits, the earlier one of equals first, weighed by a softmax over
// them. A memory sees the tokens routed to it as a sequence of its own, so the pairs of a memory
// and a token are listed by memory, row and token: what a memory's share of each row is, is then
// again a row of a step (see Rows), and any mixer can run on it. A memory that gets none of a row's
// tokens has an empty row there, which touches nothing.
struct MemoryRoute {
  Rows rows;
  int32_t memories = 0, chosen = 0;  // chosen <= memories
  Acts logits;                       // [tokens, memories]
  SlotState seen;                    // [memories] int32: tokens that each memory has had so far

  // There are tokens * chosen pairs; those of padding rows are left out, and the last entries of
  // the list then are some token. Everything below is written.
  int32_t* token = nullptr;          // [pairs]: the pair's token
  int32_t* memory_begin = nullptr;   // [memories + 1]: where each memory's pairs begin
  int32_t* row_begin = nullptr;      // [memories, rows + 1]: where each of its rows begins
  int32_t* row_first = nullptr;      // [memories, rows]: tokens the memory had before; 0: none
  int32_t* pair = nullptr;           // [tokens, chosen]: where the token's pairs are
  Acts weight;                       // [tokens, chosen]
};

}  // namespace weir
