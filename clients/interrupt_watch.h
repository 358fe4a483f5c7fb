#pragma once
#include <atomic>
#include <csignal>
#include <functional>
#include <thread>

namespace weir {

// Turns SIGINT and SIGTERM into a call of `on_signal`, on a thread of its own, where any function
// may be called. A second signal ends the process at once. Construct it before other threads
// start: they must inherit that these signals are blocked.
class InterruptWatch {
 public:
  explicit InterruptWatch(std::function<void()> on_signal);
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

  int received() const { return received_; }  // the first signal, or 0

 private:
  void watch();

  std::function<void()> on_signal_;
  sigset_t signals_;
  std::atomic<int> received_ = 0;
  std::atomic<bool> over_ = false;
  std::thread thread_;
};

}  // namespace weir
