#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/limits.h"
#include "engine/request.h"
#include "engine/snapshots.h"

namespace weir {

// One sequence's part of a step: `count` tokens from position `first` on.
struct Row {
  SequenceId id = 0;
  Slot slot = 0;
  int32_t first = 0;              // 0 starts from a zero state
  int32_t count = 0;
  int32_t begin = 0;              // its first token in StepBatch::tokens
  std::span<const int32_t> pages; // KV pages in order of position; valid until commit
};

// A position whose logits are wanted: to draw the next token, or to score a known one.
struct Output {
  SequenceId id = 0;
  int32_t token = 0;              // index in StepBatch::tokens of the last token read
  int32_t position = 0;           // of the token drawn or scored
  Token target = -1;              // >= 0: score this token instead of drawing
  int32_t top = 0;                // alternatives wanted
  Sampling sampling;
  std::vector<LogitEdit> edits;
  bool counts_last = false;       // the edits do not know `token` yet: it counts as generated
};

// A token that nobody on the host knows yet: what the step before draws for this output of its.
constexpr Token drawn_for(size_t output) { return ~Token(output); }

// A sequence's state to be copied, to where it starts or to where it is kept.
struct SlotCopy {
  SequenceId id = 0;
  Slot to = 0, from = 0;
  int32_t position = 0;           // how many tokens the state has read
};

struct StepBatch {
  std::vector<SlotCopy> starts;   // to be copied before the step is computed
  std::vector<Row> rows;          // decode rows first, then prompt chunks
  std::vector<Token> tokens;      // the rows' tokens, end to end; below 0: drawn_for() an output
  std::vector<Output> outputs;    // in the order of tokens
  std::vector<SlotCopy> keeps;    // to be copied after it; in the order of rows, one a row at most
  bool empty() const { return rows.empty(); }
};

// What came out of a step for each Output.
struct Drawn {
  Token token = -1;               // the token drawn or scored; -1: no finite logit
  float logprob = 0;
  std::vector<TokenScore> top;
};

// Decides what the next step computes. No clock, thread, device or I/O: the same calls always
// give the same batches, so a whole server's day can be replayed in a test.
//
// A sequence is admitted only with a slot and all the KV pages it can ever need, so nothing that
// runs ever waits for memory and nothing is preempted. A row with one unread token decodes, a row
// with more is a chunk of prompt: there are no modes. Every running sequence that decodes moves in
// every step; prompts share what is left of step_tokens and Limits::padding, at most chunk_tokens
// each, in order of admission. No chunk crosses a position whose state is to be kept.
//
// A step may be handed out before the one before it is committed, so that a device need not wait
// for its host. A row that decodes then reads a token that is not known yet. Should its sequence
// turn out to have ended, the row was in vain: its answer is dropped, and the sequence, told its
// end already, keeps slot and pages until that step is committed too. Ends by length are known
// beforehand and waste nothing.
class Scheduler {
 public:
  static constexpr size_t kStepsOut = 2;  // steps handed out and not committed, at most

  explicit Scheduler(const Limits& limits);
  ~Scheduler();

  // QueueFull: slots + queued sequences are here already.
  Admission submit(SequenceId id, Request request);  // ids are never used twice
  // Its owner no longer wants it. Sequences that start from it still do.
  void drop(SnapshotId id) { snapshots_.drop(id); }
  void cancel(SequenceId id);                        // unknown ids are late cancels, and fine

  // The next step; empty when there is nothing to compute (cancelled and expired sequences are
  // still ended by the commit). For each next() there is one commit(), in the same order; what
  // next() returned stays as it is until then.
  const StepBatch& next(Nanoseconds now);
  // `drawn` answers the outputs of the oldest step that is out, one for one.
  void commit(std::span<const Drawn> drawn, std::vector<Emission>& out);

  bool idle() const { return sequences_.empty(); }
  int32_t waiting() const { return int32_t(waiting_.size()); }
  int32_t running() const { return int32_t(running_.size()); }  // that hold a slot
  int32_t free_slots() const { return int32_t(free_slots_.size()); }
  int32_t free_pages() const { return int32_t(free_pages_.size()); }
  const Snapshots& snapshots() const { return snapshots_; }
  void check_invariants() const;

 private:
  struct Sequence;

  void expire(Nanoseconds now);
  void admit(Nanoseconds now);
  void clear(StepBatch& batch);
  void add_row(Sequence& sequence, int32_t count, StepBatch& batch);
  void add_scores(const Sequence& sequence, const Row& row, StepBatch& batch);
  void add_draw(Sequence& sequence, int32_t token, StepBatch& batch);
  void add_copies(Sequence& sequence, StepBatch& batch);
  void keep(const Sequence& sequence, const SlotCopy& copy, bool valid, Emission& emission);
  void take(Sequence& sequence, const Output& asked, const Drawn& answer, Emission& emission);
  void retire(std::vector<Emission>& out);
  void release(Sequence& sequence);
  void check_snapshots() const;

  const Limits limits_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::deque<Sequence*> waiting_;    // by priority, then arrival
  std::vector<Sequence*> running_;   // in order of admission; also those told, with a row out
  int32_t told_ = 0;                 // of them
  std::vector<Slot> free_slots_;
  std::vector<int32_t> free_pages_;
  Snapshots snapshots_;
  std::array<StepBatch, kStepsOut> batches_;  // in turn
  size_t oldest_ = 0, out_ = 0;      // the oldest that is out, and how many are
  std::vector<std::vector<LogitEdit>> spare_edits_;  // of earlier outputs, for their memory
};

}  // namespace weir
