#include "clients/interrupt_watch.h"

#include <ctime>
#include <unistd.h>
#include <utility>

namespace weir {

InterruptWatch::InterruptWatch(std::function<void()> on_signal) : on_signal_(std::move(on_signal)) {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  thread_ = std::thread([this] { watch(); });
}

InterruptWatch::~InterruptWatch() {
  over_ = true;
  thread_.join();
}

void InterruptWatch::watch() {
  // Short waits, because nothing but a signal could wake a longer one at the end.
  const timespec patience = {.tv_sec = 0, .tv_nsec = 50'000'000};
  while (!over_) {
    const int signal = sigtimedwait(&signals_, nullptr, &patience);
    if (signal <= 0) continue;
    if (received_ != 0) _exit(128 + signal);
    received_ = signal;
    on_signal_();
  }
}

}  // namespace weir
