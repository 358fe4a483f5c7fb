#include "clients/load_report.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "clients/status_text.h"

namespace weir {

namespace {

constexpr double kLowestSeconds = 1e-6, kGrowth = 1.01;
constexpr size_t kBuckets = 2540;  // up to 1e-6 * 1.01^2540 s, a little more than a day

struct Row {
  const char* title;
  const char* key;
  const LatencyHistogram* histogram;
};

std::vector<Row> rows(const LoadResult& result) {
  return {{"time to first token", "time_to_first_token", &result.first_token},
          {"inter-token", "inter_token", &result.inter_token},
          {"end to end", "end_to_end", &result.end_to_end}};
}

double rate(double count, double seconds) { return seconds > 0 ? count / seconds : 0; }

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* pattern, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(buffer, sizeof buffer, pattern, arguments);
  va_end(arguments);
  return buffer;
}

}  // namespace

LatencyHistogram::LatencyHistogram() : buckets_(kBuckets) {}

void LatencyHistogram::add(double seconds, uint64_t weight) {
  const double place = std::log(std::max(seconds, kLowestSeconds) / kLowestSeconds) /
                       std::log(kGrowth);
  buckets_[std::min(kBuckets - 1, static_cast<size_t>(place))] += weight;
  count_ += weight;
  sum_ += seconds * static_cast<double>(weight);
  max_ = std::max(max_, seconds);
}

double LatencyHistogram::quantile(double q) const {
  const uint64_t rank = static_cast<uint64_t>(std::ceil(q * static_cast<double>(count_)));
  uint64_t seen = 0;
  for (size_t i = 0; i < kBuckets; ++i) {
    seen += buckets_[i];
    if (seen > 0 && seen >= rank) {
      return std::min(max_, kLowestSeconds * std::pow(kGrowth, static_cast<double>(i) + 0.5));
    }
  }
  return 0;
}

void LoadResult::add_failure(const std::string& code, const std::string& message) {
  Failure& failure = failures[code];
  if (failure.count++ == 0) failure.example = message;
}

void LoadResult::add(const CallRecord& record) {
  using Seconds = std::chrono::duration<double>;
  generated_tokens += record.generated_tokens;
  prompt_tokens += record.prompt_tokens;
  if (record.first_token) first_token.add(Seconds(*record.first_token - record.intended).count());
  for (const CallRecord::Gap& gap : record.gaps) inter_token.add(gap.seconds_per_token, gap.tokens);
  if (!record.status.ok()) {
    add_failure(code_name(record.status.error_code()), record.status.error_message());
  } else if (!record.complete) {
    add_failure("INCOMPLETE", "the stream ended without a finish reason");
  } else {
    ++ok;
    end_to_end.add(Seconds(record.finished - record.intended).count());
  }
}

std::string to_table(const LoadSettings& settings, const LoadResult& result) {
  std::string out;
  for (const auto& [name, value] : settings) {
    out += format("%-22s %s\n", name.c_str(), value.c_str());
  }
  out += format("\n%-22s %10s %10s %10s %10s %10s\n", "milliseconds", "p50", "p90", "p99", "max",
                "mean");
  for (const Row& row : rows(result)) {
    const LatencyHistogram& h = *row.histogram;
    out += format("%-22s %10.2f %10.2f %10.2f %10.2f %10.2f\n", row.title, h.quantile(0.5) * 1e3,
                  h.quantile(0.9) * 1e3, h.quantile(0.99) * 1e3, h.max() * 1e3, h.mean() * 1e3);
  }
  const double tokens = static_cast<double>(result.generated_tokens);
  out += format("\n%-22s %.2f\n", "seconds", result.seconds);
  out += format("%-22s %llu started, %llu ok, %.2f ok/s\n", "requests",
                static_cast<unsigned long long>(result.started),
                static_cast<unsigned long long>(result.ok),
                rate(static_cast<double>(result.ok), result.seconds));
  out += format("%-22s %llu prompt, %llu generated, %.1f generated/s\n", "tokens",
                static_cast<unsigned long long>(result.prompt_tokens),
                static_cast<unsigned long long>(result.generated_tokens),
                rate(tokens, result.seconds));
  if (result.failures.empty()) out += format("%-22s none\n", "errors");
  for (const auto& [code, failure] : result.failures) {
    out += format("%-22s %llu, e.g. %.300s\n", code.c_str(),
                  static_cast<unsigned long long>(failure.count), failure.example.c_str());
  }
  return out;
}

std::string to_json(const LoadSettings& settings, const LoadResult& result) {
  nlohmann::ordered_json out;
  for (const auto& [name, value] : settings) out["settings"][name] = value;
  out["seconds"] = result.seconds;
  out["requests"] = {{"started", result.started},
                     {"ok", result.ok},
                     {"ok_per_second", rate(static_cast<double>(result.ok), result.seconds)}};
  out["tokens"] = {
      {"prompt", result.prompt_tokens},
      {"generated", result.generated_tokens},
      {"generated_per_second",
       rate(static_cast<double>(result.generated_tokens), result.seconds)}};
  for (const Row& row : rows(result)) {
    const LatencyHistogram& h = *row.histogram;
    out["latency_seconds"][row.key] = {
        {"count", h.count()},        {"mean", h.mean()},          {"p50", h.quantile(0.5)},
        {"p90", h.quantile(0.9)},    {"p99", h.quantile(0.99)},   {"max", h.max()}};
  }
  out["errors"] = nlohmann::ordered_json::object();
  for (const auto& [code, failure] : result.failures) {
    out["errors"][code] = {{"count", failure.count}, {"example", failure.example}};
  }
  // A server's message need not be UTF-8.
  return out.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace weir
