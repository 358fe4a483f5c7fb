#pragma once
#include <condition_variable>
#include <mutex>
#include <thread>

namespace weir {

// SIGTERM and SIGINT, as something to wait for. To be made before any other thread exists: threads
// inherit that the signals are blocked, and only this one's thread takes them.
class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();

  // Until then a signal ends the process at once, exit code 0: there is nothing to finish.
  void serving();
  // Returns at the first signal after that. A second one ends the process, exit code 1; the same
  // signal again within a second counts as the first.
  void wait();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool serving_ = false, stopping_ = false, signalled_ = false;
  std::thread thread_;
};

}  // namespace weir
