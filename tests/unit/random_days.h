#pragma once
#include <random>
#include <vector>

#include "engine/model.h"
#include "engine/runner.h"
#include "engine/state_pool.h"

namespace weir::test {

// A model with some slots, and some more to keep states in.
struct Served {
  Served(std::unique_ptr<Backend> on, Model loaded, int32_t slots)
      : backend(std::move(on)),
        model(std::move(loaded)),
        limits{.slots = slots, .snapshots = kKept, .pages = 10 * (slots + kKept),
               .page_tokens = 4, .step_tokens = 16 * (slots + kStepPadding),
               .chunk_tokens = 16, .prompt_tokens = kLength, .new_tokens = 1,
               .vocab = model.spec.vocab},
        pool(model.spec, limits, *backend),
        runner(model, pool, limits, *backend) {}

  static constexpr int32_t kKept = 2, kLength = 40;

  std::unique_ptr<Backend> backend;
  Model model;
  Limits limits;
  StatePool pool;
  Runner runner;
};

// Random days of sequences that begin, move by one token or several, alone or together, are kept in
// other slots between any two tokens, go on from there, and are followed by others in their slot.
// The logits of the last token of each row.
class RandomDays {
 public:
  RandomDays(Served& served, uint32_t seed)
      : served_(served), random_(seed), slots_(served.limits.slots),
        keeps_(state_size(served.model.spec).kv_per_token == 0),
        length_(size_t(slots_ + Served::kKept)), pages_(length_.size()) {
    for (int32_t page = 0; page < served.limits.pages; ++page) {
      pages_[size_t(page) % pages_.size()].push_back(page);
    }
  }

  std::vector<float> logits(int days) {
    std::vector<float> all;
    for (int day = 0; day < days; ++day) {
      const StepBatch batch = next(day);
      served_.runner.step(batch);
      for (size_t i = 0; i < batch.outputs.size(); ++i) {
        const std::vector<float> one = served_.runner.logits(int32_t(i));
        all.insert(all.end(), one.begin(), one.end());
      }
    }
    return all;
  }

 private:
  int32_t upto(int32_t most) { return int32_t(random_() % uint32_t(most + 1)); }

  StepBatch next(int day) {
    StepBatch batch;
    const bool many = upto(2) > 0, decodes = upto(3) > 0;
    for (int32_t slot = 0; slot < slots_; ++slot) {
      int32_t& at = length_[size_t(slot)];
      if (at >= Served::kLength - 10 || upto(30) == 0) at = 0;  // another sequence
      if (many ? upto(8) == 0 && slot > 0 : slot != day % slots_) continue;
      const auto kept = size_t(slots_ + upto(Served::kKept - 1));
      if (length_[kept] > 0 && upto(20) == 0) {
        batch.starts.push_back({.to = slot, .from = Slot(kept), .position = length_[kept]});
        at = length_[kept];
      }
      add(batch, slot, decodes || upto(1) == 0 ? 1 : 1 + upto(14));
    }
    if (keeps_ && upto(4) == 0) {
      const Row& row = batch.rows[size_t(upto(int32_t(batch.rows.size()) - 1))];
      const auto kept = size_t(slots_ + upto(Served::kKept - 1));
      length_[kept] = length_[size_t(row.slot)];
      batch.keeps.push_back({.to = Slot(kept), .from = row.slot, .position = length_[kept]});
    }
    return batch;
  }

  void add(StepBatch& batch, Slot slot, int32_t most) {
    int32_t& at = length_[size_t(slot)];
    const int32_t count = std::min(most, Served::kLength - at);
    const auto begin = int32_t(batch.tokens.size());
    for (int32_t i = 0; i < count; ++i) {
      batch.tokens.push_back(upto(served_.limits.vocab - 1));
    }
    batch.rows.push_back({.slot = slot, .first = at, .count = count, .begin = begin,
                          .pages = pages_[size_t(slot)]});
    at += count;
    batch.outputs.push_back({.token = begin + count - 1, .position = at});
  }

  Served& served_;
  std::mt19937 random_;
  const int32_t slots_;
  const bool keeps_;  // not what has pages too
  std::vector<int32_t> length_;               // of what is in each slot
  std::vector<std::vector<int32_t>> pages_;
};

}  // namespace weir::test
