#include "server/metrics_endpoint.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/flags.h"

namespace weir {
namespace {

// Connects and hangs up. That nobody answers is no matter: then nobody is left to be woken.
void knock(const std::string& host, int port) {
  const bool brackets = host.size() > 2 && host.front() == '[';
  const std::string name = brackets ? host.substr(1, host.size() - 2) : host;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(name.c_str(), absl::StrCat(port).c_str(), &hints, &found) != 0) return;
  const int file = socket(found->ai_family, found->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (file >= 0) {
    // On loopback a connection is made at once, or waits in the listener's queue without us.
    static_cast<void>(connect(file, found->ai_addr, found->ai_addrlen));
    close(file);
  }
  freeaddrinfo(found);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::start(const std::string& host,
                                                                        int port) {
  const std::string where = address(host, port);
  try {  // the library's way to say that the port is taken
    auto exposer = std::make_unique<prometheus::Exposer>(where);
    return std::unique_ptr<MetricsEndpoint>(new MetricsEndpoint(host, std::move(exposer)));
  } catch (const std::exception&) {
    return absl::UnavailableError(absl::StrCat(
        "--metrics_host, --metrics_port: expected an address to listen on, found ", where,
        ", which is taken or not ours"));
  }
}

MetricsEndpoint::MetricsEndpoint(const std::string& host,
                                 std::unique_ptr<prometheus::Exposer> exposer)
    : host_(host), exposer_(std::move(exposer)), port_(exposer_->GetListeningPorts().front()) {}

MetricsEndpoint::~MetricsEndpoint() {
  std::atomic<bool> stopped = false;
  std::thread knocking([this, &stopped] {
    // More than once: the first may come before the library has been told to stop.
    while (!stopped) {
      knock(host_, port_);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  exposer_.reset();
  stopped = true;
  knocking.join();
}

void MetricsEndpoint::add(const std::shared_ptr<prometheus::Collectable>& collectable) {
  exposer_->RegisterCollectable(collectable);
}

}  // namespace weir
