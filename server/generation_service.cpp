#include "server/generation_service.h"

#include <chrono>
#include <cstdio>
#include <random>
#include <utility>
#include <variant>

#include <google/protobuf/arena.h>

#include "kernels/check.h"
#include "server/message.h"
#include "server/status_details.h"
#include "server/text_methods.h"

namespace weir {
namespace {

using grpc::Status;
using grpc::StatusCode;

// A stream that ends before it begins.
class Refused final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  explicit Refused(const Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

constexpr double kRetrySeconds = 1;

Status status_of(const Refusal& refusal) {
  const std::string message = refusal.field + ": " + refusal.problem;
  if (refusal.not_found) return {StatusCode::NOT_FOUND, message};
  const StatusCode code = StatusCode::INVALID_ARGUMENT;
  return {code, message, bad_request_details(code, message, refusal.field, refusal.problem)};
}

// An engine's answer to a request that read_parameters() let pass. Most of it says the same as
// the checks there.
Status status_of(Admission admission) {
  switch (admission) {
    case Admission::QueueFull: {
      const StatusCode code = StatusCode::RESOURCE_EXHAUSTED;
      const std::string message = "the queue is full; try again later";
      return {code, message, retry_details(code, message, kRetrySeconds)};
    }
    case Admission::TooManyPages:
      return status_of(Refusal{.field = "stop.max_tokens",
                               .problem = "prompt and answer together need more KV pages than "
                                          "there are: a shorter prompt or a smaller number"});
    case Admission::EmptyPrompt:
    case Admission::PromptTooLong:
      return status_of(Refusal{.field = "prompt", .problem = "its length is not served"});
    case Admission::BadToken:
      return status_of(Refusal{.field = "token_ids", .problem = "an id is outside the vocabulary"});
    case Admission::BadLength:
      return status_of(Refusal{.field = "stop", .problem = "the lengths are not served"});
    case Admission::BadSampling:
      return status_of(Refusal{.field = "sampling", .problem = "a number is out of its range"});
    case Admission::BadSnapshot:
    case Admission::NoSnapshotFree:
    case Admission::UnknownSnapshot:
    case Admission::SnapshotOfPages: break;  // no call asks for one
    case Admission::Accepted: break;
  }
  WEIR_UNREACHABLE("an accepted request has no such status");
}

// The call's deadline on the engine's clock.
Nanoseconds deadline_of(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return kNever;
  const auto left = deadline - std::chrono::system_clock::now();
  if (left > std::chrono::hours(24 * 365)) return kNever;  // more than any clock need hold
  return Engine::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
}

uint64_t random_number() {
  std::random_device device;
  return (uint64_t(device()) << 32) | device();
}

}  // namespace

GenerationService::GenerationService(const ServedModel& model, const CallSupport& support,
                                     std::string warm_up_id)
    : model_(model),
      support_(support),
      warm_up_id_(std::move(warm_up_id)),
      last_request_(random_number()) {}

grpc::ServerWriteReactor<grpc::ByteBuffer>* GenerationService::Generate(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  const Nanoseconds received = Engine::now();
  if (!request->Valid()) return new Refused(no_message(Method::Generate));
  google::protobuf::Arena arena;
  auto& message = *google::protobuf::Arena::CreateMessage<v1::GenerateRequest>(&arena);
  const ParseProblem problem = parse(*request, message);
  const bool warm_up = support_.gate.state() == Gate::State::Loading && !problem.failed &&
                       message.request_id() == warm_up_id_;
  if (!warm_up) {
    if (Status status = not_open(Method::Generate); !status.ok()) return new Refused(status);
  }
  if (problem.failed) {
    return refuse(Method::Generate,
                  status_of(Refusal{.field = problem.field, .problem = problem.problem}));
  }
  const RequestDefaults defaults{.seed = random_number(), .request_id = next_request_id()};
  auto read = read_parameters(message, model_, defaults);
  if (const Refusal* refusal = std::get_if<Refusal>(&read)) {
    return refuse(Method::Generate, status_of(*refusal));
  }
  auto& parameters = std::get<GenerateParameters>(read);
  parameters.request.deadline = deadline_of(*context);
  auto* call = new GenerateCall(std::move(parameters), support_, received, !warm_up);
  const Admission admission = call->submit();
  if (admission == Admission::Accepted) return call;
  const bool full = admission == Admission::QueueFull;
  support_.metrics.request_ended(Method::Generate, full ? Outcome::Rejected : Outcome::Invalid);
  if (full) support_.metrics.rejected(Rejection::QueueFull);
  call->refuse(status_of(admission));
  return call;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* GenerationService::refuse(Method method,
                                                                      const Status& status) {
  support_.metrics.request_ended(method, Outcome::Invalid);
  return new Refused(status);
}

// OK, or UNAVAILABLE and counted.
Status GenerationService::not_open(Method method) {
  const Gate::State state = support_.gate.state();
  if (state == Gate::State::Ready) return Status::OK;
  const bool draining = state == Gate::State::Draining;
  support_.metrics.request_ended(method, Outcome::Rejected);
  support_.metrics.rejected(draining ? Rejection::Draining : Rejection::Loading);
  return {StatusCode::UNAVAILABLE, draining ? "the server is going down" : "not ready yet"};
}

// A call may be over before its message has come, or because the message was too long.
Status GenerationService::no_message(Method method) {
  support_.metrics.request_ended(method, Outcome::Cancelled);
  return {StatusCode::CANCELLED, "the call ended before its message had come"};
}

template <typename RequestMessage, typename ResponseMessage, typename Answer>
grpc::ServerUnaryReactor* GenerationService::unary(Method method,
                                                   grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response, Answer answer) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (!request->Valid()) {
    reactor->Finish(no_message(method));
    return reactor;
  }
  if (Status status = not_open(method); !status.ok()) {
    reactor->Finish(status);
    return reactor;
  }
  RequestMessage message;
  ResponseMessage to;
  std::optional<Refusal> refusal;
  if (const ParseProblem problem = parse(*request, message); problem.failed) {
    refusal = Refusal{.field = problem.field, .problem = problem.problem};
  } else {
    refusal = answer(message, model_, to);
  }
  support_.metrics.request_ended(method, refusal ? Outcome::Invalid : Outcome::Ok);
  if (!refusal) *response = serialize(to);
  reactor->Finish(refusal ? status_of(*refusal) : Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* GenerationService::Tokenize(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request,
                                                      grpc::ByteBuffer* response) {
  return unary<v1::TokenizeRequest, v1::TokenizeResponse>(Method::Tokenize, context, request,
                                                          response, tokenize);
}

grpc::ServerUnaryReactor* GenerationService::Detokenize(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* response) {
  return unary<v1::DetokenizeRequest, v1::DetokenizeResponse>(Method::Detokenize, context, request,
                                                              response, detokenize);
}

grpc::ServerUnaryReactor* GenerationService::GetModel(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request,
                                                      grpc::ByteBuffer* response) {
  return unary<v1::GetModelRequest, v1::GetModelResponse>(Method::GetModel, context, request,
                                                          response, describe);
}

std::string GenerationService::next_request_id() {
  // Neighbouring numbers to distant ones (the finaliser of splitmix64): ids are easy to tell apart.
  uint64_t z = ++last_request_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(z));
  return text;
}

}  // namespace weir
