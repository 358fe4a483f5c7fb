#include "engine/engine.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "tests/sim/engine_fakes.h"

namespace weir {
namespace {

Limits small_limits() {
  return {.slots = 1,
          .pages = 20,
          .page_tokens = 8,
          .step_tokens = 8,
          .chunk_tokens = 4,
          .queued = 2,
          .prompt_tokens = 40,
          .new_tokens = 100,
          .vocab = 50};
}

Request request_of(int32_t new_tokens) {
  return {.prompt = {3, 1, 4, 1, 5, 9}, .new_tokens = new_tokens};
}

std::vector<Token> tokens_alone(const Request& request) {
  std::vector<Token> tokens;
  for (const Drawn& drawn : HashModel::alone(request, small_limits()).tokens) {
    tokens.push_back(drawn.token);
  }
  return tokens;
}

TEST(Engine, StreamsWhatTheModelAnswers) {
  HashModel model(small_limits());
  RecordingObserver observer;
  Collector sink;
  Engine engine(small_limits(), model, observer);
  Request request = request_of(20);
  request.prompt_logprobs = true;
  const Engine::Submitted submitted = engine.submit(request, sink);
  EXPECT_EQ(submitted.admission, Admission::Accepted);
  EXPECT_NE(submitted.id, 0u);
  EXPECT_EQ(sink.wait(), Finish::Length);
  EXPECT_EQ(sink.tokens(), tokens_alone(request));
  EXPECT_EQ(sink.prompt_scores(), 5u);
}

// A bad request is the caller's to hear of, at once, even while a step is on the device.
TEST(Engine, RefusesBadRequestsOnTheCallersThread) {
  GatedModel model(small_limits());
  RecordingObserver observer;
  Collector running, refused;
  Engine engine(small_limits(), model, observer);
  engine.submit(request_of(1), running);
  model.wait_inside(1);
  EXPECT_EQ(engine.submit({}, refused).admission, Admission::EmptyPrompt);
  EXPECT_EQ(engine.submit(request_of(0), refused).admission, Admission::BadLength);
  EXPECT_EQ(engine.submit(request_of(0), refused).id, 0u);
  model.open();
  running.wait();
  EXPECT_FALSE(refused.finish());
}

// Submits one request more from inside the last emission: its own place must be free by then.
class Successor final : public TokenSink {
 public:
  Successor(Engine& engine, Collector& next) : engine_(engine), next_(next) {}
  void emit(const Emission& emission) override {
    if (emission.finish) admission = engine_.submit(request_of(1), next_).admission;
  }
  Admission admission = Admission::QueueFull;

 private:
  Engine& engine_;
  Collector& next_;
};

TEST(Engine, QueueIsFullAtSlotsPlusQueuedExactly) {
  GatedModel model(small_limits());
  RecordingObserver observer;
  Collector waiting[2], refused, next;
  Engine engine(small_limits(), model, observer);
  Successor first(engine, next);
  EXPECT_EQ(engine.submit(request_of(1), first).admission, Admission::Accepted);
  EXPECT_EQ(engine.submit(request_of(1), waiting[0]).admission, Admission::Accepted);
  EXPECT_EQ(engine.submit(request_of(1), waiting[1]).admission, Admission::Accepted);
  EXPECT_EQ(engine.submit(request_of(1), refused).admission, Admission::QueueFull);
  model.wait_inside(1);
  EXPECT_EQ(engine.submit(request_of(1), refused).admission, Admission::QueueFull);
  model.open();
  EXPECT_EQ(next.wait(), Finish::Length);
  EXPECT_EQ(first.admission, Admission::Accepted);
  EXPECT_EQ(waiting[1].wait(), Finish::Length);
}

// The step in flight when the cancel comes is the last, and its token is not told.
TEST(Engine, CancelEndsWithTheStepInFlight) {
  GatedModel model(small_limits());
  RecordingObserver observer;
  Collector sink, other;
  Engine engine(small_limits(), model, observer);
  const SequenceId id = engine.submit(request_of(50), sink).id;
  model.allow(2);        // the prompt takes two steps
  model.wait_inside(3);
  EXPECT_EQ(sink.tokens().size(), 1u);
  engine.cancel(id);
  model.allow(1);
  EXPECT_EQ(sink.wait(), Finish::Cancelled);
  EXPECT_EQ(sink.tokens().size(), 1u);
  observer.wait_for(0, 0);
  engine.cancel(id);     // late, and alone in the inbox
  model.open();
  engine.submit(request_of(1), other);
  EXPECT_EQ(other.wait(), Finish::Length);
}

TEST(Engine, TellsOccupancyWhenAQueuedRequestIsCancelled) {
  GatedModel model(small_limits());
  RecordingObserver observer;
  Collector running, queued;
  Engine engine(small_limits(), model, observer);
  observer.wait_for(0, 0);  // told before anything happens
  engine.submit(request_of(50), running);
  model.wait_inside(1);
  observer.wait_for(0, 1);  // told while the step is still on the device
  const SequenceId id = engine.submit(request_of(50), queued).id;
  model.allow(1);
  observer.wait_for(1, 1);
  model.wait_inside(2);
  engine.cancel(id);
  model.allow(1);
  EXPECT_EQ(queued.wait(), Finish::Cancelled);
  EXPECT_FALSE(queued.started());
  observer.wait_for(0, 1);
  EXPECT_EQ(observer.seen().front().free_pages, 20);
  model.open();
}

TEST(Engine, DeadlinesEndQueuedAndRunningRequests) {
  GatedModel model(small_limits());
  RecordingObserver observer;
  Collector running, queued, late;
  Engine engine(small_limits(), model, observer);
  Request request = request_of(50);
  constexpr Nanoseconds kSecond = 1'000'000'000;
  request.deadline = Engine::now() + kSecond;  // the first step begins long before
  engine.submit(request, running);
  engine.submit(request, queued);
  model.wait_inside(1);
  while (Engine::now() < request.deadline) std::this_thread::yield();
  model.open();
  EXPECT_EQ(running.wait(), Finish::Deadline);
  EXPECT_TRUE(running.started());
  EXPECT_EQ(queued.wait(), Finish::Deadline);
  EXPECT_FALSE(queued.started());
  // On an idle engine, with nothing else to wake it.
  observer.wait_for(0, 0);
  request.deadline = Engine::now() - 1;
  engine.submit(request, late);
  EXPECT_EQ(late.wait(), Finish::Deadline);
  EXPECT_FALSE(late.started());
}

// The same token for ever.
class MonotonousModel final : public StepRunner {
 public:
  void begin(const StepBatch& batch) override {
    drawn_.assign(batch.outputs.size(), {.token = 1});
  }
  std::span<const Drawn> finish() override { return drawn_; }
  size_t step_bytes() const override { return 0; }

 private:
  std::vector<Drawn> drawn_;
};

class SilentObserver final : public Observer {
 public:
  void on_step(const StepReport&) override {}
  void on_occupancy(const Occupancy&) override {}
};

TEST(Engine, DestructorCancelsWhatRunsAndWaits) {
  Limits limits = small_limits();
  limits.pages = 0;
  limits.new_tokens = 20'000'000;  // no answer ends by itself while the test lasts
  MonotonousModel model;
  SilentObserver observer;
  Collector sinks[3];
  {
    Engine engine(limits, model, observer);
    for (Collector& sink : sinks) engine.submit(request_of(limits.new_tokens), sink);
    sinks[0].wait_for_tokens(1);
  }
  for (Collector& sink : sinks) EXPECT_EQ(sink.finish(), Finish::Cancelled);
}

TEST(Engine, CancelAllHoldsForThoseThatComeLater) {
  GatedModel model(small_limits());
  RecordingObserver observer;
  Collector running, queued, later;
  Engine engine(small_limits(), model, observer);
  engine.submit(request_of(100), running);
  engine.submit(request_of(100), queued);
  model.wait_inside(1);
  engine.cancel_all();
  model.allow(1);
  EXPECT_EQ(running.wait(), Finish::Cancelled);
  EXPECT_EQ(queued.wait(), Finish::Cancelled);
  EXPECT_EQ(engine.submit(request_of(100), later).admission, Admission::Accepted);
  EXPECT_EQ(later.wait(), Finish::Cancelled);
  EXPECT_FALSE(later.started());
}

// A device that takes two steps never waits for the host between them; its cancels and its last
// steps are as prompt as those of one that takes one.
TEST(Engine, BeginsTheNextStepBeforeItHasReadTheLast) {
  GatedModel model(small_limits(), 2);
  RecordingObserver observer;
  Collector sink, next;
  Engine engine(small_limits(), model, observer);
  const SequenceId id = engine.submit(request_of(50), sink).id;
  model.wait_inside(1);
  EXPECT_EQ(model.begun(), 2);
  model.allow(2);        // the prompt takes two steps
  model.wait_inside(3);
  EXPECT_EQ(model.begun(), 4);
  EXPECT_EQ(sink.tokens().size(), 1u);
  engine.cancel(id);
  model.allow(1);
  EXPECT_EQ(sink.wait(), Finish::Cancelled);
  EXPECT_EQ(sink.tokens().size(), 1u);
  model.wait_inside(4);  // the row in vain still holds the only slot
  EXPECT_EQ(observer.seen().back().free_slots, 0);
  model.open();
  observer.wait_for(0, 0);
  engine.submit(request_of(3), next);
  EXPECT_EQ(next.wait(), Finish::Length);
  EXPECT_EQ(next.tokens(), tokens_alone(request_of(3)));
}

class StepsOut : public testing::TestWithParam<size_t> {};

TEST_P(StepsOut, ReportEveryTokenOnce) {
  HashModel model(small_limits(), GetParam());
  RecordingObserver observer;
  std::vector<Token> tokens;
  {
    Engine engine(small_limits(), model, observer);
    Collector sinks[3];
    for (Collector& sink : sinks) engine.submit(request_of(10), sink);
    for (Collector& sink : sinks) sink.wait();
    tokens = sinks[2].tokens();
  }
  EXPECT_EQ(tokens, tokens_alone(request_of(10)));
  const StepReport total = observer.total();
  EXPECT_EQ(total.prompt_tokens, 18);
  EXPECT_EQ(total.drawn, 30);
  EXPECT_EQ(total.decode_tokens, 27);  // the last token of each is never read
  EXPECT_EQ(total.admitted, 3);
  EXPECT_EQ(total.finished, 3);
  EXPECT_EQ(observer.seen().back().free_slots, 1);
}

INSTANTIATE_TEST_SUITE_P(Engine, StepsOut, testing::Values(1, 2));

}  // namespace
}  // namespace weir
