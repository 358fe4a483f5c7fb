#include "clients/status_text.h"

#include <array>

namespace weir {

std::string code_name(grpc::StatusCode code) {
  static constexpr std::array<const char*, 17> kNames = {
      "OK",            "CANCELLED",          "UNKNOWN",           "INVALID_ARGUMENT",
      "DEADLINE_EXCEEDED", "NOT_FOUND",      "ALREADY_EXISTS",    "PERMISSION_DENIED",
      "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",     "OUT_OF_RANGE",
      "UNIMPLEMENTED", "INTERNAL",           "UNAVAILABLE",       "DATA_LOSS",
      "UNAUTHENTICATED"};
  const size_t index = static_cast<size_t>(code);
  return index < kNames.size() ? kNames[index] : "CODE_" + std::to_string(index);
}

std::string status_line(const grpc::Status& status) {
  std::string line = code_name(status.error_code()) + ": ";
  for (const char c : status.error_message()) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    line += control ? ' ' : c;
  }
  return line;
}

}  // namespace weir
