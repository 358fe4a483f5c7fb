#include "engine/request.h"

#include <algorithm>
#include <cmath>

namespace weir {
namespace {

// Comparisons are written so that NaN fails them.
bool good_sampling(const Sampling& sampling, int32_t vocab) {
  const auto share = [](float value) { return value > 0 && value <= 1; };
  return std::isfinite(sampling.temperature) && sampling.temperature >= 0 &&
         sampling.top_k >= 0 && sampling.top_k <= vocab && share(sampling.top_p) &&
         share(sampling.typical_p) && sampling.min_p >= 0 && sampling.min_p <= 1 &&
         std::isfinite(sampling.repetition_penalty) && sampling.repetition_penalty > 0 &&
         std::isfinite(sampling.frequency_penalty) && std::isfinite(sampling.presence_penalty);
}

// Minus infinity forbids a token; plus infinity would leave no finite distribution.
bool good_bias(const std::pair<Token, float>& bias) { return bias.second < INFINITY; }

// What of its snapshots a request says by itself: SnapshotLedger::check() knows which there are.
Admission check_snapshots(const Request& request, const Limits& limits) {
  if (request.snapshots.empty() && request.start_from == kNoSnapshot) return Admission::Accepted;
  if (limits.pages > 0) return Admission::SnapshotOfPages;
  if (request.start_from != kNoSnapshot && request.prompt_logprobs) return Admission::BadSnapshot;
  int32_t before = 0;
  for (const int32_t position : request.snapshots) {
    if (position <= before || size_t(position) > request.prompt.size()) {
      return Admission::BadSnapshot;
    }
    before = position;
  }
  return request.snapshots.size() > size_t(limits.snapshots) ? Admission::NoSnapshotFree
                                                             : Admission::Accepted;
}

}  // namespace

Admission check(const Request& request, const Limits& limits) {
  const auto known = [&](Token token) { return token >= 0 && token < limits.vocab; };
  if (request.prompt.empty()) return Admission::EmptyPrompt;
  if (request.prompt.size() > size_t(limits.prompt_tokens)) return Admission::PromptTooLong;
  if (!std::ranges::all_of(request.prompt, known) || !std::ranges::all_of(request.stop, known) ||
      !std::ranges::all_of(request.logit_bias, known, &std::pair<Token, float>::first)) {
    return Admission::BadToken;
  }
  if (request.new_tokens < 1 || request.new_tokens > limits.new_tokens ||
      request.min_tokens < 0 || request.min_tokens > request.new_tokens) {
    return Admission::BadLength;
  }
  if (pages_for(request, limits) > limits.pages) return Admission::TooManyPages;
  if (!good_sampling(request.sampling, limits.vocab) ||
      !std::ranges::all_of(request.logit_bias, good_bias) || request.top_logprobs < 0 ||
      request.top_logprobs > Sample::kTop) {
    return Admission::BadSampling;
  }
  return check_snapshots(request, limits);
}

int64_t pages_for(const Request& request, const Limits& limits) {
  if (limits.pages == 0) return 0;
  const int64_t read = int64_t(request.prompt.size()) + request.new_tokens - 1;
  return (read + limits.page_tokens - 1) / limits.page_tokens;
}

}  // namespace weir
