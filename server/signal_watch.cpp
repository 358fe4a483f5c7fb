#include "server/signal_watch.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>

namespace weir {
namespace {

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
      std::fputs("weir-server: second signal, ending at once\n", stderr);
      _exit(1);
    }
    signalled_ = true;
    changed_.notify_all();
  }
}

}  // namespace weir
