#pragma once
#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

#include "tests/sim/hash_model.h"

namespace weir {

// A client's end of a stream: keeps what came, and lets a test wait for it.
class Collector : public TokenSink {
 public:
  void emit(const Emission& emission) override {
    const std::lock_guard lock(mutex_);
    WEIR_CHECK(!finish_);  // nothing after the last emission
    for (const auto& score : emission.prompt) prompt_.push_back(score);
    if (emission.token) tokens_.push_back(*emission.token);
    finish_ = emission.finish;
    started_ = emission.started;
    changed_.notify_all();
  }

  Finish wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return finish_.has_value(); });
    return *finish_;
  }
  void wait_for_tokens(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tokens_.size() >= count || finish_; });
  }
  std::vector<Token> tokens() const {
    const std::lock_guard lock(mutex_);
    return tokens_;
  }
  size_t prompt_scores() const {
    const std::lock_guard lock(mutex_);
    return prompt_.size();
  }
  std::optional<Finish> finish() const {
    const std::lock_guard lock(mutex_);
    return finish_;
  }
  bool started() const {
    const std::lock_guard lock(mutex_);
    return started_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Token> tokens_;
  std::vector<Emission::PromptScore> prompt_;
  std::optional<Finish> finish_;
  bool started_ = false;
};

// A hash model whose steps are done when the test lets them go.
class GatedModel final : public StepRunner {
 public:
  explicit GatedModel(const Limits& limits, size_t steps_out = 1) : model_(limits, steps_out) {}

  size_t steps_out() const override { return model_.steps_out(); }
  void begin(const StepBatch& batch) override {
    model_.begin(batch);
    const std::lock_guard lock(mutex_);
    ++begun_;
  }
  std::span<const Drawn> finish() override {
    std::unique_lock lock(mutex_);
    ++entered_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return allowed_ >= entered_; });
    return model_.finish();
  }
  size_t step_bytes() const override { return model_.step_bytes(); }

  // Returns when the engine waits for its step number `count`, from 1.
  void wait_inside(int64_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return entered_ >= count; });
  }
  void allow(int64_t steps) {
    const std::lock_guard lock(mutex_);
    allowed_ += steps;
    changed_.notify_all();
  }
  void open() { allow(1'000'000'000); }
  int64_t begun() const {
    const std::lock_guard lock(mutex_);
    return begun_;
  }

 private:
  HashModel model_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t begun_ = 0, entered_ = 0, allowed_ = 0;
};

class RecordingObserver final : public Observer {
 public:
  void on_step(const StepReport& report) override {
    const std::lock_guard lock(mutex_);
    WEIR_CHECK(report.seconds >= 0);
    WEIR_CHECK(report.decode_tokens == report.decode_rows);
    WEIR_CHECK(report.prompt_tokens >= report.prompt_rows);
    WEIR_CHECK(report.decode_rows + report.prompt_rows > 0);
    WEIR_CHECK(report.bytes == size_t(1000 + report.decode_tokens + report.prompt_tokens));
    total_.decode_tokens += report.decode_tokens;
    total_.prompt_tokens += report.prompt_tokens;
    total_.drawn += report.drawn;
    total_.admitted += report.admitted;
    total_.finished += report.finished;
  }
  void on_occupancy(const Occupancy& occupancy) override {
    const std::lock_guard lock(mutex_);
    WEIR_CHECK(seen_.empty() || seen_.back() != occupancy);
    WEIR_CHECK(occupancy.running + occupancy.free_slots == occupancy.slots);
    seen_.push_back(occupancy);
    changed_.notify_all();
  }

  StepReport total() const {
    const std::lock_guard lock(mutex_);
    return total_;
  }
  std::vector<Occupancy> seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
  }
  // Returns when the last occupancy told has these numbers.
  void wait_for(int32_t waiting, int32_t running) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      return !seen_.empty() && seen_.back().waiting == waiting && seen_.back().running == running;
    });
  }
  void wait_for_free_snapshots(int32_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !seen_.empty() && seen_.back().free_snapshots == count; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  StepReport total_;
  std::vector<Occupancy> seen_;
};

}  // namespace weir
