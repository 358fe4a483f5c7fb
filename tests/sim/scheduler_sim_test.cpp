// Random days of traffic through the scheduler on the hash model.
// usage: scheduler_sim_test [FIRST_SEED [DAYS]]; a day that fails prints its seed.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "tests/sim/simulated_day.h"

namespace {

// For the signal handler alone, which takes no argument.
volatile uint64_t current_seed = 0;

// Checks abort, the scheduler's own among them; the seed is what replays them.
void print_seed(int) {
  char line[64];
  const int length = std::snprintf(line, sizeof line, "failed on the day of seed %llu\n",
                                   static_cast<unsigned long long>(current_seed));
  if (write(STDERR_FILENO, line, size_t(length)) != length) _exit(2);
}

bool saw_everything(const weir::DayCounts& counts) {
  using enum weir::Admission;
  bool all = counts.ended_in_queue > 0 && counts.cancelled_mid_step > 0 &&
             counts.waited_for_pages > 0 && counts.prompt_scores > 0 && counts.ahead > 0 &&
             counts.rows_in_vain > 0 && counts.kept > 0 && counts.kept_in_vain > 0 &&
             counts.started_from > 0 && counts.dropped_before_start > 0;
  for (const int64_t count : counts.finishes) all = all && count > 0;
  for (const auto admission : {Accepted, QueueFull, EmptyPrompt, PromptTooLong, BadToken, BadLength,
                               TooManyPages, BadSampling, BadSnapshot, NoSnapshotFree,
                               UnknownSnapshot, SnapshotOfPages}) {
    all = all && counts.admissions[size_t(admission)] > 0;
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr uint64_t kDays = 3'000;
  const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const uint64_t days = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : argc > 1 ? 1 : kDays;
  std::signal(SIGABRT, print_seed);
  weir::DayCounts counts;
  for (uint64_t seed = first; seed < first + days; ++seed) {
    current_seed = seed;
    weir::SimulatedDay(seed, counts).run();
  }
  const auto& [stop, length, cancelled, deadline, error] = counts.finishes;
  std::printf("%llu days, %lld steps, %lld tokens and %lld prompt scores checked\n",
              static_cast<unsigned long long>(days), static_cast<long long>(counts.steps),
              static_cast<long long>(counts.tokens), static_cast<long long>(counts.prompt_scores));
  std::printf("%lld steps ahead of the last one's answers, %lld rows in vain\n",
              static_cast<long long>(counts.ahead), static_cast<long long>(counts.rows_in_vain));
  std::printf("%lld snapshots, %lld sequences started from one\n",
              static_cast<long long>(counts.kept), static_cast<long long>(counts.started_from));
  std::printf("ends: stop %lld, length %lld, cancelled %lld, deadline %lld, error %lld\n",
              static_cast<long long>(stop), static_cast<long long>(length),
              static_cast<long long>(cancelled), static_cast<long long>(deadline),
              static_cast<long long>(error));
  if (days >= 500 && !saw_everything(counts)) {
    std::fprintf(stderr, "something that days should contain never happened\n");
    return 1;
  }
  return 0;
}
