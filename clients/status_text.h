#pragma once
#include <grpcpp/support/status.h>

#include <string>

namespace weir {

// The code as gRPC writes it: "INVALID_ARGUMENT".
std::string code_name(grpc::StatusCode code);

// "CODE: message" on one line, whatever the message holds.
std::string status_line(const grpc::Status& status);

}  // namespace weir
