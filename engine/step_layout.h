#pragma once
#include "engine/lower.h"
#include "engine/staging.h"

// One upload before a step and one download after it: what lies where in them.
namespace weir {

// Where what a step reads lies: its rows, tokens, and how to draw. As small as the shape allows.
struct StepInputs {
  StepInputs(const StepShape& shape, int32_t pages) : pages(pages) {
    const auto rows = size_t(shape.rows), tokens = size_t(shape.tokens);
    const auto outputs = size_t(shape.outputs);
    ids = layout.reserve<Token>(tokens);
    slot = layout.reserve<int32_t>(rows);
    first = layout.reserve<int32_t>(rows);
    begin = layout.reserve<int32_t>(rows + 1);
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
