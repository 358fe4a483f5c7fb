#pragma once
#include <algorithm>
#include <cstdint>

namespace weir {

// Deferred writes. A token reads all of a head's state, decays it and adds one outer product; where
// each token writes the state back, that is half of a decode step's traffic. So up to kPendingMost
// outer products may wait beside the state, and what a head remembers is
//
//   S diag(decay) + sum_i value_i key_i'        i below the head's pending_updates(),
//
// S the matrix in the slot. A token multiplies `decay` and the keys that wait by its own decay,
// which is at most 1; then its update joins those that wait, or, when it is the head's turn, all is
// added to S and nothing waits any more. Turns go round by position and head, so that of a sequence
// with a multiple of four heads each step writes a fourth, wherever others are.
//
// How many wait follows from the sequence's position and from Rows::written: the tokens before that
// one are all in S. A row of several tokens leaves nothing waiting; before it, what waits has to be
// added (FlushPending).
inline constexpr int32_t kPendingMost = 3;

// Of a head, before the token at `position`.
constexpr int32_t pending_turn(int32_t position, int32_t head) {
  return int32_t((uint32_t(position) + uint32_t(head)) % uint32_t(kPendingMost + 1));
}
constexpr int32_t pending_updates(int32_t position, int32_t written, int32_t head) {
  const int32_t since = position - std::max(written, 1);  // position 0 writes: nothing was there
  return std::clamp(since, 0, pending_turn(position, head));
}
// Whether any head's may.
constexpr bool updates_wait(int32_t position, int32_t written) {
  return position > std::max(written, 1);
}
// Whether the token at `position` writes the head's state.
constexpr bool writes_state(int32_t position, int32_t head) {
  return position == 0 || pending_turn(position, head) == kPendingMost;
}

// What waits of a head, in floats: the decay, then key and value of each update. The matrix has
// `values` rows in `groups` of as many, each with a decay and keys of its own.
struct PendingLayout {
  int32_t values = 0, key_dim = 0, groups = 1;

  constexpr int32_t keys() const { return groups * key_dim; }
  constexpr int32_t update_floats() const { return keys() + values; }
  constexpr int32_t key_at(int32_t update) const { return keys() + update * update_floats(); }
  constexpr int32_t value_at(int32_t update) const { return key_at(update) + keys(); }
  constexpr int32_t floats() const { return key_at(kPendingMost); }
};

}  // namespace weir
