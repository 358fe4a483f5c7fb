#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/limits.h"
#include "engine/spec.h"

namespace weir {

inline constexpr int32_t kSlotsByDefault = 64;

// What was asked for; 0 leaves slots, kv_pages and state_bytes to the arithmetic.
struct CapacityAsked {
  int32_t slots = 0, kv_pages = 0, kv_page_tokens = 64;
  size_t state_bytes = 0;
  int32_t step_tokens = 512, chunk_tokens = 256;
  int32_t queue = 256, prompt_tokens = 32768, new_tokens = 4096;
  bool strict = false;
};

// What the device has.
struct CapacityGiven {
  size_t free_bytes = 0;
  size_t weights_bytes = 0;
  double left_alone = 0.1;   // share of free_bytes that others, or the driver, need
  double for_states = 0.5;   // share of what then remains beside the weights, unless asked for
  int32_t step_padding = 0;  // Limits::padding of small steps
  bool defers_writes = false;  // of states: each slot has room for what waits
  // Bytes of workspace that these limits need.
  std::function<size_t(const Limits&)> workspace_bytes;
};

// How many sequences fit, worked out before anything is loaded.
struct Capacity {
  Limits limits;
  StateSize size;                  // of one sequence
  size_t state_budget = 0;         // for slots and pages
  size_t page_bytes = 0;
  size_t workspace_bytes = 0;
  std::vector<std::string> lines;  // the arithmetic, for people
};

// Clamps what does not fit and says so in `lines`; an error instead when strict, or when not even
// one sequence fits.
absl::StatusOr<Capacity> plan_capacity(const ModelSpec& spec, const CapacityAsked& asked,
                                       const CapacityGiven& given);

}  // namespace weir
