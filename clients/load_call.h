#pragma once
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "weir/v1/generation.grpc.pb.h"

namespace weir {

using SteadyTime = std::chrono::steady_clock::time_point;

// What one call saw.
struct CallRecord {
  SteadyTime intended, finished;  // intended: when it should have begun, late or not
  std::optional<SteadyTime> first_token;
  struct Gap {
    double seconds_per_token = 0;
    uint32_t tokens = 0;
  };
  std::vector<Gap> gaps;  // between messages with tokens
  uint64_t prompt_tokens = 0, generated_tokens = 0;
  bool complete = false;  // a finish reason arrived
  grpc::Status status;
};

// One streaming call. `done` is told on a thread of gRPC's and may not destroy the call there: with
// it the last use of a channel could go, and a channel waits for gRPC's threads to end.
class LoadCall final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  using Done = std::function<void(LoadCall*, CallRecord)>;
  LoadCall(v1::GenerateRequest request, SteadyTime intended, std::atomic<uint64_t>* tokens,
           Done done);

  void start(v1::Generation::Stub& stub, std::chrono::system_clock::time_point deadline);
  void cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  void count_tokens(uint32_t tokens);

  const v1::GenerateRequest request_;
  grpc::ClientContext context_;
  v1::GenerateResponse response_;
  CallRecord record_;
  SteadyTime last_token_;
  std::atomic<uint64_t>* tokens_;  // of the whole run, for the progress line
  Done done_;
};

}  // namespace weir
