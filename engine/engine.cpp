#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/check.h"

namespace weir {

struct Engine::Impl {
  Impl(const Limits& limits, StepRunner& runner, Observer& observer)
      : limits(limits), runner(runner), observer(observer), scheduler(limits) {
    thread = std::thread([this] { run(); });
  }

  void run();
  bool wait_for_work();
  void read_inbox();
  void step();
  bool begin_step();
  bool finish_step();
  void count_rows(const StepBatch& batch, StepReport& report) const;
  void count_freed();
  void deliver();
  void report_occupancy();

  // A submission, a snapshot dropped, or, with neither, a cancel.
  struct Message {
    SequenceId id = 0;
    SnapshotId dropped = kNoSnapshot;
    std::optional<Request> request;
    TokenSink* sink = nullptr;
  };
  // What the engine keeps beside the scheduler about a sequence.
  struct Stream {
    TokenSink* sink = nullptr;
    int32_t prompt_tokens = 0;
  };
  // A step that the scheduler has handed out.
  struct Begun {
    bool computes = false;  // it has rows
    Nanoseconds at = 0;
    StepReport report;
  };

  // The engine thread's view of snapshots is the scheduler's; that of callers is `ledger`, in which
  // nothing is free that the scheduler still holds, or will once it has read the inbox.
  const Limits limits;

  std::mutex mutex;  // guards the block below
  std::condition_variable posted;
  std::vector<Message> inbox;
  int64_t live = 0;  // accepted, and the last emission not yet on its way
  SequenceId last_id = 0;
  SnapshotLedger ledger{.free = limits.snapshots, .kept = {}};
  bool cancelling_all = false;
  bool stopping = false;

  // The engine thread's own.
  StepRunner& runner;
  Observer& observer;
  Scheduler scheduler;
  std::unordered_map<SequenceId, Stream> streams;
  std::vector<Message> messages;
  std::vector<Emission> emissions;
  std::deque<Begun> begun;
  Nanoseconds last_finished = 0;
  StepReport untold;  // admitted and finished by steps without rows
  std::optional<Occupancy> reported;
  int64_t freed = 0;  // snapshots' slots, as the ledger knows of

  std::thread thread;
};

void Engine::Impl::run() {
  report_occupancy();
  while (wait_for_work()) {
    read_inbox();
    if (scheduler.idle()) {
      report_occupancy();  // late cancels and dropped snapshots alone are no work
    } else {
      step();
    }
  }
}

// False when the engine is to end. There is no timed wait: while the scheduler holds a sequence,
// each step moves or ends at least one, so an engine that sleeps has no deadline to miss. Nor is a
// step out then: one with rows holds sequences, and one without is finished at once.
bool Engine::Impl::wait_for_work() {
  if (!scheduler.idle()) return true;
  std::unique_lock lock(mutex);
  posted.wait(lock, [this] { return !inbox.empty() || stopping; });
  return !inbox.empty();
}

void Engine::Impl::read_inbox() {
  bool cancel_all = false;
  {
    const std::lock_guard lock(mutex);
    messages.swap(inbox);
    cancel_all = cancelling_all;
  }
  for (Message& message : messages) {
    if (message.dropped != kNoSnapshot) {
      scheduler.drop(message.dropped);
      continue;
    }
    if (!message.request) {
      scheduler.cancel(message.id);
      continue;
    }
    streams[message.id] = {message.sink, int32_t(message.request->prompt.size())};
    // submit() has checked the request, and counts at least what the scheduler holds.
    const Admission admission = scheduler.submit(message.id, std::move(*message.request));
    WEIR_CHECK(admission == Admission::Accepted);
  }
  messages.clear();
  count_freed();
  if (!cancel_all) return;
  for (const auto& [id, stream] : streams) scheduler.cancel(id);
}

// Begins a step, and finishes the oldest when the runner takes no more. With nothing to compute all
// that is out is finished: what has ended shall hear of it.
void Engine::Impl::step() {
  const bool computes = begin_step();
  const size_t most_out = computes ? runner.steps_out() - 1 : 0;
  bool ended = false;
  while (begun.size() > most_out) ended |= finish_step();
  WEIR_CHECK(computes || ended);
}

bool Engine::Impl::begin_step() {
  Begun step{.at = now()};
  const int32_t running_before = scheduler.running();
  const StepBatch& batch = scheduler.next(step.at);
  step.report.admitted = scheduler.running() - running_before;
  report_occupancy();
  step.computes = !batch.empty();
  step.report.restored = int32_t(batch.starts.size());
  step.report.kept = int32_t(batch.keeps.size());
  if (step.computes) {
    count_rows(batch, step.report);
    runner.begin(batch);
    step.report.bytes = runner.step_bytes();
  }
  begun.push_back(step);
  return step.computes;
}

// Whether a sequence left the scheduler.
bool Engine::Impl::finish_step() {
  const bool computes = begun.front().computes;
  StepReport report = begun.front().report;
  std::span<const Drawn> drawn;
  if (computes) {
    const Nanoseconds free = now();
    drawn = runner.finish();
    const Nanoseconds end = now();
    report.seconds = double(end - std::max(begun.front().at, last_finished)) * 1e-9;
    report.waited = double(end - free) * 1e-9;
    last_finished = end;
  }
  begun.pop_front();
  read_inbox();  // a cancel that came during the step ends its sequence with this commit
  const int32_t live = scheduler.running() + scheduler.waiting();
  const int32_t running = scheduler.running();
  emissions.clear();
  scheduler.commit(drawn, emissions);
  for (const Emission& emission : emissions) report.drawn += emission.token.has_value();
  report.finished = running - scheduler.running();
  const bool ended = scheduler.running() + scheduler.waiting() < live;
  count_freed();
  deliver();
  report_occupancy();
  // What began or ended without a computation is told with the next one.
  report.admitted += std::exchange(untold.admitted, 0);
  report.finished += std::exchange(untold.finished, 0);
  if (computes) {
    observer.on_step(report);
  } else {
    untold = report;
  }
  return ended;
}

void Engine::Impl::count_rows(const StepBatch& batch, StepReport& report) const {
  for (const Row& row : batch.rows) {
    const bool prompt = row.first < streams.at(row.id).prompt_tokens;
    report.zeroed += row.first == 0;
    ++(prompt ? report.prompt_rows : report.decode_rows);
    (prompt ? report.prompt_tokens : report.decode_tokens) += row.count;
  }
}

void Engine::Impl::count_freed() {
  const int64_t now_freed = scheduler.snapshots().freed();
  if (now_freed == freed) return;
  const std::lock_guard lock(mutex);
  ledger.free += int32_t(now_freed - std::exchange(freed, now_freed));
}

void Engine::Impl::deliver() {
  for (const Emission& emission : emissions) {
    const auto stream = streams.find(emission.id);
    WEIR_CHECK(stream != streams.end());
    TokenSink& sink = *stream->second.sink;
    if (emission.snapshot) {  // before the sink hears of it, which may use it at once
      const SnapshotId id = emission.snapshot->id;
      const std::lock_guard lock(mutex);
      ledger.kept[id] = scheduler.snapshots().ledger().kept.at(id);
    }
    if (emission.finish) {
      streams.erase(stream);
      // Before the sink hears of it: whoever does may submit the next request at once.
      const std::lock_guard lock(mutex);
      --live;
    }
    sink.emit(emission);
  }
}

void Engine::Impl::report_occupancy() {
  const Occupancy occupancy{.waiting = scheduler.waiting(),
                            .running = scheduler.running(),
                            .slots = limits.slots,
                            .free_slots = scheduler.free_slots(),
                            .pages = limits.pages,
                            .free_pages = scheduler.free_pages(),
                            .snapshots = limits.snapshots,
                            .free_snapshots = scheduler.snapshots().ledger().free};
  if (reported == occupancy) return;
  reported = occupancy;
  observer.on_occupancy(occupancy);
}

Engine::Engine(const Limits& limits, StepRunner& runner, Observer& observer)
    : impl_(std::make_unique<Impl>(limits, runner, observer)) {}

Engine::~Engine() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->cancelling_all = true;
    impl_->stopping = true;
  }
  impl_->posted.notify_one();
  impl_->thread.join();
}

Engine::Submitted Engine::submit(Request request, TokenSink& sink) {
  const Admission admission = check(request, impl_->limits);
  if (admission != Admission::Accepted) return {.admission = admission};
  SequenceId id = 0;
  {
    const std::lock_guard lock(impl_->mutex);
    const Admission found = impl_->ledger.check(request);
    if (found != Admission::Accepted) return {.admission = found};
    const int64_t live_max = int64_t(impl_->limits.slots) + impl_->limits.queued;
    if (impl_->live >= live_max) return {.admission = Admission::QueueFull};
    ++impl_->live;
    impl_->ledger.free -= int32_t(request.snapshots.size());
    id = ++impl_->last_id;
    impl_->inbox.push_back({.id = id, .request = std::move(request), .sink = &sink});
  }
  impl_->posted.notify_one();
  return {.admission = Admission::Accepted, .id = id};
}

void Engine::cancel(SequenceId id) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->inbox.push_back({.id = id});
  }
  impl_->posted.notify_one();
}

void Engine::drop(SnapshotId id) {
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->ledger.kept.erase(id) == 0) return;
    impl_->inbox.push_back({.dropped = id});
  }
  impl_->posted.notify_one();
}

void Engine::cancel_all() {
  const std::lock_guard lock(impl_->mutex);
  impl_->cancelling_all = true;
}

Nanoseconds Engine::now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

}  // namespace weir
