#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/ops/cuda_compare.h"

namespace weir {

// A ragged step: rows of several lengths, from a zero state and from a kept one, and padding.
struct Steps {
  std::vector<int32_t> slot, first, begin;

  int32_t tokens() const { return begin.back(); }
  int32_t slots() const { return *std::max_element(slot.begin(), slot.end()) + 1; }
  Rows put(Side& side) const {
    return {.count = int32_t(slot.size()), .tokens = tokens(), .slot = side.put(slot),
            .first = side.put(first), .begin = side.put(begin)};
  }
};
inline const Steps kDecode{{3, 0, kPadding, 5, 1}, {7, 0, 0, 100, 1}, {0, 1, 2, 3, 4, 5}};
inline const Steps kRagged{{2, kPadding, 4, 0, 1}, {5, 0, 0, 0, 12}, {0, 2, 5, 12, 13, 33}};
// As many tokens as rows, but not one each.
inline const Steps kUneven{{2, 5, kPadding, 4, 0}, {5, 3, 0, 0, 2}, {0, 3, 3, 3, 4, 5}};
// Prompts among decoding sequences.
inline const Steps kPrompts{{2, kPadding, 4, 0, 1}, {5, 0, 0, 0, 12}, {0, 290, 294, 327, 328, 330}};

}  // namespace weir
