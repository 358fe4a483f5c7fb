// States kept inside prompts: who holds their slots, what is refused, and that an answer which
// starts from one is the answer without it.
#include "engine/snapshots.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "engine/engine.h"
#include "engine/model.h"
#include "engine/runner.h"
#include "engine/state_pool.h"
#include "tests/sim/engine_fakes.h"

namespace weir {
namespace {

Limits small_limits() {
  return {.slots = 2, .snapshots = 2, .step_tokens = 8, .chunk_tokens = 8, .queued = 4,
          .prompt_tokens = 20, .new_tokens = 10, .vocab = 100};
}

Request request_of(std::vector<Token> prompt, std::vector<int32_t> snapshots = {},
                   SnapshotId start_from = kNoSnapshot) {
  Request request{.prompt = std::move(prompt), .new_tokens = 2};
  request.snapshots = std::move(snapshots);
  request.start_from = start_from;
  return request;
}

// A slot that is free while somebody still has to start from it would be overwritten under him.
TEST(Snapshots, ASlotIsFreeWhenItsOwnerAndAllReadersHaveLeft) {
  Snapshots snapshots(5, 2);
  const std::vector<Token> read = {1, 2};
  const Slot slot = snapshots.promise();
  EXPECT_GE(slot, 5);
  const SnapshotId id = snapshots.keep(slot, read);
  EXPECT_EQ(snapshots.ledger().free, 1);
  EXPECT_EQ(snapshots.begin_reading(id), slot);
  EXPECT_EQ(snapshots.begin_reading(id), slot);
  snapshots.drop(id);
  snapshots.drop(id);  // late, and fine
  EXPECT_FALSE(snapshots.ledger().kept.contains(id));
  snapshots.end_reading(slot);
  EXPECT_EQ(snapshots.ledger().free, 1);
  snapshots.end_reading(slot);
  EXPECT_EQ(snapshots.ledger().free, 2);
  EXPECT_NE(snapshots.keep(snapshots.promise(), read), id);
}

TEST(Snapshots, WhatARequestSaysItselfIsRefusedByName) {
  const auto answer = [](std::vector<int32_t> at) {
    return check(request_of({1, 2, 3, 4}, std::move(at)), small_limits());
  };
  EXPECT_EQ(answer({1, 4}), Admission::Accepted);
  EXPECT_EQ(answer({0}), Admission::BadSnapshot);
  EXPECT_EQ(answer({5}), Admission::BadSnapshot);
  EXPECT_EQ(answer({2, 2}), Admission::BadSnapshot);
  EXPECT_EQ(answer({3, 2}), Admission::BadSnapshot);
  EXPECT_EQ(answer({1, 2, 3}), Admission::NoSnapshotFree);
  Request scored = request_of({1, 2, 3}, {}, 1);
  scored.prompt_logprobs = true;
  EXPECT_EQ(check(scored, small_limits()), Admission::BadSnapshot);
  Limits limits = small_limits();
  limits.snapshots = 0;
  EXPECT_EQ(check(request_of({1}, {1}), limits), Admission::NoSnapshotFree);
  limits = small_limits();
  limits.pages = 100;
  EXPECT_EQ(check(request_of({1}, {1}), limits), Admission::SnapshotOfPages);
  EXPECT_EQ(check(request_of({1}, {}, 7), limits), Admission::SnapshotOfPages);
}

// Hears of its snapshots, in order.
class Listener final : public TokenSink {
 public:
  void emit(const Emission& emission) override {
    if (emission.snapshot) snapshots.push_back(*emission.snapshot);
    collector.emit(emission);
  }
  std::vector<Emission::Snapshot> snapshots;  // to be read after collector.wait()
  Collector collector;
};

TEST(Snapshots, TheEngineRefusesByNameAndGivesDroppedOnesBack) {
  const Limits limits = small_limits();
  HashModel model(limits);
  RecordingObserver observer;
  Engine engine(limits, model, observer);
  Listener first;
  ASSERT_EQ(engine.submit(request_of({1, 2, 3, 4}, {2, 3}), first).admission, Admission::Accepted);
  Collector refused;
  EXPECT_EQ(engine.submit(request_of({1, 2}, {1}), refused).admission, Admission::NoSnapshotFree);
  EXPECT_EQ(first.collector.wait(), Finish::Length);
  ASSERT_EQ(first.snapshots.size(), 2u);
  EXPECT_EQ(first.snapshots[0].position, 2);
  EXPECT_EQ(first.snapshots[1].position, 3);
  const SnapshotId two = first.snapshots[0].id, three = first.snapshots[1].id;

  const auto answer = [&](const Request& request) {
    return engine.submit(request, refused).admission;
  };
  EXPECT_EQ(answer(request_of({1, 2}, {}, two)), Admission::BadSnapshot);  // nothing to read
  EXPECT_EQ(answer(request_of({1, 3, 3}, {}, two)), Admission::BadSnapshot);
  EXPECT_EQ(answer(request_of({1, 2, 3}, {2}, two)), Admission::BadSnapshot);
  EXPECT_EQ(answer(request_of({1, 2, 3}, {}, three + 1)), Admission::UnknownSnapshot);
  EXPECT_EQ(answer(request_of({1, 2, 3}, {3}, two)), Admission::NoSnapshotFree);

  Listener reader;
  EXPECT_EQ(engine.submit(request_of({1, 2, 9}, {}, two), reader).admission, Admission::Accepted);
  engine.drop(two);  // it may not have started yet
  engine.drop(two + 100);
  EXPECT_EQ(answer(request_of({1, 2, 3}, {}, two)), Admission::UnknownSnapshot);
  EXPECT_EQ(reader.collector.wait(), Finish::Length);
  const HashModel::Answer alone = HashModel::alone(request_of({1, 2, 9}), limits);
  ASSERT_EQ(reader.collector.tokens().size(), alone.tokens.size());
  for (size_t i = 0; i < alone.tokens.size(); ++i) {
    EXPECT_EQ(reader.collector.tokens()[i], alone.tokens[i].token);
  }
  // The dropped one's slot is free once the engine has heard of it.
  observer.wait_for_free_snapshots(1);
  Listener last;
  EXPECT_EQ(engine.submit(request_of({1, 2, 3, 4}, {4}, three), last).admission,
            Admission::Accepted);
  EXPECT_EQ(last.collector.wait(), Finish::Length);
  EXPECT_EQ(last.snapshots.at(0).position, 4);
}

// --- on real models -----------------------------------------------------------------------------

struct Case {
  const char* folder;
  bool cuda;
};

class SnapshotAnswers : public testing::TestWithParam<Case> {
 protected:
  static constexpr Limits kLimits{.slots = 3, .snapshots = 3, .step_tokens = 64,
                                  .chunk_tokens = 64, .queued = 4, .prompt_tokens = 200,
                                  .new_tokens = 8};

  void SetUp() override {
    std::string error;
    if (GetParam().cuda && cuda_device_count() == 0) GTEST_SKIP() << "skipped: no CUDA device";
    backend_ = GetParam().cuda ? make_cuda_backend(0, &error) : make_cpu_backend({.threads = 1});
    ASSERT_NE(backend_, nullptr) << error;
    model_ = std::make_unique<Model>(
        *load_model(std::string(WEIR_SOURCE_DIR) + "/tests/vectors/" + GetParam().folder,
                    *backend_));
    ASSERT_EQ(state_size(model_->spec).kv_per_token, 0u);
    limits_ = kLimits;
    limits_.vocab = model_->spec.vocab;
    pool_ = std::make_unique<StatePool>(model_->spec, limits_, *backend_);
    runner_ = std::make_unique<Runner>(*model_, *pool_, limits_, *backend_);
    scheduler_ = std::make_unique<Scheduler>(limits_);
  }

  struct Answer {
    std::vector<Token> tokens;
    std::vector<float> logprobs;
    std::vector<SnapshotId> snapshots;
    int32_t read = 0;  // tokens of the prompt that steps have read
  };
  // Greedy answers of requests that are submitted together.
  std::vector<Answer> answers(const std::vector<Request>& requests) {
    const SequenceId first = next_id_;
    for (Request request : requests) {
      request.new_tokens = kLimits.new_tokens;
      request.sampling.temperature = 0;
      request.top_logprobs = 3;
      EXPECT_EQ(scheduler_->submit(next_id_++, std::move(request)), Admission::Accepted);
    }
    std::vector<Answer> answers(requests.size());
    std::vector<Emission> emissions;
    while (!scheduler_->idle()) {
      const StepBatch& batch = scheduler_->next(0);
      for (const Row& row : batch.rows) {
        const auto prompt = int32_t(requests[size_t(row.id - first)].prompt.size());
        if (row.first < prompt) answers[size_t(row.id - first)].read += row.count;
      }
      emissions.clear();
      scheduler_->commit(runner_->step(batch), emissions);
      for (const Emission& emission : emissions) {
        Answer& answer = answers[size_t(emission.id - first)];
        if (emission.snapshot) answer.snapshots.push_back(emission.snapshot->id);
        if (emission.token) answer.tokens.push_back(*emission.token);
        for (const TokenScore& score : emission.top) answer.logprobs.push_back(score.logprob);
      }
      scheduler_->check_invariants();
    }
    return answers;
  }

  std::vector<Token> prompt(int32_t length) const {
    std::vector<Token> tokens(static_cast<size_t>(length));
    for (int32_t i = 0; i < length; ++i) tokens[size_t(i)] = (i * 37 + 11) % limits_.vocab;
    return tokens;
  }
  // The CPU adds in one order whatever the chunks; a GPU's kernels depend on them.
  void expect_same(const Answer& found, const Answer& wanted) const {
    const float tolerance = GetParam().cuda ? 2e-3f : 0.0f;
    EXPECT_EQ(found.tokens, wanted.tokens);
    ASSERT_EQ(found.logprobs.size(), wanted.logprobs.size());
    float worst = 0;
    for (size_t i = 0; i < wanted.logprobs.size(); ++i) {
      worst = std::max(worst, std::fabs(found.logprobs[i] - wanted.logprobs[i]));
    }
    EXPECT_LE(worst, tolerance);
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  Limits limits_;
  std::unique_ptr<StatePool> pool_;
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<Scheduler> scheduler_;
  SequenceId next_id_ = 1;
};

// What a copy that is missing a layer, that is taken a step late or early, or from another row's
// slot would change: three tails of one prompt, in company of each other.
TEST_P(SnapshotAnswers, StartingFromOneChangesNoAnswer) {
  const std::vector<Token> whole = prompt(150);
  const auto tail = [&](int32_t kept, Token other) {
    std::vector<Token> tokens(whole.begin(), whole.begin() + kept);
    for (int32_t i = 0; i < 9; ++i) tokens.push_back((other + i) % limits_.vocab);
    return tokens;
  };
  const std::vector<std::vector<Token>> prompts = {tail(1, 5), tail(77, 6), tail(150, 7)};
  std::vector<Answer> cold;
  for (const auto& tokens : prompts) cold.push_back(answers({request_of(tokens)})[0]);
  const Answer plain = answers({request_of(whole)})[0];

  const Answer kept = answers({request_of(whole, {1, 77, 150})})[0];
  expect_same(kept, plain);
  ASSERT_EQ(kept.snapshots.size(), 3u);
  for (int times = 0; times < 2; ++times) {  // the second time, nothing has been worn away
    std::vector<Request> requests;
    for (size_t i = 0; i < 3; ++i) {
      requests.push_back(request_of(prompts[i], {}, kept.snapshots[i]));
    }
    const std::vector<Answer> warm = answers(requests);
    for (size_t i = 0; i < 3; ++i) {
      expect_same(warm[i], cold[i]);
      EXPECT_EQ(warm[i].read, 9);
    }
  }
  for (const SnapshotId id : kept.snapshots) scheduler_->drop(id);
  EXPECT_EQ(scheduler_->snapshots().ledger().free, limits_.snapshots);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const bool cuda : {false, true}) {
    for (const char* folder : {"gated-deltanet", "kda", "gdn2", "swila-gated-temporal", "gla",
                               "linear-attn", "mamba2", "rwkv7", "mom", "random-gsa-conv-t2r",
                               "random-hgrn2-conv", "random-transformer-window"}) {
      all.push_back({folder, cuda});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Models, SnapshotAnswers, testing::ValuesIn(cases()), [](const auto& info) {
  std::string name = info.param.folder;
  std::replace(name.begin(), name.end(), '-', '_');
  return name + (info.param.cuda ? "_cuda" : "_cpu");
});

}  // namespace
}  // namespace weir
