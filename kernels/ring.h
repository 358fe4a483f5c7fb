#pragma once
#include <cstdint>

namespace weir {

// The history of a short convolution, its last `kept` = width - 1 inputs, is a ring by position:
// the input of a sequence's position p lies in row p mod kept, so that a token writes one row, that
// of the oldest input. A step's row that begins at position 0 writes all of them, zeros where it
// has no token: what lies before a sequence is then zero also when it is read.

// The row of a position, which may be as far as `kept` before a sequence; kept > 0.
constexpr int32_t ring_row(int32_t position, int32_t kept) {
  return int32_t(uint32_t(position + kept) % uint32_t(kept));
}

// That of the oldest input, which the next one will replace; 0 where none are kept.
constexpr int32_t oldest_ring_row(int32_t next, int32_t width) {
  return width > 1 ? ring_row(next, width - 1) : 0;
}

// Rows in the order of their age, from the oldest on: i < kept.
constexpr int32_t ring_row_of_age(int32_t oldest, int32_t i, int32_t kept) {
  const int32_t row = oldest + i;
  return row < kept ? row : row - kept;
}

}  // namespace weir
