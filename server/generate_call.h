#pragma once
#include <atomic>
#include <mutex>
#include <vector>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "engine/engine.h"
#include "server/answer.h"
#include "server/delivery.h"
#include "server/gate.h"
#include "server/metrics.h"

namespace weir {

// What all calls share; main owns it all, and it outlives them.
struct CallSupport {
  Engine& engine;
  Delivery& delivery;
  Metrics& metrics;
  Gate& gate;
  const Tokenizer& tokenizer;
  bool log_requests = false;
};

// One streaming call. gRPC and the engine each hold it: it goes when both are done.
//
// The engine thread appends to `pending_` and, when nobody works on the call, hands it to the
// delivery thread. Whoever set `busy_` owns everything not under the mutex: the delivery thread
// until it starts a write, then gRPC's OnWriteDone. What comes while a write is out joins the next
// message. The buffer needs no limit of its own: an answer is at most Limits::new_tokens tokens.
class GenerateCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                           public TokenSink,
                           public Deliverable {
 public:
  // `counted`: the metrics hear of it; the warm-up is nobody's request.
  GenerateCall(GenerateParameters parameters, const CallSupport& support, Nanoseconds received,
               bool counted);

  // Once, before the call is given to gRPC: sends it to the engine, or, when that does not accept
  // it, leaves it to refuse().
  Admission submit();
  void refuse(const grpc::Status& status);

  void emit(const Emission& emission) override;  // engine thread
  void deliver() override;                       // the delivery thread, or OnWriteDone
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { release(); }

 private:
  ~GenerateCall() override { support_.gate.leave(); }
  void release() {
    if (--holders_ == 0) delete this;
  }

  bool ready() const;  // mutex_ held
  void take();         // pending emissions into the answer
  bool rest();         // true: nothing to do, and the call may be gone
  void write();        // the call may be gone afterwards; so too after close()
  void close();
  grpc::Status settle_reason();
  void observe(const TimedEmission& timed);
  void count_end();

  const CallSupport& support_;
  const bool counted_;
  const Nanoseconds late_from_;
  const int32_t chunk_tokens_;

  std::mutex mutex_;
  std::vector<TimedEmission> pending_;
  int32_t pending_tokens_ = 0;
  bool urgent_ = false;  // something in pending_ does not wait for chunk_tokens_
  bool busy_ = false;
  bool closed_ = false;  // what still comes is of no interest

  Answer answer_;
  std::vector<TimedEmission> taken_;
  grpc::ByteBuffer buffer_;  // being written
  bool broken_ = false;      // a write failed: the client is gone

  std::atomic<SequenceId> id_{0};
  std::atomic<bool> cancelled_{false};  // by the client, or gRPC saw the deadline pass
  std::atomic<int> holders_{2};
};

}  // namespace weir
