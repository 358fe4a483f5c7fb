#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "server/generate_call.h"
#include "server/served_model.h"
#include "weir/v1/generation.grpc.pb.h"

namespace weir {

// weir.v1.Generation at the door: parses, checks, and hands on. Its methods take bytes: see
// message.h.
class GenerationService final
    : public v1::Generation::WithRawCallbackMethod_Generate<
          v1::Generation::WithRawCallbackMethod_Tokenize<
              v1::Generation::WithRawCallbackMethod_Detokenize<
                  v1::Generation::WithRawCallbackMethod_GetModel<v1::Generation::Service>>>> {
 public:
  // Until the gate is open, only a Generate call with the id `warm_up_id` is let in.
  GenerationService(const ServedModel& model, const CallSupport& support, std::string warm_up_id);

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;

 private:
  grpc::ServerWriteReactor<grpc::ByteBuffer>* refuse(Method method, const grpc::Status& status);
  grpc::Status not_open(Method method);
  grpc::Status no_message(Method method);
  template <typename RequestMessage, typename ResponseMessage, typename Answer>
  grpc::ServerUnaryReactor* unary(Method method, grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request, grpc::ByteBuffer* response,
                                  Answer answer);
  std::string next_request_id();

  const ServedModel& model_;
  const CallSupport& support_;
  const std::string warm_up_id_;
  std::atomic<uint64_t> last_request_;  // starts anywhere, so that ids differ between servers
};

}  // namespace weir
