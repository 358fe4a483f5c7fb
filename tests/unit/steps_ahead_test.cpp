// Steps asked for before the last one's answers are read, on real models: a token read from the
// wrong place, a buffer that the next step overwrites, an answer that depends on when it was asked.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <utility>

#include "engine/model.h"
#include "engine/runner.h"
#include "engine/state_pool.h"
#include "tests/sim/random_request.h"
#include "tests/unit/forwarding_backend.h"

namespace weir {
namespace {

// What another backend does, at once or as late as the interface allows: when it is waited for.
// Either way a step may be asked for before the last one's answers are read, or not.
struct Manner {
  bool late = false, ahead = false;
};
class Wishes final : public test::ForwardingBackend {
 public:
  Wishes(std::unique_ptr<Backend> backend, Manner manner)
      : ForwardingBackend(std::move(backend)), manner_(manner) {}

  void upload(void* to, const void* from, size_t bytes) override {
    const auto* data = static_cast<const std::byte*>(from);
    ask([this, to, data = std::vector<std::byte>(data, data + bytes)] {
      inner().upload(to, data.data(), data.size());
    });
  }
  void download(void* to, const void* from, size_t bytes) override {
    ask([this, to, from, bytes] { inner().download(to, from, bytes); });
  }
  void copy(void* to, const void* from, size_t bytes) override {
    ask([this, to, from, bytes] { inner().copy(to, from, bytes); });
  }
  void run(const Program& program) override {
    ask([this, program] { inner().run(program); });
  }
  bool remembers_programs() const override { return true; }
  void finish() override { await(asked_); }
  bool runs_ahead() const override { return manner_.ahead; }
  uint64_t mark() override { return asked_; }
  void await(uint64_t mark) override {
    for (; done_ < mark; ++done_) {
      wishes_.front()();
      wishes_.pop_front();
    }
    inner().finish();
  }

 private:
  void ask(std::function<void()> wish) {
    wishes_.push_back(std::move(wish));
    ++asked_;
    if (!manner_.late) finish();
  }

  const Manner manner_;
  std::deque<std::function<void()>> wishes_;
  uint64_t asked_ = 0, done_ = 0;
};

struct Answer {
  std::vector<Token> tokens;
  std::vector<float> logprobs;
  std::vector<std::pair<Token, float>> others;  // alternatives and prompt scores
  std::optional<Finish> finish;

  bool operator==(const Answer&) const = default;
};

void keep(const Emission& emission, Answer& answer) {
  const auto keep_all = [&answer](const std::vector<TokenScore>& top) {
    for (const TokenScore& one : top) answer.others.emplace_back(one.token, one.logprob);
  };
  if (emission.token) answer.tokens.push_back(*emission.token);
  if (emission.logprob) answer.logprobs.push_back(*emission.logprob);
  keep_all(emission.top);
  for (const auto& score : emission.prompt) {
    answer.others.emplace_back(score.position, score.logprob);
    keep_all(score.top);
  }
  answer.finish = emission.finish;
}

struct Served {
  std::vector<Answer> answers;
  int64_t ahead = 0, in_vain = 0;
};

// All requests come at once; as many run together as there are slots.
Served serve(const std::string& name, Backend& backend, int32_t slots,
             const std::function<std::vector<Request>(const Limits&)>& requests_for) {
  const Model model =
      *load_model(std::string(WEIR_SOURCE_DIR) + "/tests/vectors/" + name, backend);
  const Limits limits{.slots = slots, .pages = 12 * slots, .page_tokens = 4, .step_tokens = 96,
                      .chunk_tokens = 8, .queued = 100, .prompt_tokens = 20, .new_tokens = 24,
                      .vocab = model.spec.vocab};
  const StatePool pool(model.spec, limits, backend);
  Runner runner(model, pool, limits, backend);
  Scheduler scheduler(limits);
  const std::vector<Request> requests = requests_for(limits);
  Served served{.answers = std::vector<Answer>(requests.size())};
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(scheduler.submit(SequenceId(i), requests[i]), Admission::Accepted);
  }
  std::deque<const StepBatch*> out;
  std::vector<Emission> emissions;
  while (!scheduler.idle()) {
    served.ahead += !out.empty();
    out.push_back(&scheduler.next(0));
    if (!out.back()->empty()) runner.begin(*out.back());
    const size_t most = out.back()->empty() ? 0 : runner.steps_out() - 1;
    for (; out.size() > most; out.pop_front()) {
      const StepBatch& batch = *out.front();
      for (const Row& row : batch.rows) {
        served.in_vain += served.answers[size_t(row.id)].finish.has_value();
      }
      emissions.clear();
      scheduler.commit(batch.empty() ? std::span<const Drawn>() : runner.finish(), emissions);
      for (const Emission& one : emissions) keep(one, served.answers[size_t(one.id)]);
      scheduler.check_invariants();
    }
  }
  return served;
}

// Of every kind: greedy, filters, penalties, bias, stops, scores.
std::vector<Request> any_requests(const Limits& limits) {
  Chance chance(17);
  std::vector<Request> requests;
  for (int i = 0; i < 40; ++i) {
    Request request = random_request(chance, limits);
    request.new_tokens = limits.new_tokens - chance.pick(0, 12);
    request.min_tokens = chance.percent(30) ? chance.pick(1, request.new_tokens) : 0;
    // Stops that come: a quarter of all tokens.
    for (Token token = chance.pick(0, 3); token < limits.vocab && chance.percent(99); token += 4) {
      if (i % 3 == 0) request.stop.push_back(token);
    }
    if (i % 4 == 1) request.sampling.repetition_penalty = 4;
    if (i % 4 == 2) request.sampling = {.frequency_penalty = 3, .presence_penalty = 2};
    if (i % 4 != 2) request.sampling.temperature = 2;
    requests.push_back(request);
  }
  return requests;
}

class StepsAhead : public testing::TestWithParam<const char*> {};

TEST_P(StepsAhead, AnswerAsStepsOneByOne) {
  const auto served = [](Manner manner) {
    Wishes backend(make_cpu_backend({.threads = 2}), manner);
    return serve(GetParam(), backend, 7, any_requests);
  };
  const Served one_by_one = served({});
  EXPECT_EQ(one_by_one.ahead + one_by_one.in_vain, 0);
  for (const bool late : {false, true}) {
    const Served ahead = served({.late = late, .ahead = true});
    EXPECT_GT(ahead.ahead, 20);
    EXPECT_GT(ahead.in_vain, 3);
    for (size_t i = 0; i < ahead.answers.size(); ++i) {
      EXPECT_TRUE(ahead.answers[i].finish);
      EXPECT_TRUE(ahead.answers[i] == one_by_one.answers[i]) << "request " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, StepsAhead,
                         testing::Values("gated-deltanet", "hybrid-kda", "swila-gated-temporal"));

// On a GPU a step's company may decide which kernel runs, so here all steps have the same rows
// either way: every sequence fits at once, and ends by length.
class StepsAheadOnCuda : public StepsAhead {};

TEST_P(StepsAheadOnCuda, AnswerAsStepsOneByOne) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  std::string error;
  auto device = make_cuda_backend(0, &error);
  Wishes punctual(make_cuda_backend(0, &error), {});
  const auto requests = [](const Limits& limits) {
    std::vector<Request> all;
    for (Request& request : any_requests(limits)) {
      if (all.size() == 24) break;
      request.stop.clear();
      request.min_tokens = 0;
      if (all.size() % 5 == 0) request.sampling = {};
      all.push_back(std::move(request));
    }
    return all;
  };
  const Served ahead = serve(GetParam(), *device, 24, requests);
  const Served one_by_one = serve(GetParam(), punctual, 24, requests);
  EXPECT_GT(ahead.ahead, 20);
  EXPECT_EQ(one_by_one.ahead, 0);
  for (size_t i = 0; i < ahead.answers.size(); ++i) {
    EXPECT_TRUE(ahead.answers[i] == one_by_one.answers[i]) << "request " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, StepsAheadOnCuda,
                         testing::Values("gated-deltanet", "kda", "swila-gated-temporal"));

}  // namespace
}  // namespace weir
