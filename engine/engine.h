#pragma once
#include <memory>

#include "engine/observer.h"
#include "engine/scheduler.h"
#include "engine/token_sink.h"

namespace weir {

// What computes steps: the Runner, or a model made for tests.
class StepRunner {
 public:
  virtual ~StepRunner() = default;
  // How many steps may be begun and not finished: 2 where the next one can be asked for while one
  // is computed, so that what the host does between two steps costs no time.
  virtual size_t steps_out() const { return 1; }
  // `batch` stays as it is until its finish(). Its tokens may be what the step before draws.
  virtual void begin(const StepBatch& batch) = 0;
  // Waits for the oldest step begun and answers its outputs one for one. Valid until the next call.
  virtual std::span<const Drawn> finish() = 0;
  virtual size_t step_bytes() const = 0;  // the floor of the step begun last

  std::span<const Drawn> step(const StepBatch& batch) {
    begin(batch);
    return finish();
  }
};

// One thread that turns requests into tokens: inbox -> Scheduler -> StepRunner -> sinks. Other
// threads post; no mutex exists but the inbox's. Runner and observer outlive the engine.
class Engine {
 public:
  Engine(const Limits& limits, StepRunner& runner, Observer& observer);
  ~Engine();  // cancels what runs and joins

  struct Submitted {
    Admission admission = Admission::Accepted;
    SequenceId id = 0;
  };
  // From any thread. When accepted, `sink` gets emissions until one carries `finish`, possibly
  // before this returns. QueueFull: slots + queued sequences are in the engine already.
  Submitted submit(Request request, TokenSink& sink);
  void cancel(SequenceId id);  // the last emission still comes
  // From any thread: lets go of a snapshot that an emission has told of. Requests that were
  // accepted to start from it do so. Unknown ids are fine.
  void drop(SnapshotId id);
  // The same for all of them, those that arrive later too.
  void cancel_all();

  static Nanoseconds now();    // the clock of Request::deadline

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir
