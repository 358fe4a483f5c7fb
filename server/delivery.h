#pragma once
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace weir {

// What has something to deliver. It is in the queue at most once at a time, and lives until
// deliver() was called.
class Deliverable {
 public:
  virtual ~Deliverable() = default;
  virtual void deliver() = 0;
};

// The thread between the engine and gRPC: text, protobuf and writes happen here, so that the
// engine thread only appends to a buffer. Owned by main; outlives the engine and all calls.
class Delivery {
 public:
  Delivery();
  ~Delivery();  // delivers what is queued, and joins

  void push(Deliverable& ready);  // from any thread

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable pushed_;
  std::vector<Deliverable*> queue_;
  bool sleeping_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace weir
