#pragma once
#include <cstdint>

namespace weir {

// Where the backend remembers programs, steps in which some sequences decode and prompts are read
// are padded to few shapes: rows to a multiple of kStepPadding, which Limits::padding then is.
// Not those of more than kPaddedMost tokens, which take far longer than their kernels' launches.
inline constexpr int32_t kStepPadding = 8, kPaddedMost = 1024;

// Every bound of the engine. Checked by Scheduler's constructor: see the relations beside the
// fields.
struct Limits {
  int32_t slots = 0;           // sequences that hold state at one time; >= 1
  int32_t snapshots = 0;       // further slots, for states kept inside prompts; >= 0
  int32_t pages = 0;           // KV pages; 0 for a model without growing attention
  int32_t page_tokens = 64;    // positions of a page; > 0
  int32_t step_tokens = 0;     // tokens of one step, all rows together; >= slots
  int32_t padding = 0;         // tokens of a step that prompts leave free for rows of padding; >= 0
  int32_t chunk_tokens = 0;    // prompt tokens of one row in one step; 1 .. step_tokens
  int32_t queued = 0;          // requests waiting for a slot; >= 0
  int32_t prompt_tokens = 0;   // longest prompt; >= 1
  int32_t new_tokens = 0;      // longest answer; >= 1
  int32_t vocab = 0;           // ids 0 .. vocab - 1; >= 1
};

}  // namespace weir
