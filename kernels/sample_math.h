#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/sample.h"
#include "kernels/uniform.h"

namespace weir {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A draw walks the tokens that are left from the most likely one on where a filter has put them in
// order, else by id: then nothing need be sorted.
inline bool draws_in_order(const Sampling& how) {
  return how.top_k > 0 || how.typical_p < 1 || how.top_p < 1;
}

inline float edited(float logit, const LogitEdit& edit, const Sampling& how) {
  if (edit.seen) {
    logit = logit > 0 ? logit / how.repetition_penalty : logit * how.repetition_penalty;
  }
  logit -= how.frequency_penalty * float(edit.generated);
  if (edit.generated > 0) logit -= how.presence_penalty;
  return logit + edit.bias;
}

// Calls use(edit) for each of a row's edits, the token that they do not know yet among them.
template <typename Use>
void for_each_edit(const Sample& op, int64_t row, const Use& use) {
  const int32_t at = op.counts == nullptr ? -1 : op.counts[row];
  const Token last = at < 0 ? -1 : op.read[at];
  bool counted = last < 0;
  for (int32_t e = op.edit_begin[row]; e < op.edit_begin[row + 1]; ++e) {
    LogitEdit edit = op.edits[e];
    if (edit.token == last) {
      ++edit.generated;
      edit.seen = counted = true;
    }
    use(edit);
  }
  if (!counted) use(LogitEdit{.token = last, .generated = 1, .seen = true});
}

// What a row answers when there is nothing to draw from, or until there is something better.
inline void answer_nothing(const Sample& op, int64_t row) {
  op.token[row] = -1;
  op.logprob[row] = 0;
  std::fill_n(op.top_token + row * Sample::kTop, Sample::kTop, -1);
  std::fill_n(op.top_logprob + row * Sample::kTop, Sample::kTop, -kInfinity);
}

}  // namespace weir
