#include "server/request_log.h"

#include <cstdio>
#include <string>

#include "nlohmann/json.hpp"

namespace weir {
namespace {

double seconds(Nanoseconds from, Nanoseconds to) {
  return from == kNever || to == kNever ? 0 : double(to - from) * 1e-9;
}

}  // namespace

void log_request(const Answer& answer, Nanoseconds now) {
  const GenerateParameters& parameters = answer.parameters();
  const nlohmann::json line = {
      {"event", "request"},
      {"request_id", parameters.effective.request_id()},
      {"tenant", parameters.tenant},
      {"finish_reason", v1::FinishReason_Name(answer.reason())},
      {"prompt_tokens", answer.prompt_tokens()},
      {"generated_tokens", answer.generated()},
      {"queue_seconds", seconds(answer.received(), answer.started())},
      {"first_token_seconds", seconds(answer.received(), answer.first_token())},
      {"seconds", seconds(answer.received(), now)},
  };
  const std::string text = line.dump() + "\n";
  std::fwrite(text.data(), 1, text.size(), stderr);
}

}  // namespace weir
