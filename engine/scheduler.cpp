#include "engine/scheduler.h"

#include <algorithm>
#include <optional>

#include "engine/logit_edits.h"
#include "kernels/check.h"

namespace weir {

struct Scheduler::Sequence {
  SequenceId id = 0;
  Request request;                 // its prompt has moved into `tokens`
  std::vector<Token> tokens;       // prompt, then what was drawn
  int32_t prompt_tokens = 0;
  int32_t done = 0;                // tokens that the state has read
  int64_t pages_needed = 0;
  Slot slot = -1;                  // taken at admission, as are the pages
  Nanoseconds started_at = kNever; // the moment of admission
  std::vector<int32_t> pages;
  LogitEdits edits;
  std::optional<Finish> finish;    // once set, it moves no more and goes at the next commit
  bool last_emitted = false;

  int32_t unread() const { return int32_t(tokens.size()) - done; }
  int32_t drawn() const { return int32_t(tokens.size()) - prompt_tokens; }
  bool stops_at(Token token) const {
    return std::ranges::find(request.stop, token) != request.stop.end();
  }
};

Scheduler::Scheduler(const Limits& limits) : limits_(limits) {
  WEIR_CHECK(limits.slots >= 1);
  WEIR_CHECK(limits.pages >= 0 && limits.page_tokens > 0);
  WEIR_CHECK(limits.step_tokens >= limits.slots);  // all that decode move in every step
  WEIR_CHECK(limits.chunk_tokens >= 1 && limits.chunk_tokens <= limits.step_tokens);
  WEIR_CHECK(limits.queued >= 0);
  WEIR_CHECK(limits.prompt_tokens >= 1 && limits.new_tokens >= 1 && limits.vocab >= 1);
  for (Slot slot = limits.slots; slot-- > 0;) free_slots_.push_back(slot);
  for (int32_t page = limits.pages; page-- > 0;) free_pages_.push_back(page);
  running_.reserve(size_t(limits.slots));
  batch_.rows.reserve(size_t(limits.slots));
  batch_.tokens.reserve(size_t(limits.step_tokens));
  batch_.outputs.reserve(size_t(limits.step_tokens));
}

Scheduler::~Scheduler() = default;

Admission Scheduler::submit(SequenceId id, Request request) {
  const Admission admission = check(request, limits_);
  if (admission != Admission::Accepted) return admission;
  const int64_t live_max = int64_t(limits_.slots) + limits_.queued;
  if (int64_t(sequences_.size()) >= live_max) return Admission::QueueFull;

  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  sequence->pages_needed = pages_for(request, limits_);
  sequence->prompt_tokens = int32_t(request.prompt.size());
  sequence->tokens = std::move(request.prompt);
  sequence->request = std::move(request);
  const auto later = [](int32_t priority, const Sequence* other) {
    return other->request.priority < priority;
  };
  const auto place = std::upper_bound(waiting_.begin(), waiting_.end(),
                                      sequence->request.priority, later);
  waiting_.insert(place, sequence.get());
  const bool fresh = sequences_.emplace(id, std::move(sequence)).second;
  WEIR_CHECK(fresh);
  return Admission::Accepted;
}

void Scheduler::cancel(SequenceId id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end() || found->second->finish) return;
  found->second->finish = Finish::Cancelled;
}

const StepBatch& Scheduler::next(Nanoseconds now) {
  WEIR_CHECK(!in_step_);
  in_step_ = true;
  expire(now);
  admit(now);
  clear_batch();
  // Decode rows first: a long prompt may slow its own start, never another's next token.
  for (Sequence* sequence : running_) {
    if (!sequence->finish && sequence->unread() == 1) add_row(*sequence, 1);
  }
  for (Sequence* sequence : running_) {
    const int32_t room = limits_.step_tokens - int32_t(batch_.tokens.size());
    const int32_t count = std::min({sequence->unread(), limits_.chunk_tokens, room});
    if (!sequence->finish && sequence->unread() > 1 && count > 0) add_row(*sequence, count);
  }
  return batch_;
}

void Scheduler::commit(std::span<const Drawn> drawn, std::vector<Emission>& out) {
  WEIR_CHECK(in_step_);
  WEIR_CHECK(drawn.size() == batch_.outputs.size());
  in_step_ = false;
  size_t output = 0;
  for (const Row& row : batch_.rows) {
    Sequence& sequence = *sequences_.at(row.id);
    sequence.done += row.count;
    Emission emission{.id = row.id, .started = true, .started_at = sequence.started_at};
    for (; output < drawn.size() && batch_.outputs[output].id == row.id; ++output) {
      if (!sequence.finish) take(sequence, output, drawn, emission);
    }
    // What was cancelled during the step says nothing but its end.
    emission.finish = sequence.finish;
    if (!emission.token && emission.prompt.empty() && !emission.finish) continue;
    sequence.last_emitted = emission.finish.has_value();
    out.push_back(std::move(emission));
  }
  WEIR_CHECK(output == drawn.size());

  const auto retire = [&](Sequence* sequence) {
    if (!sequence->finish) return false;
    if (!sequence->last_emitted) {
      out.push_back({.id = sequence->id, .finish = sequence->finish,
                     .started = sequence->slot >= 0, .started_at = sequence->started_at});
    }
    release(*sequence);
    sequences_.erase(sequence->id);
    return true;
  };
  std::erase_if(running_, retire);
  std::erase_if(waiting_, retire);
}

void Scheduler::expire(Nanoseconds now) {
  const auto end_late = [now](Sequence* sequence) {
    if (!sequence->finish && sequence->request.deadline <= now) {
      sequence->finish = Finish::Deadline;
    }
  };
  std::ranges::for_each(running_, end_late);
  std::ranges::for_each(waiting_, end_late);
}

void Scheduler::admit(Nanoseconds now) {
  auto place = waiting_.begin();
  while (place != waiting_.end() && !free_slots_.empty()) {
    Sequence& sequence = **place;
    if (sequence.finish) {
      ++place;
      continue;
    }
    // In order: were smaller requests to pass, one that needs many pages might wait for ever.
    if (sequence.pages_needed > int64_t(free_pages_.size())) return;
    sequence.slot = free_slots_.back();
    free_slots_.pop_back();
    sequence.started_at = now;
    const auto first = free_pages_.end() - sequence.pages_needed;
    sequence.pages.assign(first, free_pages_.end());
    free_pages_.erase(first, free_pages_.end());
    sequence.tokens.reserve(size_t(sequence.prompt_tokens) + size_t(sequence.request.new_tokens));
    sequence.edits = LogitEdits(sequence.request, sequence.tokens);
    running_.push_back(&sequence);
    place = waiting_.erase(place);
  }
}

void Scheduler::clear_batch() {
  for (Output& output : batch_.outputs) {
    if (output.edits.capacity() > 0) spare_edits_.push_back(std::move(output.edits));
  }
  batch_.rows.clear();
  batch_.tokens.clear();
  batch_.outputs.clear();
}

void Scheduler::add_row(Sequence& sequence, int32_t count) {
  const auto begin = int32_t(batch_.tokens.size());
  const int32_t first = sequence.done, end = first + count;
  batch_.rows.push_back({.id = sequence.id,
                         .slot = sequence.slot,
                         .first = first,
                         .count = count,
                         .begin = begin,
                         .pages = sequence.pages});
  const auto tokens = sequence.tokens.begin();
  batch_.tokens.insert(batch_.tokens.end(), tokens + first, tokens + end);
  if (sequence.request.prompt_logprobs) {
    const int32_t scored_end = std::min(end + 1, sequence.prompt_tokens);
    for (int32_t position = first + 1; position < scored_end; ++position) {
      batch_.outputs.push_back({.id = sequence.id,
                                .token = begin + position - 1 - first,
                                .position = position,
                                .target = sequence.tokens[size_t(position)],
                                .top = sequence.request.top_logprobs});
    }
  }
  if (count == sequence.unread()) add_draw(sequence, begin + count - 1);
}

void Scheduler::add_draw(const Sequence& sequence, int32_t token) {
  const Request& request = sequence.request;
  Output output{.id = sequence.id,
                .token = token,
                .position = int32_t(sequence.tokens.size()),
                .top = request.top_logprobs,
                .sampling = request.sampling};
  if (!spare_edits_.empty()) {
    output.edits = std::move(spare_edits_.back());
    spare_edits_.pop_back();
  }
  std::span<const Token> forbidden;
  if (sequence.drawn() < request.min_tokens) forbidden = request.stop;
  sequence.edits.list(forbidden, output.edits);
  batch_.outputs.push_back(std::move(output));
}

void Scheduler::take(Sequence& sequence, size_t output, std::span<const Drawn> drawn,
                     Emission& emission) {
  const Output& asked = batch_.outputs[output];
  const Drawn& answer = drawn[output];
  const Request& request = sequence.request;
  if (answer.token < 0) {
    sequence.finish = Finish::Error;
    return;
  }
  if (asked.target >= 0) {
    WEIR_CHECK(answer.token == asked.target);
    emission.prompt.push_back(
        {.position = asked.position, .logprob = answer.logprob, .top = answer.top});
    return;
  }
  WEIR_CHECK(answer.token < limits_.vocab);
  sequence.tokens.push_back(answer.token);
  sequence.edits.add_generated(answer.token);
  emission.token = answer.token;
  if (request.logprobs || request.top_logprobs > 0) emission.logprob = answer.logprob;
  emission.top = answer.top;
  if (sequence.stops_at(answer.token)) {
    sequence.finish = Finish::Stop;
  } else if (sequence.drawn() >= request.new_tokens) {
    sequence.finish = Finish::Length;
  }
}

void Scheduler::release(Sequence& sequence) {
  if (sequence.slot < 0) return;  // it never left the queue
  free_slots_.push_back(sequence.slot);
  free_pages_.insert(free_pages_.end(), sequence.pages.begin(), sequence.pages.end());
}

void Scheduler::check_invariants() const {
  std::vector<int32_t> slot_owners(size_t(limits_.slots), 0);
  std::vector<int32_t> page_owners(size_t(limits_.pages), 0);
  for (const Slot slot : free_slots_) ++slot_owners.at(size_t(slot));
  for (const int32_t page : free_pages_) ++page_owners.at(size_t(page));
  for (const Sequence* sequence : running_) {
    ++slot_owners.at(size_t(sequence->slot));
    for (const int32_t page : sequence->pages) ++page_owners.at(size_t(page));
    WEIR_CHECK(int64_t(sequence->pages.size()) == sequence->pages_needed);
    WEIR_CHECK(sequence->unread() >= 1);
  }
  for (const int32_t owners : slot_owners) WEIR_CHECK(owners == 1);
  for (const int32_t owners : page_owners) WEIR_CHECK(owners == 1);
  for (const Sequence* sequence : waiting_) {
    WEIR_CHECK(sequence->slot < 0 && sequence->pages.empty());
  }
  WEIR_CHECK(std::ranges::is_sorted(waiting_, std::ranges::greater{}, [](const Sequence* sequence) {
    return sequence->request.priority;
  }));
  WEIR_CHECK(sequences_.size() == waiting_.size() + running_.size());
}

}  // namespace weir
