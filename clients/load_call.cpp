#include "clients/load_call.h"

#include <utility>

namespace weir {

LoadCall::LoadCall(v1::GenerateRequest request, SteadyTime intended, std::atomic<uint64_t>* tokens,
                   Done done)
    : request_(std::move(request)), tokens_(tokens), done_(std::move(done)) {
  record_.intended = intended;
}

void LoadCall::start(v1::Generation::Stub& stub, std::chrono::system_clock::time_point deadline) {
  context_.set_deadline(deadline);
  stub.async()->Generate(&context_, &request_, this);
  StartRead(&response_);
  StartCall();
}

void LoadCall::OnReadDone(bool ok) {
  if (!ok) return;  // OnDone follows
  const uint32_t tokens = static_cast<uint32_t>(response_.token_ids_size());
  if (tokens > 0) count_tokens(tokens);
  if (response_.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) {
    record_.complete = true;
    record_.prompt_tokens = response_.usage().prompt_tokens();
  }
  StartRead(&response_);
}

void LoadCall::count_tokens(uint32_t tokens) {
  const SteadyTime now = std::chrono::steady_clock::now();
  if (record_.first_token) {
    const std::chrono::duration<double> gap = now - last_token_;
    record_.gaps.push_back({.seconds_per_token = gap.count() / tokens, .tokens = tokens});
  } else {
    record_.first_token = now;
  }
  last_token_ = now;
  record_.generated_tokens += tokens;
  tokens_->fetch_add(tokens, std::memory_order_relaxed);
}

void LoadCall::OnDone(const grpc::Status& status) {
  record_.finished = std::chrono::steady_clock::now();
  record_.status = status;
  // From here on the owner may destroy this object.
  const Done done = std::move(done_);
  done(this, std::move(record_));
}

}  // namespace weir
