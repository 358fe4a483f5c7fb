#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/ops/cuda_compare.h"

namespace weir {

// A ragged step: rows of several lengths, from a zero state and from a kept one, and padding.
struct Steps {
  std::vector<int32_t> slot, first, begin;
  bool known = false;  // the op is told how many rows have one token and how many more

  int32_t tokens() const { return begin.back(); }
  int32_t slots() const { return *std::max_element(slot.begin(), slot.end()) + 1; }
  Rows put(Side& side) const {
    Rows rows{.count = int32_t(slot.size()), .tokens = tokens(), .slot = side.put(slot),
              .first = side.put(first), .begin = side.put(begin)};
    if (known) rows.singles = rows.longer = 0;
    for (int32_t r = 0; known && r < rows.count; ++r) {
      const int32_t length = begin[size_t(r) + 1] - begin[size_t(r)];
      if (slot[size_t(r)] != kPadding && length == 1) rows.singles = r + 1;
      rows.longer += length > 1 ? 1 : 0;
    }
    return rows;
  }
};
inline const Steps kDecode{{3, 0, kPadding, 5, 1}, {7, 0, 0, 100, 1}, {0, 1, 2, 3, 4, 5}};
inline const Steps kRagged{{2, kPadding, 4, 0, 1}, {5, 0, 0, 0, 12}, {0, 2, 5, 12, 13, 33}};
// The same, of rows that delta_mix and swila_mix walk token by token: longer ones go in chunks.
inline const Steps kShort{{2, kPadding, 4, 0, 1}, {5, 0, 0, 0, 12}, {0, 2, 5, 12, 13, 21}};
// As many tokens as rows, but not one each.
inline const Steps kUneven{{2, 5, kPadding, 4, 0}, {5, 3, 0, 0, 2}, {0, 3, 3, 3, 4, 5}};
// Prompts among decoding sequences.
inline const Steps kPrompts{{2, kPadding, 4, 0, 1}, {5, 0, 0, 0, 12}, {0, 290, 294, 327, 328, 330}};

// Rows of the given lengths in slots of their own, every other one from a kept state; 0 stands for
// a padding row of three tokens.
inline Steps rows_of(const std::vector<int32_t>& lengths, bool known = false) {
  Steps steps{{}, {}, {0}, known};
  const auto count = int32_t(lengths.size());
  for (int32_t i = 0; i < count; ++i) {
    const bool padding = lengths[size_t(i)] == 0;
    steps.slot.push_back(padding ? kPadding : count - 1 - i);
    steps.first.push_back(i % 2 == 0 ? 9 + i : 0);  // every row of a convolution's ring
    steps.begin.push_back(steps.begin.back() + (padding ? 3 : lengths[size_t(i)]));
  }
  return steps;
}

// Prompts among decoding sequences.
inline const std::vector<int32_t> kMixed = {150, 1, 0, 64, 33, 7, 1, 200, 65};

}  // namespace weir
