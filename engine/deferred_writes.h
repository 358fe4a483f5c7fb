#pragma once
#include <span>
#include <vector>

#include "engine/limits.h"
#include "engine/model.h"
#include "engine/scheduler.h"
#include "engine/state_pool.h"
#include "kernels/backend.h"

namespace weir {

// Whether this backend defers the writes of this model's states in decode steps of so many slots:
// kernels/pending.h. Then every slot has room for what waits, waiting_bytes().
bool defers_writes(const ModelSpec& spec, int32_t slots, const Backend& backend);

// Takes the deferred writes out of a program that the backend would not run with them; whether they
// are left.
bool keep_deferred(Program& program, const Backend& backend);

// What is in each slot's states, as the steps begun so far leave them, and what waits beside them.
// Outlived by model and pool.
class DeferredWrites {
 public:
  DeferredWrites(const Model& model, const StatePool& pool, const Limits& limits);

  // A step of these rows is about to be begun, which defers the writes of rows of one token or
  // not: those read what waits, from others it has to be added before. Fills Rows::written for the
  // step, and for a flush() before it; whether that has anything to do.
  bool advance(std::span<const Row> rows, bool defers, int32_t* written, int32_t* flushed);
  // The pool's slot has been copied.
  void copy(const SlotCopy& copy) { written_[size_t(copy.to)] = written_[size_t(copy.from)]; }
  // What adds all that waits of these rows, of whose arrays slot, first and written are read. Valid
  // until the next call.
  const Program& flush(const Rows& rows);

 private:
  std::vector<int32_t> written_;  // of each slot: tokens before this position are in its states
  Program flush_;                 // a FlushPending for each op that defers its writes
};

}  // namespace weir
