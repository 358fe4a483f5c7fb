// The service between gRPC and the engine: who gets which tokens, and how calls end. The model is
// the hash model, so one lost, doubled or swapped token shows.
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <future>
#include <random>

#include "tests/serve/served_hash_model.h"

namespace weir::testing {
namespace {

struct Answer {
  std::vector<Token> ids;
  std::string text;
  int messages = 0, effectives = 0, endings = 0;
  v1::GenerateResponse last;
  grpc::Status status;
};

v1::GenerateRequest request_of(uint64_t seed, uint32_t tokens) {
  v1::GenerateRequest request;
  for (uint64_t i = 0; i <= seed % 40; ++i) {
    request.mutable_token_ids()->add_ids(int32_t(3 + (seed * 31 + i * 7) % 4000));
  }
  request.mutable_sampling()->set_seed(seed);
  request.mutable_stop()->set_ignore_eos(true);
  request.mutable_stop()->set_max_tokens(tokens);
  return request;
}

// Reads until the end. Cancels once it has `cancel_after` tokens, when that is not negative.
Answer ask(v1::Generation::Stub& stub, const v1::GenerateRequest& request,
           grpc::ClientContext& context, int cancel_after = -1) {
  Answer answer;
  const auto stream = stub.Generate(&context, request);
  if (cancel_after == 0) context.TryCancel();
  v1::GenerateResponse message;
  while (stream->Read(&message)) {
    ++answer.messages;
    answer.effectives += message.has_effective();
    answer.endings += message.finish_reason() != v1::FINISH_REASON_UNSPECIFIED;
    answer.text += message.text();
    answer.ids.insert(answer.ids.end(), message.token_ids().begin(), message.token_ids().end());
    answer.last = message;
    if (cancel_after > 0 && int(answer.ids.size()) >= cancel_after) context.TryCancel();
  }
  answer.status = stream->Finish();
  return answer;
}
Answer ask(ServedHashModel& served, const v1::GenerateRequest& request, int cancel_after = -1) {
  grpc::ClientContext context;
  return ask(*served.stub, request, context, cancel_after);
}

// What the model alone answers.
HashModel::Answer expected_of(const ServedHashModel& served, const v1::GenerateRequest& request) {
  auto read = read_parameters(request, *served.model, {});
  return HashModel::alone(std::get<GenerateParameters>(read).request, served.limits);
}
std::vector<Token> ids_of(const HashModel::Answer& answer) {
  std::vector<Token> ids;
  for (const Drawn& drawn : answer.tokens) ids.push_back(drawn.token);
  return ids;
}

TEST(GenerationService, ManyStreamsEachItsOwnTokens) {
  ServedHashModel served;
  std::vector<std::future<void>> clients;
  for (uint64_t seed = 0; seed < 24; ++seed) {
    clients.push_back(std::async(std::launch::async, [&served, seed] {
      v1::GenerateRequest request = request_of(seed, 60);
      request.mutable_output()->set_stream_chunk_tokens(1 + seed % 5);
      const Answer answer = ask(served, request);
      const HashModel::Answer expected = expected_of(served, request);
      EXPECT_EQ(answer.ids, ids_of(expected)) << seed;
      EXPECT_EQ(answer.effectives, 1);
      EXPECT_EQ(answer.endings, 1);
      if (expected.finish == Finish::Error) {
        EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INTERNAL);
      } else {
        EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
        EXPECT_EQ(answer.last.usage().generated_tokens(), answer.ids.size());
        EXPECT_LE(answer.messages, 2 + int(60 / (1 + seed % 5)));
      }
    }));
  }
  for (auto& client : clients) client.get();
  EXPECT_TRUE(ServedHashModel::eventually([&] { return served.idle(); }));
}

// Cancels at every phase: before the submission, queued, in a prompt, while writing, at the end.
TEST(GenerationService, CancelsAtAnyMoment) {
  ServedHashModel served;
  constexpr int kClients = 8, kCalls = 40;
  std::vector<std::future<void>> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.push_back(std::async(std::launch::async, [&served, client] {
      std::mt19937 random(unsigned(client) + 1);
      for (int call = 0; call < kCalls; ++call) {
        const auto tokens = uint32_t(1 + random() % 30);
        const v1::GenerateRequest request = request_of(random() % 1000, tokens);
        const int cancel_after = random() % 2 == 0 ? int(random() % 32) : -1;
        const Answer answer = ask(served, request, cancel_after);
        if (cancel_after < 0) {
          EXPECT_EQ(answer.ids, ids_of(expected_of(served, request)));
        }
      }
    }));
  }
  for (auto& client : clients) client.get();
  EXPECT_TRUE(ServedHashModel::eventually([&] { return served.idle(); }));
  // A call cancelled before it arrived is no request received; one cancelled on its way has not
  // reached the engine.
  EXPECT_LE(served.metric("weir_requests_total"), kClients * kCalls);
  EXPECT_GE(served.metric("weir_requests_total"), served.metric("weir_request_seconds_count"));
  EXPECT_EQ(served.metric("weir_requests_total", "outcome=\"invalid\""), 0);
}

// A reader that sleeps costs no memory without bound, nor its neighbours' time; it gets all.
TEST(GenerationService, SlowReaderGetsAllTokensInFewerMessages) {
  ServedHashModel served;
  const v1::GenerateRequest request = request_of(5, 400);
  grpc::ClientContext context;
  const auto stream = served.stub->Generate(&context, request);
  v1::GenerateResponse message;
  std::vector<Token> ids;
  int messages = 0;
  while (stream->Read(&message)) {
    if (messages++ == 0) {
      EXPECT_TRUE(ask(served, request_of(6, 50)).status.ok());
      EXPECT_TRUE(ServedHashModel::eventually(
          [&] { return served.metric("weir_requests_running") == 0; }));
    }
    ids.insert(ids.end(), message.token_ids().begin(), message.token_ids().end());
  }
  stream->Finish();
  EXPECT_EQ(ids, ids_of(expected_of(served, request)));
}

TEST(GenerationService, StopStringEndsTheSequenceInTheEngine) {
  ServedHashModel served;
  v1::GenerateRequest request = request_of(9, 300);
  const Answer whole = ask(served, request);
  ASSERT_GT(whole.text.size(), 40u);
  const std::string stop = whole.text.substr(20, 3);
  if (!is_utf8(stop)) GTEST_SKIP() << "the answer has a long character just there";
  request.mutable_stop()->add_strings(stop);
  request.mutable_stop()->set_max_tokens(100'000);
  const Answer answer = ask(served, request);
  EXPECT_EQ(answer.last.finish_reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(answer.last.matched_stop(), stop);
  EXPECT_EQ(answer.text, whole.text.substr(0, whole.text.find(stop)));
  EXPECT_EQ(answer.last.usage().generated_tokens(), answer.ids.size());
  EXPECT_TRUE(ServedHashModel::eventually([&] { return served.idle(); }));
  EXPECT_EQ(served.metric("weir_generated_tokens_total"), whole.ids.size() + answer.ids.size());
}

TEST(GenerationService, DeadlinesByPhase) {
  ServedHashModel served(1);
  served.runner->microseconds = 1000;
  served.runner->never_fails = true;
  const auto late = [&](const char* phase) {
    return served.metric("weir_requests_ended_early_total",
                         std::string("outcome=\"deadline\",phase=\"") + phase);
  };
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  const Answer running = ask(*served.stub, request_of(1, 100'000), context);
  EXPECT_EQ(running.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_FALSE(running.ids.empty());
  EXPECT_TRUE(ServedHashModel::eventually([&] { return late("running") == 1; }));

  grpc::ClientContext holding, waiting;
  const auto holder = served.stub->Generate(&holding, request_of(2, 100'000));
  v1::GenerateResponse first;
  ASSERT_TRUE(holder->Read(&first));
  waiting.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
  const Answer queued = ask(*served.stub, request_of(3, 5), waiting);
  EXPECT_EQ(queued.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(ServedHashModel::eventually([&] { return late("queued") == 1; }));
  holding.TryCancel();
  while (holder->Read(&first)) {
  }
  EXPECT_EQ(holder->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(ServedHashModel::eventually([&] { return served.idle(); }));
}

TEST(GenerationService, FullQueueIsAnsweredAtOnce) {
  ServedHashModel served(1, 0);
  served.runner->microseconds = 1000;
  served.runner->never_fails = true;
  grpc::ClientContext context;
  const auto holder = served.stub->Generate(&context, request_of(2, 100'000));
  v1::GenerateResponse first;
  ASSERT_TRUE(holder->Read(&first));
  const Answer refused = ask(served, request_of(3, 5));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(refused.status.error_details().find("google.rpc.RetryInfo"), std::string::npos);
  EXPECT_EQ(served.metric("weir_requests_rejected_total", "queue_full"), 1);
  context.TryCancel();
  while (holder->Read(&first)) {
  }
  holder->Finish();
}

TEST(GenerationService, GateRefusesAndGraceEnds) {
  ServedHashModel served(1);
  served.runner->microseconds = 1000;
  served.runner->never_fails = true;
  auto running = std::async(std::launch::async,
                            [&served] { return ask(served, request_of(2, 100'000)); });
  ASSERT_TRUE(ServedHashModel::eventually(
      [&] { return served.metric("weir_generated_tokens_total") > 3; }));
  served.gate.drain();
  const Answer refused = ask(served, request_of(3, 5));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  served.engine->cancel_all();
  const Answer ended = running.get();
  EXPECT_EQ(ended.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ended.last.finish_reason(), v1::FINISH_REASON_CANCELLED);
  EXPECT_EQ(ended.last.usage().generated_tokens(), ended.ids.size());
}

// gRPC itself would answer UNIMPLEMENTED, and nobody would count it.
TEST(GenerationService, BytesThatAreNoRequest) {
  ServedHashModel served;
  const auto call = [&](const std::string& bytes) {
    grpc::GenericStub stub(served.channel);
    grpc::ClientContext context;
    const grpc::Slice slice(bytes);
    grpc::ByteBuffer request(&slice, 1), response;
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, "/weir.v1.Generation/Generate", grpc::StubOptions(), &request,
                   &response, [&done](grpc::Status status) { done.set_value(status); });
    return done.get_future().get();
  };
  const grpc::Status bad_text = call(std::string("\x0a\x02\xff\xfe"));
  EXPECT_EQ(bad_text.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(bad_text.error_message(), "prompt: expected UTF-8, found other bytes");
  const grpc::Status bad_stop = call(std::string("\x0a\x01x\x2a\x03\x0a\x01\xff", 8));
  EXPECT_EQ(bad_stop.error_message(), "stop.strings: expected UTF-8, found other bytes");
  const grpc::Status garbage = call(std::string("\x0a\x7f"));
  EXPECT_EQ(garbage.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(garbage.error_message().substr(0, 8), "request:");
  EXPECT_EQ(served.metric("weir_requests_total", "outcome=\"invalid\""), 3);
}

TEST(GenerationService, MessageBeyondTheReceiveLimit) {
  ServedHashModel served;
  v1::GenerateRequest request = request_of(1, 5);
  request.set_prompt(std::string(5 << 20, 'x'));
  const Answer refused = ask(served, request);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED)
      << refused.status.error_message();
  EXPECT_TRUE(ask(served, request_of(2, 5)).status.ok());
}

}  // namespace
}  // namespace weir::testing
