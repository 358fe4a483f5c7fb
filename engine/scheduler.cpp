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
  int32_t pending = 0;             // draws that are out
  size_t last_draw = 0;            // the latest one's place among its step's outputs
  int32_t rows_out = 0;            // in steps that are out
  int32_t read = 0;                // tokens that the state has read, those of rows out included
  int64_t pages_needed = 0;
  Slot slot = -1;                  // taken at admission, as are the pages
  Nanoseconds started_at = kNever; // the moment of admission
  std::vector<int32_t> pages;
  std::vector<Slot> promised;      // for the snapshots that are not taken yet
  std::optional<Slot> starts_from; // until it has
  LogitEdits edits;
  std::optional<Finish> finish;    // once set, it gets no more rows and is told at the next commit
  bool told = false;               // its last emission is out

  int32_t known() const { return int32_t(tokens.size()); }
  int32_t unread() const { return known() + pending - read; }
  int32_t drawn() const { return known() - prompt_tokens; }
  int32_t asked() const { return drawn() + pending; }
  // Tokens that are to be read before the next snapshot is taken.
  int32_t before_snapshot() const {
    const size_t taken = request.snapshots.size() - promised.size();
    return promised.empty() ? INT32_MAX : request.snapshots[taken] - read;
  }
  // The last token to be drawn is never read.
  bool moves() const { return !finish && asked() < request.new_tokens; }
  bool stops_at(Token token) const {
    return std::ranges::find(request.stop, token) != request.stop.end();
  }
};

Scheduler::Scheduler(const Limits& limits)
    : limits_(limits), snapshots_(limits.slots, limits.snapshots) {
  WEIR_CHECK(limits.slots >= 1);
  WEIR_CHECK(limits.pages >= 0 && limits.page_tokens > 0);
  WEIR_CHECK(limits.step_tokens >= limits.slots);  // all that decode move in every step
  WEIR_CHECK(limits.chunk_tokens >= 1 && limits.chunk_tokens <= limits.step_tokens);
  WEIR_CHECK(limits.padding >= 0);
  WEIR_CHECK(limits.queued >= 0 && limits.snapshots >= 0);
  WEIR_CHECK(limits.prompt_tokens >= 1 && limits.new_tokens >= 1 && limits.vocab >= 1);
  for (Slot slot = limits.slots; slot-- > 0;) free_slots_.push_back(slot);
  for (int32_t page = limits.pages; page-- > 0;) free_pages_.push_back(page);
  running_.reserve(size_t(limits.slots));
  for (StepBatch& batch : batches_) {
    batch.rows.reserve(size_t(limits.slots));
    batch.tokens.reserve(size_t(limits.step_tokens));
    batch.outputs.reserve(size_t(limits.step_tokens));
  }
}

Scheduler::~Scheduler() = default;

Admission Scheduler::submit(SequenceId id, Request request) {
  const Admission admission = check(request, limits_);
  if (admission != Admission::Accepted) return admission;
  const Admission found = snapshots_.ledger().check(request);
  if (found != Admission::Accepted) return found;
  const int64_t live_max = int64_t(limits_.slots) + limits_.queued;
  if (int64_t(sequences_.size()) - told_ >= live_max) return Admission::QueueFull;

  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  sequence->pages_needed = pages_for(request, limits_);
  sequence->prompt_tokens = int32_t(request.prompt.size());
  sequence->tokens = std::move(request.prompt);
  for (size_t i = 0; i < request.snapshots.size(); ++i) {
    sequence->promised.push_back(snapshots_.promise());
  }
  if (request.start_from != kNoSnapshot) {
    sequence->read = int32_t(snapshots_.ledger().kept.at(request.start_from).size());
    sequence->starts_from = snapshots_.begin_reading(request.start_from);
  }
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
  WEIR_CHECK(out_ < kStepsOut);
  StepBatch& batch = batches_[(oldest_ + out_++) % kStepsOut];
  expire(now);
  admit(now);
  clear(batch);
  // Decode rows first: a long prompt may slow its own start, never another's next token.
  for (Sequence* sequence : running_) {
    if (sequence->moves() && sequence->unread() == 1) add_row(*sequence, 1, batch);
  }
  // A prompt by itself is not padded. Nor is a step that is nearly full of rows that decode:
  // prompts do not wait for padding's sake.
  int32_t most = limits_.step_tokens;
  const int32_t free = most - int32_t(batch.tokens.size());
  if (running_.size() > 1 && free > 2 * limits_.padding) most -= limits_.padding;
  for (Sequence* sequence : running_) {
    const int32_t room = most - int32_t(batch.tokens.size());
    int32_t count = std::min({sequence->unread(), limits_.chunk_tokens, room});
    count = std::min(count, sequence->before_snapshot());
    if (sequence->moves() && sequence->unread() > 1 && count > 0) add_row(*sequence, count, batch);
  }
  return batch;
}

void Scheduler::commit(std::span<const Drawn> drawn, std::vector<Emission>& out) {
  WEIR_CHECK(out_ > 0);
  const StepBatch& batch = batches_[oldest_];
  WEIR_CHECK(drawn.size() == batch.outputs.size());
  oldest_ = (oldest_ + 1) % kStepsOut;
  --out_;
  size_t output = 0;
  auto kept = batch.keeps.begin();
  for (const Row& row : batch.rows) {
    Sequence& sequence = *sequences_.at(row.id);
    --sequence.rows_out;
    const bool ended = sequence.finish.has_value();
    Emission emission{.id = row.id, .started = true, .started_at = sequence.started_at};
    for (; output < drawn.size() && batch.outputs[output].id == row.id; ++output) {
      const Output& asked = batch.outputs[output];
      if (asked.target < 0) --sequence.pending;
      if (!sequence.finish) take(sequence, asked, drawn[output], emission);
    }
    if (kept != batch.keeps.end() && kept->id == row.id) {
      keep(sequence, *kept++, !ended && sequence.finish != Finish::Error, emission);
    }
    if (sequence.told) continue;  // the row was in vain
    // What was cancelled during the step says nothing but its end.
    emission.finish = sequence.finish;
    if (!emission.token && emission.prompt.empty() && !emission.snapshot && !emission.finish) {
      continue;
    }
    sequence.told = emission.finish.has_value();
    out.push_back(std::move(emission));
  }
  WEIR_CHECK(output == drawn.size() && kept == batch.keeps.end());
  retire(out);
}

// Tells the ends that no row has told, and lets go of what no step that is out can touch.
void Scheduler::retire(std::vector<Emission>& out) {
  const auto leaves = [&](Sequence* sequence) {
    if (!sequence->finish) return false;
    if (!sequence->told) {
      out.push_back({.id = sequence->id, .finish = sequence->finish,
                     .started = sequence->slot >= 0, .started_at = sequence->started_at});
      sequence->told = true;
    }
    if (sequence->rows_out > 0) return false;
    release(*sequence);
    sequences_.erase(sequence->id);
    return true;
  };
  std::erase_if(running_, leaves);
  std::erase_if(waiting_, leaves);
  told_ = int32_t(std::ranges::count_if(running_, &Sequence::told));
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

void Scheduler::clear(StepBatch& batch) {
  for (Output& output : batch.outputs) {
    if (output.edits.capacity() > 0) spare_edits_.push_back(std::move(output.edits));
  }
  batch.starts.clear();
  batch.rows.clear();
  batch.tokens.clear();
  batch.outputs.clear();
  batch.keeps.clear();
}

void Scheduler::add_row(Sequence& sequence, int32_t count, StepBatch& batch) {
  const Row row{.id = sequence.id,
                .slot = sequence.slot,
                .first = sequence.read,
                .count = count,
                .begin = int32_t(batch.tokens.size()),
                .pages = sequence.pages};
  const int32_t end = row.first + count;
  batch.rows.push_back(row);
  const auto tokens = sequence.tokens.begin();
  const int32_t known = std::min(end, sequence.known());
  batch.tokens.insert(batch.tokens.end(), tokens + row.first, tokens + known);
  if (known < end) batch.tokens.push_back(drawn_for(sequence.last_draw));
  if (sequence.request.prompt_logprobs) add_scores(sequence, row, batch);
  if (count == sequence.unread()) add_draw(sequence, row.begin + count - 1, batch);
  sequence.read = end;
  ++sequence.rows_out;
  add_copies(sequence, batch);
}

// What the sequence's row, just added, starts from, and what it leaves.
void Scheduler::add_copies(Sequence& sequence, StepBatch& batch) {
  if (sequence.starts_from) {
    batch.starts.push_back({.id = sequence.id, .to = sequence.slot, .from = *sequence.starts_from,
                            .position = batch.rows.back().first});
    // Whoever writes the frozen slot next does so in a later step.
    snapshots_.end_reading(*sequence.starts_from);
    sequence.starts_from.reset();
  }
  if (sequence.before_snapshot() == 0) {
    batch.keeps.push_back({.id = sequence.id, .to = sequence.promised.back(),
                           .from = sequence.slot, .position = sequence.read});
    sequence.promised.pop_back();
  }
}

// A state is said to be kept only once the step that made it has been read and was right.
void Scheduler::keep(const Sequence& sequence, const SlotCopy& copy, bool valid,
                     Emission& emission) {
  if (!valid) return snapshots_.give_back(copy.to);
  const std::span<const Token> read(sequence.tokens.data(), size_t(copy.position));
  emission.snapshot = {.id = snapshots_.keep(copy.to, read), .position = copy.position};
}

// The row's tokens of the prompt each score the one after.
void Scheduler::add_scores(const Sequence& sequence, const Row& row, StepBatch& batch) {
  const int32_t end = std::min(row.first + row.count + 1, sequence.prompt_tokens);
  for (int32_t position = row.first + 1; position < end; ++position) {
    batch.outputs.push_back({.id = sequence.id,
                             .token = row.begin + position - 1 - row.first,
                             .position = position,
                             .target = sequence.tokens[size_t(position)],
                             .top = sequence.request.top_logprobs});
  }
}

void Scheduler::add_draw(Sequence& sequence, int32_t token, StepBatch& batch) {
  const Request& request = sequence.request;
  Output output{.id = sequence.id,
                .token = token,
                .position = sequence.known() + sequence.pending,
                .top = request.top_logprobs,
                .sampling = request.sampling,
                .counts_last = sequence.pending > 0 && sequence.edits.penalise()};
  if (!spare_edits_.empty()) {
    output.edits = std::move(spare_edits_.back());
    spare_edits_.pop_back();
  }
  std::span<const Token> forbidden;
  if (sequence.asked() < request.min_tokens) forbidden = request.stop;
  sequence.edits.list(forbidden, output.edits);
  sequence.last_draw = batch.outputs.size();
  ++sequence.pending;
  batch.outputs.push_back(std::move(output));
}

void Scheduler::take(Sequence& sequence, const Output& asked, const Drawn& answer,
                     Emission& emission) {
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
  for (const Slot promised : sequence.promised) snapshots_.give_back(promised);
  if (sequence.starts_from) snapshots_.end_reading(*sequence.starts_from);
  if (sequence.slot < 0) return;  // it never left the queue
  free_slots_.push_back(sequence.slot);
  free_pages_.insert(free_pages_.end(), sequence.pages.begin(), sequence.pages.end());
}

void Scheduler::check_invariants() const {
  std::vector<int32_t> slot_owners(size_t(limits_.slots), 0);
  std::vector<int32_t> page_owners(size_t(limits_.pages), 0);
  std::unordered_map<SequenceId, int32_t> rows_out;
  for (size_t i = 0; i < out_; ++i) {
    for (const Row& row : batches_[(oldest_ + i) % kStepsOut].rows) ++rows_out[row.id];
  }
  for (const Slot slot : free_slots_) ++slot_owners.at(size_t(slot));
  for (const int32_t page : free_pages_) ++page_owners.at(size_t(page));
  for (const Sequence* sequence : running_) {
    ++slot_owners.at(size_t(sequence->slot));
    for (const int32_t page : sequence->pages) ++page_owners.at(size_t(page));
    WEIR_CHECK(int64_t(sequence->pages.size()) == sequence->pages_needed);
    WEIR_CHECK(sequence->rows_out == rows_out[sequence->id]);
    WEIR_CHECK(sequence->told ? sequence->rows_out > 0 : sequence->unread() >= 1);
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
  check_snapshots();
}

void Scheduler::check_snapshots() const {
  std::vector<int32_t> owners(size_t(limits_.snapshots), 0);
  const auto count = [&](Slot slot) { ++owners.at(size_t(slot - limits_.slots)); };
  for (const Slot slot : snapshots_.at_rest()) count(slot);
  for (const auto& [id, sequence] : sequences_) {
    for (const Slot slot : sequence->promised) count(slot);
  }
  for (size_t i = 0; i < out_; ++i) {
    for (const SlotCopy& copy : batches_[(oldest_ + i) % kStepsOut].keeps) count(copy.to);
  }
  for (const int32_t owned : owners) WEIR_CHECK(owned == 1);
}

}  // namespace weir
