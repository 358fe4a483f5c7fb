#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/pending.h"
#include "tests/ops/cuda_compare.h"

namespace weir {

// A ragged step: rows of several lengths, from a zero state and from a kept one, and padding.
struct Steps {
  std::vector<int32_t> slot, first, begin;
  bool known = false;  // the op is told how many rows have one token and how many more
  std::vector<int32_t> written;  // of rows whose writes are deferred

  int32_t tokens() const { return begin.back(); }
  int32_t slots() const { return *std::max_element(slot.begin(), slot.end()) + 1; }
  Rows put(Side& side) const {
    Rows rows{.count = int32_t(slot.size()), .tokens = tokens(), .slot = side.put(slot),
              .first = side.put(first), .begin = side.put(begin)};
    if (!written.empty()) rows.written = side.put(written);
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

// The rows as they stand after the step.
inline Steps after(const Steps& steps) {
  Steps next = steps;
  for (size_t r = 0; r < steps.slot.size(); ++r) {
    const int32_t tokens = steps.begin[r + 1] - steps.begin[r];
    next.first[r] += tokens;
    if (tokens != 1) next.written[r] = next.first[r];
  }
  return next;
}

// Before the step, 0 to 4 tokens of each row of one are not in its states yet; of others none.
inline Steps deferring(Steps steps) {
  for (size_t r = 0; r < steps.slot.size(); ++r) {
    const bool one = steps.begin[r + 1] - steps.begin[r] == 1;
    steps.written.push_back(std::max(0, steps.first[r] - (one ? int32_t(r / 3 % 5) : 0)));
  }
  return steps;
}

// What nobody may read of what waits becomes NaN: of each head the updates that do not wait, and
// without any the decay. `at`: where in a slot of `stride` floats it lies.
inline void poison_waiting(const Steps& steps, int32_t heads, const PendingLayout& layout,
                           int64_t stride, int64_t at, std::vector<float>& memory) {
  for (size_t r = 0; r < steps.slot.size(); ++r) {
    if (steps.slot[r] == kPadding) continue;
    float* waiting = memory.data() + steps.slot[r] * stride + at;
    for (int32_t h = 0; h < heads; ++h, waiting += layout.floats()) {
      const int32_t count = pending_updates(steps.first[r], steps.written[r], h);
      std::fill(waiting + (count > 0 ? layout.key_at(count) : 0), waiting + layout.floats(),
                std::numeric_limits<float>::quiet_NaN());
    }
  }
}
// What was in the slots of new sequences, `floats` of each `stride`.
inline void poison_fresh(const Steps& steps, int64_t floats, int64_t stride,
                         std::vector<float>& memory) {
  for (size_t r = 0; r < steps.slot.size(); ++r) {
    if (steps.slot[r] == kPadding || steps.first[r] > 0) continue;
    std::fill_n(memory.data() + steps.slot[r] * stride, floats,
                std::numeric_limits<float>::quiet_NaN());
  }
}

// Prompts among decoding sequences.
inline const std::vector<int32_t> kMixed = {150, 1, 0, 64, 33, 7, 1, 200, 65};

}  // namespace weir
