// Steps padded to few shapes, as a backend wants that remembers programs: a padding row that
// touches a slot, shifts an answer or misses the warm-up; a warm-up that a sequence notices.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "engine/model.h"
#include "engine/runner.h"
#include "engine/state_pool.h"
#include "tests/unit/forwarding_backend.h"

namespace weir {
namespace {

// The CPU, wanting few shapes; counts the steps by the rows they draw for, and by their tokens.
class Remembering final : public test::ForwardingBackend {
 public:
  Remembering() : ForwardingBackend(make_cpu_backend({.threads = 2})) {}
  std::map<int32_t, int> steps, tokens;

  void run(const Program& program) override {
    const auto* sample = std::get_if<Sample>(&program.back());
    ++steps[sample == nullptr ? 0 : sample->count];
    ++tokens[std::get<Embed>(program.front()).tokens];
    inner().run(program);
  }
  bool remembers_programs() const override { return true; }
};

constexpr int32_t kSlots = 11, kLength = 16;

struct Served {
  Served(const std::string& name, std::unique_ptr<Backend> on)
      : backend(std::move(on)),
        model(*load_model(std::string(WEIR_SOURCE_DIR) + "/tests/vectors/" + name, *backend)),
        limits{.slots = kSlots, .pages = 4 * kSlots, .page_tokens = 4, .step_tokens = 512,
               .chunk_tokens = 32, .prompt_tokens = 16, .new_tokens = 16,
               .vocab = model.spec.vocab},
        pool(model.spec, limits, *backend),
        runner(model, pool, limits, *backend) {}

  std::unique_ptr<Backend> backend;
  Model model;
  Limits limits;
  StatePool pool;
  Runner runner;
};

// Random days: which of the slots move, and by which tokens; `most` of them at a time.
std::vector<std::vector<float>> logits_of(Served& served, uint32_t most) {
  std::mt19937 random(7);
  std::vector<std::vector<float>> all;
  std::vector<int32_t> length(kSlots, 0);
  std::vector<std::vector<int32_t>> pages(kSlots);
  for (int32_t page = 0; page < served.limits.pages; ++page) {
    pages[size_t(page % kSlots)].push_back(page);
  }
  for (int day = 0; day < 25; ++day) {
    StepBatch batch;
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      int32_t& at = length[size_t(slot)];
      if (random() % 3 == 0 || at == kLength) continue;
      const auto begin = int32_t(batch.tokens.size());
      const int32_t count = std::min(int32_t(1 + random() % most), kLength - at);
      for (int32_t i = 0; i < count; ++i) {
        batch.tokens.push_back(Token(random() % uint32_t(served.limits.vocab)));
      }
      batch.rows.push_back({.slot = slot, .first = at, .count = count, .begin = begin,
                            .pages = pages[size_t(slot)]});
      at += count;
      if (count == 1 || random() % 2 == 0) {
        batch.outputs.push_back({.token = begin + count - 1, .position = at});
      }
    }
    if (batch.outputs.empty()) continue;
    served.runner.step(batch);
    for (size_t i = 0; i < batch.outputs.size(); ++i) {
      all.push_back(served.runner.logits(int32_t(i)));
    }
  }
  return all;
}

class PaddedSteps : public testing::TestWithParam<const char*> {};

TEST_P(PaddedSteps, AnswerAsUnpaddedOnes) {
  auto remembering = std::make_unique<Remembering>();
  const auto& steps = remembering->steps;
  Served padded(GetParam(), std::move(remembering));
  // Two of each shape up to the slots, before the first request; and prompts of 144, 160 and 176
  // tokens, which leave something in every slot.
  EXPECT_EQ(steps, (std::map<int32_t, int>{{1, 5}, {2, 2}, {4, 2}, {8, 2}, {kSlots, 2}}));
  Served plain(GetParam(), make_cpu_backend({.threads = 2}));
  EXPECT_EQ(logits_of(padded, 1), logits_of(plain, 1));
  for (const auto& [rows, times] : steps) {
    EXPECT_TRUE(rows == 1 || rows == 2 || rows == 4 || rows == 8 || rows == kSlots) << rows;
  }
}

TEST_P(PaddedSteps, OfPromptsAmongOthersAnswerAsUnpaddedOnes) {
  auto remembering = std::make_unique<Remembering>();
  auto& tokens = remembering->tokens;
  auto& steps = remembering->steps;
  Served padded(GetParam(), std::move(remembering));
  tokens.clear();
  steps.clear();
  Served plain(GetParam(), make_cpu_backend({.threads = 2}));
  EXPECT_EQ(logits_of(padded, 5), logits_of(plain, 5));
  EXPECT_GE(tokens[32] + tokens[48], 5);
  for (const auto& [count, times] : tokens) EXPECT_TRUE(count % 16 == 0 || count < 8) << count;
  for (const auto& [rows, times] : steps) EXPECT_TRUE(rows % 8 == 0 || rows < 8) << rows;
}

INSTANTIATE_TEST_SUITE_P(Models, PaddedSteps,
                         testing::Values("gated-deltanet", "hybrid-kda", "swila-gated-temporal"));

}  // namespace
}  // namespace weir
