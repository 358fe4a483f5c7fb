#pragma once
#include <atomic>
#include <cstdint>

namespace weir {

// Whether calls are let in. One for the server; main turns it.
class Gate {
 public:
  enum class State : uint8_t { Loading, Ready, Draining };

  State state() const { return state_.load(std::memory_order_acquire); }
  void open() { state_.store(State::Ready, std::memory_order_release); }
  void drain() { state_.store(State::Draining, std::memory_order_release); }

  // Generate calls that exist; 0 after drain() stays 0 but for calls that are refused.
  int64_t calls() const { return calls_.load(std::memory_order_acquire); }
  void enter() { calls_.fetch_add(1, std::memory_order_acq_rel); }
  void leave() { calls_.fetch_sub(1, std::memory_order_acq_rel); }

 private:
  std::atomic<State> state_{State::Loading};
  std::atomic<int64_t> calls_{0};
};

}  // namespace weir
