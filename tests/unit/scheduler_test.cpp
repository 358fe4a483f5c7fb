#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace weir {
namespace {

Limits small_limits() {
  return {.slots = 2,
          .page_tokens = 4,
          .step_tokens = 8,
          .chunk_tokens = 4,
          .queued = 2,
          .prompt_tokens = 20,
          .new_tokens = 10,
          .vocab = 100};
}

Request request_of(size_t prompt, int32_t new_tokens) {
  Request request{.new_tokens = new_tokens};
  for (size_t i = 0; i < prompt; ++i) request.prompt.push_back(Token(i) + 1);
  return request;
}

// Answers each output of the oldest step with its target, or with `token`.
std::vector<Emission> commit(Scheduler& scheduler, const StepBatch& batch, Token token) {
  std::vector<Drawn> drawn;
  for (const Output& output : batch.outputs) {
    drawn.push_back({.token = output.target >= 0 ? output.target : token, .logprob = -1});
  }
  std::vector<Emission> out;
  scheduler.commit(drawn, out);
  scheduler.check_invariants();
  return out;
}

std::map<Token, LogitEdit> edits_of(const Output& output) {
  std::map<Token, LogitEdit> edits;
  for (const LogitEdit& edit : output.edits) {
    EXPECT_TRUE(edits.emplace(edit.token, edit).second) << "token " << edit.token << " twice";
  }
  return edits;
}

TEST(Check, RefusesWhatCanNeverBeServed) {
  Limits limits = small_limits();
  limits.pages = 3;
  const auto answer = [&](auto change) {
    Request request = request_of(3, 2);
    change(request);
    return check(request, limits);
  };
  EXPECT_EQ(answer([](Request&) {}), Admission::Accepted);
  EXPECT_EQ(answer([](Request& r) { r.prompt.clear(); }), Admission::EmptyPrompt);
  EXPECT_EQ(answer([](Request& r) { r.prompt.resize(21); }), Admission::PromptTooLong);
  EXPECT_EQ(answer([](Request& r) { r.prompt[1] = 100; }), Admission::BadToken);
  EXPECT_EQ(answer([](Request& r) { r.prompt[1] = -1; }), Admission::BadToken);
  EXPECT_EQ(answer([](Request& r) { r.stop = {100}; }), Admission::BadToken);
  EXPECT_EQ(answer([](Request& r) { r.logit_bias = {{-1, 0.f}}; }), Admission::BadToken);
  EXPECT_EQ(answer([](Request& r) { r.new_tokens = 0; }), Admission::BadLength);
  EXPECT_EQ(answer([](Request& r) { r.new_tokens = 11; }), Admission::BadLength);
  EXPECT_EQ(answer([](Request& r) { r.min_tokens = 3; }), Admission::BadLength);
  EXPECT_EQ(answer([](Request& r) { r.min_tokens = -1; }), Admission::BadLength);
}

TEST(Check, RefusesNumbersThatAreNotFiniteOrOutOfRange) {
  const auto answer = [&](auto change) {
    Request request = request_of(3, 2);
    change(request.sampling);
    return check(request, small_limits());
  };
  using S = Sampling;
  EXPECT_EQ(answer([](S& s) { s.temperature = NAN; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.temperature = -0.5f; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.temperature = INFINITY; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.top_k = -1; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.top_k = 101; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.top_p = 0; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.top_p = NAN; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.min_p = 1.5f; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.typical_p = 1.5f; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.repetition_penalty = 0; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.frequency_penalty = NAN; }), Admission::BadSampling);
  EXPECT_EQ(answer([](S& s) { s.presence_penalty = INFINITY; }), Admission::BadSampling);

  const auto bias = [](float value) {
    Request request = request_of(3, 2);
    request.logit_bias = {{1, value}};
    return check(request, small_limits());
  };
  EXPECT_EQ(bias(-INFINITY), Admission::Accepted);
  EXPECT_EQ(bias(INFINITY), Admission::BadSampling);
  EXPECT_EQ(bias(NAN), Admission::BadSampling);
  Request request = request_of(3, 2);
  request.top_logprobs = Sample::kTop + 1;
  EXPECT_EQ(check(request, small_limits()), Admission::BadSampling);
}

// The last token drawn is never read, so a request that fills its pages to the brim still fits.
TEST(Check, CountsPagesToTheLastTokenRead) {
  Limits limits = small_limits();
  limits.pages = 2;
  EXPECT_EQ(check(request_of(5, 4), limits), Admission::Accepted);
  EXPECT_EQ(check(request_of(5, 5), limits), Admission::TooManyPages);
  EXPECT_EQ(pages_for(request_of(5, 4), limits), 2);
}

TEST(Scheduler, MixesDecodeWithChunksWithinTheBudget) {
  Limits limits = small_limits();
  limits.step_tokens = 4;
  limits.chunk_tokens = 3;
  Scheduler scheduler(limits);
  ASSERT_EQ(scheduler.submit(1, request_of(1, 5)), Admission::Accepted);
  ASSERT_EQ(scheduler.submit(2, request_of(8, 5)), Admission::Accepted);
  const StepBatch& batch = scheduler.next(0);
  ASSERT_EQ(batch.rows.size(), 2u);
  EXPECT_EQ(batch.rows[0].count, 1);
  EXPECT_EQ(batch.rows[1].count, 3);
  EXPECT_EQ(batch.tokens, (std::vector<Token>{1, 1, 2, 3}));
  ASSERT_EQ(batch.outputs.size(), 1u);
  EXPECT_EQ(batch.outputs[0].id, 1u);
  EXPECT_EQ(batch.outputs[0].position, 1);
  commit(scheduler, batch, 7);
  const StepBatch& second = scheduler.next(0);
  EXPECT_EQ(second.tokens, (std::vector<Token>{7, 4, 5, 6}));
  EXPECT_EQ(second.rows[1].first, 3);
  commit(scheduler, second, 7);
}

// A prompt read in chunks has its scores spread over steps; a chunk's last token scores the first
// of the next.
TEST(Scheduler, ScoresPromptsAcrossChunks) {
  Scheduler scheduler(small_limits());
  Request request = request_of(6, 1);
  request.prompt_logprobs = true;
  request.top_logprobs = 2;
  scheduler.submit(1, request);
  const StepBatch& first = scheduler.next(0);
  ASSERT_EQ(first.outputs.size(), 4u);
  EXPECT_EQ(first.outputs[3].target, 5);
  EXPECT_EQ(first.outputs[3].position, 4);
  EXPECT_EQ(first.outputs[3].top, 2);
  std::vector<Emission> out = commit(scheduler, first, 9);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].prompt.size(), 4u);
  EXPECT_FALSE(out[0].token);
  const StepBatch& second = scheduler.next(0);
  ASSERT_EQ(second.outputs.size(), 2u);
  EXPECT_EQ(second.outputs[0].target, 6);
  EXPECT_EQ(second.outputs[1].target, -1);
  out = commit(scheduler, second, 9);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].prompt.at(0).position, 5);
  EXPECT_EQ(out[0].token, 9);
  EXPECT_EQ(out[0].finish, Finish::Length);
}

TEST(Scheduler, KeepsCountsForPenaltiesAndForbidsStopsBeforeMinTokens) {
  Scheduler scheduler(small_limits());
  Request request = request_of(2, 5);
  request.prompt.push_back(2);
  request.stop = {50, 2};
  request.min_tokens = 1;
  request.logit_bias = {{2, 0.5f}, {60, -1.f}};
  request.sampling.repetition_penalty = 1.5f;
  scheduler.submit(1, request);

  const StepBatch& first = scheduler.next(0);
  std::map<Token, LogitEdit> edits = edits_of(first.outputs.at(0));
  EXPECT_EQ(edits.size(), 4u);  // 1, 2, 50, 60
  EXPECT_TRUE(edits.at(1).seen);
  EXPECT_EQ(edits.at(2).bias, -INFINITY);
  EXPECT_EQ(edits.at(50).bias, -INFINITY);
  EXPECT_FALSE(edits.at(50).seen);
  commit(scheduler, first, 60);

  const StepBatch& second = scheduler.next(0);
  edits = edits_of(second.outputs.at(0));
  EXPECT_EQ(edits.size(), 3u);  // the stop token's is gone, the bias of the other is back
  EXPECT_EQ(edits.at(2).bias, 0.5f);
  EXPECT_EQ(edits.at(60).bias, -1.f);
  EXPECT_EQ(edits.at(60).generated, 1);
  EXPECT_TRUE(edits.at(60).seen);
  const std::vector<Emission> out = commit(scheduler, second, 50);
  EXPECT_EQ(out.at(0).finish, Finish::Stop);
  EXPECT_TRUE(scheduler.idle());
}

// A request without penalties pays nothing for what it has read.
TEST(Scheduler, SendsNoEditsThatNobodyAskedFor) {
  Scheduler scheduler(small_limits());
  scheduler.submit(1, request_of(3, 3));
  commit(scheduler, scheduler.next(0), 5);
  EXPECT_TRUE(scheduler.next(0).outputs.at(0).edits.empty());
}

TEST(Scheduler, BrokenRowEndsOnlyItself) {
  Scheduler scheduler(small_limits());
  scheduler.submit(1, request_of(2, 3));
  scheduler.submit(2, request_of(2, 3));
  const StepBatch& batch = scheduler.next(0);
  ASSERT_EQ(batch.outputs.size(), 2u);
  std::vector<Emission> out;
  scheduler.commit(std::vector<Drawn>{{.token = -1}, {.token = 4}}, out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].finish, Finish::Error);
  EXPECT_FALSE(out[0].token);
  EXPECT_EQ(out[1].token, 4);
  EXPECT_FALSE(out[1].finish);
}

TEST(Scheduler, DeadlinesEndWaitingAndRunningAlike) {
  Limits limits = small_limits();
  limits.slots = 1;
  Scheduler scheduler(limits);
  Request request = request_of(2, 10);
  request.deadline = 100;
  scheduler.submit(1, request);
  scheduler.submit(2, request);
  EXPECT_EQ(commit(scheduler, scheduler.next(99), 5).size(), 1u);
  const StepBatch& late = scheduler.next(100);
  EXPECT_TRUE(late.empty());
  const std::vector<Emission> out = commit(scheduler, late, 5);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].finish, Finish::Deadline);
  EXPECT_TRUE(out[0].started);
  EXPECT_EQ(out[0].started_at, 99);
  EXPECT_EQ(out[1].finish, Finish::Deadline);
  EXPECT_FALSE(out[1].started);
  EXPECT_EQ(out[1].started_at, kNever);
  EXPECT_TRUE(scheduler.idle());
  EXPECT_EQ(scheduler.free_slots(), 1);
}

TEST(Scheduler, CancelDuringAStepSaysNothingButTheEnd) {
  Scheduler scheduler(small_limits());
  scheduler.submit(1, request_of(2, 10));
  const StepBatch& batch = scheduler.next(0);
  scheduler.cancel(1);
  scheduler.cancel(1);
  scheduler.cancel(77);
  const std::vector<Emission> out = commit(scheduler, batch, 5);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].finish, Finish::Cancelled);
  EXPECT_FALSE(out[0].token);
  EXPECT_EQ(scheduler.free_slots(), 2);
}

// Larger priorities first, then arrival; and one that waits for pages is not overtaken.
TEST(Scheduler, AdmitsInOrder) {
  Limits limits = small_limits();
  limits.slots = 3;
  limits.pages = 3;
  Scheduler scheduler(limits);
  Request large = request_of(8, 1), small = request_of(2, 1), urgent = request_of(3, 1);
  urgent.priority = 1;
  scheduler.submit(1, small);
  scheduler.submit(2, large);
  scheduler.submit(3, small);
  scheduler.submit(4, urgent);
  const StepBatch& batch = scheduler.next(0);
  ASSERT_EQ(batch.rows.size(), 2u);  // 2 needs two pages of the one left; 3 waits behind it
  EXPECT_EQ(batch.rows[0].id, 4u);
  EXPECT_EQ(batch.rows[1].id, 1u);
  EXPECT_EQ(batch.rows[0].pages.size(), 1u);
  EXPECT_NE(batch.rows[0].pages[0], batch.rows[1].pages[0]);
  EXPECT_EQ(scheduler.waiting(), 2);
  commit(scheduler, batch, 5);
  EXPECT_EQ(scheduler.next(0).rows.size(), 2u);
}

TEST(Scheduler, HoldsSlotsAndQueueAndNoMore) {
  Scheduler scheduler(small_limits());
  for (SequenceId id = 1; id <= 4; ++id) {
    EXPECT_EQ(scheduler.submit(id, request_of(2, 2)), Admission::Accepted);
  }
  EXPECT_EQ(scheduler.submit(5, request_of(2, 2)), Admission::QueueFull);
}

// The step after one that is out reads what that one will draw, by its place among the outputs.
TEST(Scheduler, HandsOutAStepBeforeTheLastOneIsAnswered) {
  Scheduler scheduler(small_limits());
  Request request = request_of(2, 3);
  request.prompt_logprobs = true;  // an output before the draw
  scheduler.submit(1, request);
  scheduler.submit(2, request_of(6, 3));
  const StepBatch& first = scheduler.next(0);   // both tokens of 1, four of 2's
  ASSERT_EQ(first.outputs.size(), 2u);
  const StepBatch& second = scheduler.next(0);  // 1 decodes, 2 goes on with its prompt
  EXPECT_EQ(second.tokens, (std::vector<Token>{drawn_for(1), 5, 6}));
  EXPECT_EQ(second.rows.at(0).first, 2);
  EXPECT_EQ(second.outputs.at(0).position, 3);
  EXPECT_EQ(commit(scheduler, first, 7).size(), 1u);
  const StepBatch& third = scheduler.next(0);
  EXPECT_EQ(third.tokens, (std::vector<Token>{drawn_for(0), drawn_for(1)}));
  EXPECT_EQ(commit(scheduler, second, 8).size(), 2u);
  EXPECT_EQ(scheduler.next(0).tokens, (std::vector<Token>{drawn_for(1)}));  // 1 needs no more
  const std::vector<Emission> last = commit(scheduler, third, 9);
  EXPECT_EQ(last.at(0).finish, Finish::Length);
  EXPECT_FALSE(last.at(1).finish);
}

// A stop token, a broken row, a cancel and a deadline come too late for the row that is out: it is
// in vain, says nothing, and holds its slot until its own step is done.
TEST(Scheduler, RowsInVainSayNothingAndKeepTheirSlots) {
  Limits limits = small_limits();
  limits.slots = 4;
  limits.queued = 0;
  Scheduler scheduler(limits);
  Request request = request_of(1, 5);
  request.stop = {50};
  for (SequenceId id = 1; id <= 3; ++id) scheduler.submit(id, request);
  request.deadline = 10;
  scheduler.submit(4, request);
  scheduler.next(0);
  EXPECT_EQ(scheduler.next(1).rows.size(), 4u);
  scheduler.cancel(3);
  std::vector<Emission> out;
  scheduler.commit(std::vector<Drawn>{{.token = 50}, {.token = -1}, {.token = 7}, {.token = 8}},
                   out);
  ASSERT_EQ(out.size(), 4u);
  EXPECT_EQ(out[0].finish, Finish::Stop);
  EXPECT_EQ(out[1].finish, Finish::Error);
  EXPECT_EQ(out[2].finish, Finish::Cancelled);
  EXPECT_FALSE(out[3].finish);
  EXPECT_EQ(scheduler.free_slots(), 0);
  EXPECT_EQ(scheduler.running(), 4);
  scheduler.check_invariants();
  // Their places in the queue are free at once; their slots are not.
  for (SequenceId id = 5; id <= 7; ++id) {
    EXPECT_EQ(scheduler.submit(id, request_of(1, 1)), Admission::Accepted);
  }
  EXPECT_EQ(scheduler.submit(8, request_of(1, 1)), Admission::QueueFull);
  const StepBatch& late = scheduler.next(10);
  EXPECT_TRUE(late.empty());
  out.clear();
  scheduler.commit(std::vector<Drawn>(4, {.token = 9}), out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].id, 4u);
  EXPECT_EQ(out[0].finish, Finish::Deadline);
  EXPECT_EQ(scheduler.free_slots(), 4);
  commit(scheduler, late, 0);
  EXPECT_EQ(scheduler.next(11).rows.size(), 3u);
}

// The edits of a step are made before the last token is known: the device counts it.
TEST(Scheduler, LeavesTheLastTokenToBeCountedWhereItIsPenalised) {
  Scheduler scheduler(small_limits());
  Request request = request_of(2, 9);
  scheduler.submit(1, request);
  request.sampling.presence_penalty = 1;
  scheduler.submit(2, request);
  const StepBatch& first = scheduler.next(0);
  EXPECT_FALSE(first.outputs.at(0).counts_last);
  EXPECT_FALSE(first.outputs.at(1).counts_last);
  const StepBatch& second = scheduler.next(0);
  EXPECT_FALSE(second.outputs.at(0).counts_last);
  EXPECT_TRUE(second.outputs.at(1).counts_last);
  EXPECT_TRUE(second.outputs.at(1).edits.empty());
  commit(scheduler, first, 7);
  commit(scheduler, second, 8);
  const StepBatch& third = scheduler.next(0);
  EXPECT_FALSE(third.outputs.at(1).counts_last);
  EXPECT_EQ(edits_of(third.outputs.at(1)).size(), 2u);  // 7 and 8
}

}  // namespace
}  // namespace weir
