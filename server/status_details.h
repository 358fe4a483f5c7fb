#pragma once
#include <string>

namespace weir {

// google.rpc.Status as bytes, for a status's `grpc-status-details-bin`. Debian has no package with
// the google.rpc messages; these few fields are written by hand. The field numbers are in
// google/rpc/status.proto and google/rpc/error_details.proto.

// With a google.rpc.RetryInfo.
std::string retry_details(int code, const std::string& message, double seconds);
// With a google.rpc.BadRequest of one violation.
std::string bad_request_details(int code, const std::string& message, const std::string& field,
                                const std::string& description);

}  // namespace weir
