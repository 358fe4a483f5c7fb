#pragma once
#include <memory>
#include <string>

#include <grpcpp/channel.h>

#include "absl/status/status.h"

namespace weir {

// One short Generate call over `channel`, with this request id: the whole real path once, before
// anybody waits for it.
absl::Status warm_up(const std::shared_ptr<grpc::Channel>& channel, const std::string& request_id);

}  // namespace weir
