#pragma once
#include <memory>
#include <string>

#include <prometheus/exposer.h>

#include "absl/status/statusor.h"

namespace weir {

// The HTTP port that metrics are read from. Its library looks only every two seconds whether it
// shall stop, or when somebody connects: the destructor connects, so that going down takes no time.
class MetricsEndpoint {
 public:
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> start(const std::string& host, int port);
  ~MetricsEndpoint();

  void add(const std::shared_ptr<prometheus::Collectable>& collectable);
  int port() const { return port_; }

 private:
  MetricsEndpoint(const std::string& host, std::unique_ptr<prometheus::Exposer> exposer);

  const std::string host_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  const int port_;
};

}  // namespace weir
