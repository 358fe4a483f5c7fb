#include "server/warm_up.h"

#include <chrono>

#include <grpcpp/client_context.h>

#include "absl/strings/str_cat.h"
#include "weir/v1/generation.grpc.pb.h"

namespace weir {

absl::Status warm_up(const std::shared_ptr<grpc::Channel>& channel, const std::string& request_id) {
  v1::GenerateRequest request;
  request.set_prompt("Water flows");
  request.set_request_id(request_id);
  request.mutable_stop()->set_ignore_eos(true);
  request.mutable_stop()->set_max_tokens(1);

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(10));
  const auto stub = v1::Generation::NewStub(channel);
  const auto stream = stub->Generate(&context, request);
  v1::GenerateResponse response;
  bool finished = false;
  while (stream->Read(&response)) {
    finished |= response.finish_reason() == v1::FINISH_REASON_LENGTH;
  }
  const grpc::Status status = stream->Finish();
  if (status.ok() && finished) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the warm-up request failed: ",
                                          status.ok() ? "it did not finish"
                                                      : status.error_message()));
}

}  // namespace weir
