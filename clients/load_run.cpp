#include "clients/load_run.h"

#include <algorithm>
#include <utility>

namespace weir {

namespace {

SteadyTime::duration to_duration(double seconds) {
  return std::chrono::duration_cast<SteadyTime::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

LoadRun::LoadRun(LoadOptions options, const LoadPlan& plan,
                 std::vector<std::unique_ptr<v1::Generation::Stub>> stubs)
    : options_(std::move(options)), plan_(plan), stubs_(std::move(stubs)), random_(options_.seed) {}

LoadResult LoadRun::run(const std::function<void(const LoadProgress&)>& progress,
                        double progress_seconds) {
  Lock lock(mutex_);
  begin_ = next_arrival_ = last_end_ = std::chrono::steady_clock::now();
  if (options_.rate) draw_next_arrival();
  SteadyTime next_progress = begin_ + to_duration(progress_seconds);
  while (true) {
    start_due(lock);
    ended_.clear();
    const SteadyTime now = std::chrono::steady_clock::now();
    const bool starting = may_start(now);
    if (!starting && running_.empty() && ended_.empty()) break;
    if (now >= next_progress) {
      progress(snapshot());
      next_progress = now + to_duration(progress_seconds);
    }
    SteadyTime wake = next_progress;
    if (starting) wake = std::min(wake, begin_ + to_duration(options_.seconds));
    if (starting && options_.rate) wake = std::min(wake, next_arrival_);
    changed_.wait_until(lock, wake);
  }
  result_.started = static_cast<uint64_t>(started_);
  result_.seconds = std::chrono::duration<double>(last_end_ - begin_).count();
  progress(snapshot());
  return result_;
}

bool LoadRun::may_start(SteadyTime now) const {
  return !interrupted_ && started_ < options_.requests &&
         now - begin_ < to_duration(options_.seconds);
}

void LoadRun::start_due(Lock& lock) {
  while (true) {
    const SteadyTime now = std::chrono::steady_clock::now();
    if (!may_start(now)) return;
    if (!options_.rate) {
      if (static_cast<int64_t>(running_.size()) >= options_.concurrency) return;
      start_one(lock, now);
      continue;
    }
    if (next_arrival_ > now) return;
    // Latency counts from here even when this thread was late: a slow server must not look
    // better because its clients were kept from asking.
    const SteadyTime intended = next_arrival_;
    draw_next_arrival();
    if (static_cast<int64_t>(running_.size()) < options_.outstanding_max) {
      start_one(lock, intended);
    } else {
      ++started_;
      result_.add_failure("NOT_SENT", "more than --outstanding_max calls were running");
    }
  }
}

void LoadRun::draw_next_arrival() {
  std::exponential_distribution<double> gap(*options_.rate);
  next_arrival_ += to_duration(gap(random_));
}

void LoadRun::start_one(Lock& lock, SteadyTime intended) {
  const uint64_t index = static_cast<uint64_t>(started_++);
  lock.unlock();
  auto* call = new LoadCall(plan_.request(index), intended, &tokens_,
                            [this](LoadCall* self, CallRecord record) { done(self, record); });
  lock.lock();
  running_.insert(call);
  lock.unlock();
  call->start(*stubs_[index % stubs_.size()],
              std::chrono::system_clock::now() +
                  std::chrono::microseconds(static_cast<int64_t>(options_.timeout_s * 1e6)));
  lock.lock();
}

void LoadRun::done(LoadCall* call, const CallRecord& record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  running_.erase(call);
  ended_.emplace_back(call);
  result_.add(record);
  last_end_ = std::max(last_end_, record.finished);
  changed_.notify_one();
}

void LoadRun::interrupt() {
  const std::lock_guard<std::mutex> lock(mutex_);
  interrupted_ = true;
  for (LoadCall* call : running_) call->cancel();
  changed_.notify_one();
}

LoadProgress LoadRun::snapshot() const {
  const int64_t running = static_cast<int64_t>(running_.size());
  return {.seconds =
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(),
          .started = started_,
          .finished = started_ - running,
          .running = running,
          .tokens = tokens_.load(std::memory_order_relaxed)};
}

}  // namespace weir
