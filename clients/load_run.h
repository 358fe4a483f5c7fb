#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "clients/load_call.h"
#include "clients/load_plan.h"
#include "clients/load_report.h"

namespace weir {

struct LoadOptions {
  int concurrency = 8;          // closed loop: as many calls at any time
  std::optional<double> rate;   // open loop: calls a second, Poisson; then concurrency is unused
  int64_t requests = 100;       // no more are started
  double seconds = 60;          // none is started later
  double timeout_s = 120;       // of each call
  int64_t outstanding_max = 4096;  // open loop: calls beyond are not sent, and count as failed
  uint64_t seed = 1;            // of the arrivals
};

struct LoadProgress {
  double seconds = 0;
  int64_t started = 0, finished = 0, running = 0;
  uint64_t tokens = 0;
};

// Runs a load. One thread starts the calls; gRPC's threads report what came of them.
class LoadRun {
 public:
  LoadRun(LoadOptions options, const LoadPlan& plan,
          std::vector<std::unique_ptr<v1::Generation::Stub>> stubs);

  // Blocks. `progress` is called about every `progress_seconds`, and once at the end.
  LoadResult run(const std::function<void(const LoadProgress&)>& progress,
                 double progress_seconds);
  // From any thread: starts no more and cancels what runs.
  void interrupt();

 private:
  using Lock = std::unique_lock<std::mutex>;

  bool may_start(SteadyTime now) const;
  void start_due(Lock& lock);
  void start_one(Lock& lock, SteadyTime intended);
  void done(LoadCall* call, const CallRecord& record);
  void draw_next_arrival();
  LoadProgress snapshot() const;

  const LoadOptions options_;
  const LoadPlan& plan_;
  const std::vector<std::unique_ptr<v1::Generation::Stub>> stubs_;
  std::mt19937_64 random_;
  SteadyTime begin_, next_arrival_;

  std::atomic<uint64_t> tokens_ = 0;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::unordered_set<LoadCall*> running_;
  std::vector<std::unique_ptr<LoadCall>> ended_;  // until the thread of run() destroys them
  int64_t started_ = 0;
  SteadyTime last_end_;
  bool interrupted_ = false;
  LoadResult result_;
};

}  // namespace weir
