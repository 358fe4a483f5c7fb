#include "server/delivery.h"

namespace weir {

Delivery::Delivery() : thread_([this] { run(); }) {}

Delivery::~Delivery() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  pushed_.notify_one();
  thread_.join();
}

void Delivery::push(Deliverable& ready) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(&ready);
    wake = sleeping_;
    sleeping_ = false;  // one wake is enough, and it costs the engine a system call
  }
  if (wake) pushed_.notify_one();
}

void Delivery::run() {
  std::vector<Deliverable*> ready;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      while (queue_.empty() && !stopping_) {
        sleeping_ = true;
        pushed_.wait(lock);
      }
      sleeping_ = false;
      if (queue_.empty()) return;
      ready.swap(queue_);
    }
    for (Deliverable* call : ready) call->deliver();
    ready.clear();
  }
}

}  // namespace weir
