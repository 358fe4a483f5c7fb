#pragma once
#include "engine/limits.h"
#include "engine/lower.h"
#include "engine/scheduler.h"

namespace weir {

inline constexpr int32_t kLongerMany = 16;

StepShape shape_of(const StepBatch& batch);

// What a step's shape is padded to where the backend remembers programs, so that few shapes repeat:
// a step of one token a row to one of a few counts of rows; a step of several rows of which some
// have more tokens, up to kPaddedMost in all, to multiples of rows and tokens, and outputs to as
// many as rows. Of how many rows have several tokens only this is kept: that more than kLongerMany
// do, and whether all. A step is left as it is where limits.step_tokens has no room for that, and
// so is a prompt by itself.
StepShape padded_shape(const StepShape& shape, const Limits& limits);

}  // namespace weir
