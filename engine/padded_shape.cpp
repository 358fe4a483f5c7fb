#include "engine/padded_shape.h"

#include <algorithm>
#include <bit>

namespace weir {
namespace {

int32_t round_up(int32_t value, int32_t to) { return (value + to - 1) / to * to; }

int32_t decode_rows(int32_t rows, const Limits& limits) {
  constexpr int32_t kSteps[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128};
  const auto* const step = std::ranges::lower_bound(kSteps, rows);
  const int32_t padded = step != std::end(kSteps) ? *step : round_up(rows, 64);
  return std::min({padded, limits.slots, limits.step_tokens});
}

// One more row at least, whose tokens fill the step up: to a multiple of 16 to 128, an eighth of a
// power of two, or to all that a step may have. As many outputs as rows, if they are enough.
StepShape mixed(const StepShape& shape, int32_t step_tokens) {
  const int32_t rows = round_up(shape.rows + 1, kStepPadding);
  const int32_t tokens = shape.tokens + rows - shape.rows;
  if (tokens > step_tokens) return shape;
  const int32_t part = std::max(16, int32_t(std::bit_floor(uint32_t(tokens)) / 8));
  const int32_t most = std::min(round_up(tokens, part), step_tokens);
  const int32_t outputs = std::max(rows, round_up(shape.outputs, kStepPadding));
  StepShape padded{rows, most, shape.outputs == 0 ? 0 : std::min(outputs, most)};
  if (shape.longer > kLongerMany) {
    padded.longer = rows;
    if (shape.singles == 0) padded.singles = 0;
  }
  return padded;
}

}  // namespace

StepShape shape_of(const StepBatch& batch) {
  StepShape shape{int32_t(batch.rows.size()), int32_t(batch.tokens.size()),
                  int32_t(batch.outputs.size())};
  if (shape.rows == shape.tokens) return shape;
  shape.singles = shape.longer = 0;
  for (int32_t r = 0; r < shape.rows; ++r) {
    if (batch.rows[size_t(r)].count == 1) {
      shape.singles = r + 1;
    } else {
      ++shape.longer;
    }
  }
  return shape;
}

StepShape padded_shape(const StepShape& shape, const Limits& limits) {
  if (shape.rows == 0) return shape;
  if (shape.rows == shape.tokens) {
    if (shape.rows != shape.outputs) return shape;
    const int32_t rows = decode_rows(shape.rows, limits);
    return {rows, rows, rows};
  }
  if (shape.rows == 1 || shape.tokens > kPaddedMost) return shape;
  return mixed(shape, limits.step_tokens);
}

}  // namespace weir
