#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "clients/load_call.h"

namespace weir {

// Durations in buckets 1 % apart, from a microsecond to a day: bounded memory for any run.
class LatencyHistogram {
 public:
  LatencyHistogram();
  void add(double seconds, uint64_t weight = 1);
  double quantile(double q) const;  // 0 when empty
  double mean() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }
  double max() const { return max_; }
  uint64_t count() const { return count_; }

 private:
  std::vector<uint64_t> buckets_;
  uint64_t count_ = 0;
  double sum_ = 0, max_ = 0;
};

// All that a run saw.
struct LoadResult {
  LatencyHistogram first_token, inter_token;  // of every call that got that far
  LatencyHistogram end_to_end;                // of the calls that ended well
  uint64_t started = 0, ok = 0;
  uint64_t prompt_tokens = 0, generated_tokens = 0;
  struct Failure {
    uint64_t count = 0;
    std::string example;  // the first message seen
  };
  std::map<std::string, Failure> failures;  // by code
  double seconds = 0;                       // from the first start to the last end

  void add(const CallRecord& record);
  void add_failure(const std::string& code, const std::string& message);
};

// The name of the run's setting and its value, in order of printing.
using LoadSettings = std::vector<std::pair<std::string, std::string>>;

std::string to_table(const LoadSettings& settings, const LoadResult& result);
std::string to_json(const LoadSettings& settings, const LoadResult& result);

}  // namespace weir
