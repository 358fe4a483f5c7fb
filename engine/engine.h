#pragma once
#include <memory>

#include "engine/observer.h"
#include "engine/scheduler.h"
#include "engine/token_sink.h"

namespace weir {

// What computes a step: the Runner, or a model made for tests.
class StepRunner {
 public:
  virtual ~StepRunner() = default;
  // Answers batch.outputs one for one. Valid until the next call.
  virtual std::span<const Drawn> step(const StepBatch& batch) = 0;
  virtual size_t step_bytes() const = 0;  // the floor of the last step
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
  // The same for all of them, those that arrive later too.
  void cancel_all();

  static Nanoseconds now();    // the clock of Request::deadline

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir
