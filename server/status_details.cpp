#include "server/status_details.h"

#include <cmath>
#include <cstdint>

#include <google/protobuf/unknown_field_set.h>

namespace weir {
namespace {

using google::protobuf::UnknownFieldSet;

std::string bytes(const UnknownFieldSet& fields) {
  std::string out;
  fields.SerializeToString(&out);
  return out;
}

std::string status(int code, const std::string& message, const char* type,
                   const std::string& detail) {
  UnknownFieldSet any;
  any.AddLengthDelimited(1, std::string("type.googleapis.com/google.rpc.") + type);
  any.AddLengthDelimited(2, detail);
  UnknownFieldSet status;
  status.AddVarint(1, uint64_t(code));
  status.AddLengthDelimited(2, message);
  status.AddLengthDelimited(3, bytes(any));
  return bytes(status);
}

}  // namespace

std::string retry_details(int code, const std::string& message, double seconds) {
  const double whole = std::floor(seconds);
  UnknownFieldSet duration;
  duration.AddVarint(1, uint64_t(whole));
  duration.AddVarint(2, uint64_t((seconds - whole) * 1e9));
  UnknownFieldSet retry_info;
  retry_info.AddLengthDelimited(1, bytes(duration));
  return status(code, message, "RetryInfo", bytes(retry_info));
}

std::string bad_request_details(int code, const std::string& message, const std::string& field,
                                const std::string& description) {
  UnknownFieldSet violation;
  violation.AddLengthDelimited(1, field);
  violation.AddLengthDelimited(2, description);
  UnknownFieldSet bad_request;
  bad_request.AddLengthDelimited(1, bytes(violation));
  return status(code, message, "BadRequest", bytes(bad_request));
}

}  // namespace weir
