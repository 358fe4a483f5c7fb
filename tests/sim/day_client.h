#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "tests/sim/day_snapshots.h"
#include "tests/sim/hash_model.h"

namespace weir {

// What days contained, so that a run can show that it was not empty.
struct DayCounts {
  int64_t steps = 0, tokens = 0, prompt_scores = 0;
  int64_t finishes[5] = {};    // by Finish
  int64_t admissions[12] = {};  // by Admission
  int64_t ended_in_queue = 0, cancelled_mid_step = 0, waited_for_pages = 0;
  int64_t ahead = 0;           // steps handed out before the one before was committed
  int64_t rows_in_vain = 0;    // rows of sequences that turned out to have ended
  int64_t kept = 0, kept_in_vain = 0, started_from = 0, dropped_before_start = 0;  // snapshots
};

// What the scheduler has handed out and the model computed: rows.
struct Moved {
  SequenceId id = 0;
  int32_t count = 0;     // tokens
  int32_t kept = 0;      // where its state was copied, if it was
};

// A request and what has become of it, as a reader of the policy would note it.
struct DayClient {
  Request request;
  HashModel::Answer expected;
  int32_t pages = 0;                     // that it needs
  Nanoseconds started_at = kNever;
  std::optional<Finish> cut;             // cancelled or late, whichever came first
  int32_t read = 0;                      // tokens that the model has read
  int32_t answered = 0;                  // of them, in steps that are committed
  int32_t rows_out = 0;                  // in steps that are not
  std::optional<Slot> slot;
  std::vector<int32_t> page_list;
  DaySnapshots::OfClient snapshots;
  size_t scores = 0, tokens = 0;         // got so far

  int32_t prompt() const { return int32_t(request.prompt.size()); }
  int32_t asked() const { return std::max(0, read - prompt() + 1); }  // draws
  int32_t unread() const { return prompt() + asked() - read; }
  bool moves() const { return !cut && asked() < request.new_tokens; }
};

}  // namespace weir
