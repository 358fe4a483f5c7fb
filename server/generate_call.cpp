#include "server/generate_call.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"
#include "server/message.h"
#include "server/request_log.h"

namespace weir {
namespace {

double seconds(Nanoseconds from, Nanoseconds to) {
  return double(std::max<Nanoseconds>(to - from, 0)) * 1e-9;
}

Outcome outcome_of(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
    case v1::FINISH_REASON_STOP_STRING: return Outcome::Stop;
    case v1::FINISH_REASON_LENGTH: return Outcome::Length;
    case v1::FINISH_REASON_CANCELLED: return Outcome::Cancelled;
    case v1::FINISH_REASON_DEADLINE: return Outcome::Deadline;
    default: return Outcome::Failed;
  }
}

// From here on, a cancel is the deadline's work: the client's timer runs a little ahead of ours,
// because the deadline travels rounded up, by as much as one part in a hundred.
Nanoseconds late_from(Nanoseconds received, Nanoseconds deadline) {
  constexpr Nanoseconds kTravel = 20'000'000;
  if (deadline == kNever) return kNever;
  return deadline - kTravel - std::max<Nanoseconds>(deadline - received, 0) / 50;
}

}  // namespace

GenerateCall::GenerateCall(GenerateParameters parameters, const CallSupport& support,
                           Nanoseconds received, bool counted)
    : support_(support),
      counted_(counted),
      late_from_(late_from(received, parameters.request.deadline)),
      chunk_tokens_(parameters.answer.chunk_tokens),
      answer_(std::move(parameters), support.tokenizer, received) {
  support_.gate.enter();
}

Admission GenerateCall::submit() {
  const Engine::Submitted submitted =
      support_.engine.submit(answer_.parameters().request, *this);
  if (submitted.admission == Admission::Accepted) id_ = submitted.id;
  return submitted.admission;
}

void GenerateCall::refuse(const grpc::Status& status) {
  release();  // the engine never took its hold; gRPC still has its own
  Finish(status);
}

void GenerateCall::emit(const Emission& emission) {
  const bool last = emission.finish.has_value();
  bool hand_over = false;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      pending_.push_back({emission, Engine::now()});
      pending_tokens_ += emission.token.has_value();
      urgent_ |= last || !emission.prompt.empty();
      hand_over = !busy_ && ready();
      busy_ |= hand_over;
    }
  }
  if (hand_over) support_.delivery.push(*this);
  if (last) release();
}

bool GenerateCall::ready() const { return urgent_ || pending_tokens_ >= chunk_tokens_; }

void GenerateCall::deliver() {
  do {
    take();
    if (answer_.ended()) return close();
    if (broken_) {
      answer_.clear();
    } else if (answer_.worth_sending()) {
      return write();
    }
  } while (!rest());
}

void GenerateCall::take() {
  {
    const std::lock_guard lock(mutex_);
    taken_.swap(pending_);
    pending_tokens_ = 0;
    urgent_ = false;
  }
  for (const TimedEmission& timed : taken_) {
    id_ = timed.emission.id;  // submit() may not have come so far yet
    if (counted_) observe(timed);
    answer_.add(timed);
    if (answer_.ended()) break;
  }
  taken_.clear();
}

bool GenerateCall::rest() {
  const std::lock_guard lock(mutex_);
  if (ready()) return false;
  busy_ = false;
  return true;
}

void GenerateCall::write() {
  buffer_ = serialize(answer_.message());
  StartWrite(&buffer_);
}

void GenerateCall::OnWriteDone(bool ok) {
  if (ok) {
    if (counted_) support_.metrics.tokens_delivered(answer_.message_tokens());
  } else {
    broken_ = true;
    support_.engine.cancel(id_);
  }
  answer_.clear();
  if (!rest()) deliver();
}

void GenerateCall::OnCancel() {
  cancelled_ = true;
  support_.engine.cancel(id_);
}

void GenerateCall::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    pending_.clear();
  }
  // A stop string ends the call here, while the engine still draws.
  if (answer_.reason() == v1::FINISH_REASON_STOP_STRING) support_.engine.cancel(id_);
  const grpc::Status status = settle_reason();
  if (counted_) count_end();
  if (broken_) return Finish(status);
  answer_.finish_message();
  buffer_ = serialize(answer_.message());
  StartWriteAndFinish(&buffer_, grpc::WriteOptions(), status);
}

// What the client is told, and what the counters are: a client that left in time was cancelled,
// however far the engine had come.
grpc::Status GenerateCall::settle_reason() {
  const bool gone = broken_ || cancelled_;
  const bool cancelled = answer_.reason() == v1::FINISH_REASON_CANCELLED;
  const bool late = Engine::now() >= late_from_;
  if (gone || cancelled) {
    answer_.end(late ? v1::FINISH_REASON_DEADLINE : v1::FINISH_REASON_CANCELLED);
  }
  switch (answer_.reason()) {
    case v1::FINISH_REASON_CANCELLED:
      if (gone) return {grpc::StatusCode::CANCELLED, "cancelled by the client"};
      return {grpc::StatusCode::UNAVAILABLE, "the server is going down and the grace is over"};
    case v1::FINISH_REASON_DEADLINE:
      return {grpc::StatusCode::DEADLINE_EXCEEDED,
              answer_.started() == kNever ? "deadline exceeded while queued"
                                          : "deadline exceeded while running"};
    case v1::FINISH_REASON_ERROR:
      return {grpc::StatusCode::INTERNAL, "the model produced no finite number"};
    default: return grpc::Status::OK;
  }
}

// Before the answer takes the emission.
void GenerateCall::observe(const TimedEmission& timed) {
  Metrics& metrics = support_.metrics;
  if (answer_.started() == kNever && timed.emission.started_at != kNever) {
    metrics.queue_seconds(seconds(answer_.received(), timed.emission.started_at));
  }
  if (!timed.emission.token) return;
  if (answer_.generated() == 0) {
    metrics.time_to_first_token(seconds(answer_.received(), timed.at));
    metrics.prompt_tokens(answer_.prompt_tokens());
  } else {
    metrics.inter_token(seconds(answer_.last_token(), timed.at));
  }
}

void GenerateCall::count_end() {
  Metrics& metrics = support_.metrics;
  const Outcome outcome = outcome_of(answer_.reason());
  const Nanoseconds now = Engine::now();
  metrics.request_ended(Method::Generate, outcome);
  metrics.request_seconds(seconds(answer_.received(), now));
  if (outcome == Outcome::Cancelled || outcome == Outcome::Deadline) {
    const bool queued = answer_.started() == kNever;
    metrics.ended_early(outcome, queued ? Phase::Queued : Phase::Running);
  }
  if (!broken_ && !cancelled_) metrics.tokens_delivered(answer_.message_tokens());
  if (support_.log_requests) log_request(answer_, now);
}

}  // namespace weir
