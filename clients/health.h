#pragma once
#include <grpcpp/channel.h>

#include <memory>
#include <string>

namespace weir {

// grpc.health.v1.HealthCheckResponse.ServingStatus, and Unreachable when there was no answer.
enum class Health {
  Unreachable = -1,
  Unknown = 0,
  Serving = 1,
  NotServing = 2,
  ServiceUnknown = 3
};

// Asks once, for "" (the process) or a service's full name.
Health check_health(const std::shared_ptr<grpc::Channel>& channel, const std::string& service,
                    double timeout_s);

// Asks until the service is serving; false when it is not within `timeout_s`.
bool wait_until_serving(const std::shared_ptr<grpc::Channel>& channel, const std::string& service,
                        double timeout_s);

// The messages of grpc.health.v1, by hand: distributions do not ship its generated C++ code.
std::string health_request(const std::string& service);
Health parse_health(const std::string& response);

}  // namespace weir
