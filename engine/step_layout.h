#pragma once
#include <algorithm>

#include "engine/lower.h"
#include "engine/staging.h"

// One upload before a step and one download after it: what lies where in them.
namespace weir {

// Page table entries that a row may need.
inline int32_t pages_per_row(const Limits& limits) {
  const int64_t longest = int64_t(limits.prompt_tokens) + limits.new_tokens;
  const int64_t pages = (longest + limits.page_tokens - 1) / limits.page_tokens;
  return int32_t(std::min<int64_t>(pages, limits.pages));
}

inline StepShape largest_step(const Limits& limits) {
  return {limits.slots + kStepPadding, limits.step_tokens, limits.step_tokens};
}

// Where what a step reads lies: its rows, tokens, and how to draw. As small as the shape allows.
struct StepInputs {
  StepInputs(const StepShape& shape, int32_t pages) : pages(pages) {
    const auto rows = size_t(shape.rows), tokens = size_t(shape.tokens);
    const auto outputs = size_t(shape.outputs);
    ids = layout.reserve<Token>(tokens);
    slot = layout.reserve<int32_t>(rows);
    first = layout.reserve<int32_t>(rows);
    begin = layout.reserve<int32_t>(rows + 1);
    written = layout.reserve<int32_t>(rows);
    flushed = layout.reserve<int32_t>(rows);
    page_table = layout.reserve<int32_t>(rows * size_t(pages));
    output_token = layout.reserve<int32_t>(outputs);
    sampling = layout.reserve<Sampling>(outputs);
    position = layout.reserve<int32_t>(outputs);
    target = layout.reserve<Token>(outputs);
    top = layout.reserve<int32_t>(outputs);
    counts = layout.reserve<int32_t>(outputs);
    edit_begin = layout.reserve<int32_t>(outputs + 1);
  }

  int32_t pages = 0;  // page table entries a row
  Layout layout;
  Layout::Array<Token> ids, target;
  Layout::Array<int32_t> slot, first, begin, page_table, output_token, position, top, counts,
      edit_begin;
  // Rows::written of the step, and of what is to be added to states before it.
  Layout::Array<int32_t> written, flushed;
  Layout::Array<Sampling> sampling;
};

// Where what a step answers lies. The tokens come first, in the same place for every shape: there
// the next step finds them.
struct StepOutputs {
  explicit StepOutputs(int32_t count) {
    const auto outputs = size_t(count);
    token = layout.reserve<Token>(outputs);
    logprob = layout.reserve<float>(outputs);
    without_top = layout.bytes();
    top_token = layout.reserve<Token>(outputs * Sample::kTop);
    top_logprob = layout.reserve<float>(outputs * Sample::kTop);
  }

  Layout layout;
  size_t without_top = 0;  // bytes
  Layout::Array<Token> token, top_token;
  Layout::Array<float> logprob, top_logprob;
};

}  // namespace weir
