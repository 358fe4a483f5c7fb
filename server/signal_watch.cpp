#include "server/signal_watch.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace weir {
namespace {

using Clock = std::chrono::steady_clock;

// timeout(1) signals a process and then its group, which has the process in it: one wish, and two
// signals. So does a terminal's Ctrl-C through a wrapper that hands it on.
constexpr std::chrono::milliseconds kSameWish{1000};

// SIGUSR1 is only how the destructor wakes the thread.
sigset_t watched() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGUSR1);
  return set;
}

}  // namespace

SignalWatch::SignalWatch() {
  const sigset_t set = watched();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this] { run(); });
}

SignalWatch::~SignalWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  pthread_kill(thread_.native_handle(), SIGUSR1);
  thread_.join();
}

void SignalWatch::serving() {
  const std::lock_guard lock(mutex_);
  serving_ = true;
}

void SignalWatch::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return signalled_; });
}

void SignalWatch::run() {
  const sigset_t set = watched();
  int first = 0;
  Clock::time_point first_at;
  while (true) {
    int signal = 0;
    if (sigwait(&set, &signal) != 0) continue;
    const std::lock_guard lock(mutex_);
    if (signal == SIGUSR1) {
      if (stopping_) return;
      continue;
    }
    if (!serving_) {
      std::fputs("weir-server: stopped before it was ready\n", stderr);
      _exit(0);
    }
    if (signalled_) {
      if (signal == first && Clock::now() - first_at < kSameWish) continue;
      std::fputs("weir-server: second signal, ending at once\n", stderr);
      _exit(1);
    }
    signalled_ = true;
    first = signal;
    first_at = Clock::now();
    changed_.notify_all();
  }
}

}  // namespace weir
