#pragma once
#include <chrono>
#include <cstdint>
#include <memory>

#include <grpcpp/channel.h>
#include <grpcpp/server.h>

#include "absl/status/statusor.h"
#include "server/flags.h"

namespace weir {

// The listening server: port, credentials, limits, health and reflection. `service` outlives it.
//
// Health: "" is the process and SERVING while it lives; "weir.v1.Generation" is SERVING while new
// calls are welcome.
class GrpcServer {
 public:
  static absl::StatusOr<std::unique_ptr<GrpcServer>> start(const Options& options,
                                                           grpc::Service& service);

  int32_t port() const { return port_; }
  void set_ready(bool ready);
  std::shared_ptr<grpc::Channel> in_process_channel();
  // No new connections; what still runs after `grace` is cancelled. Returns when all is done.
  void shut_down(std::chrono::milliseconds grace);

 private:
  GrpcServer(std::unique_ptr<grpc::Server> server, int32_t port);

  std::unique_ptr<grpc::Server> server_;
  int32_t port_ = 0;
};

}  // namespace weir
