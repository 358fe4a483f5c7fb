#pragma once
#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/serve/test_server.h"
#include "weir/v1/generation.grpc.pb.h"

namespace weir::testing {

using Ids = std::vector<int32_t>;

struct Answer {
  Ids ids;
  std::string text;
  std::vector<float> logprobs, prompt_logprobs;
  int messages = 0;
  v1::Effective effective;
  v1::GenerateResponse last;  // the message with the finish reason, when there was one
  grpc::Status status;

  v1::FinishReason reason() const { return last.finish_reason(); }
  grpc::StatusCode code() const { return status.error_code(); }
};

// Ordinary ids of a model with `vocab` ids, the same for the same seed.
inline Ids random_ids(int count, uint64_t seed, int vocab = 512) {
  std::mt19937_64 random(seed);
  Ids ids;
  for (int i = 0; i < count; ++i) ids.push_back(3 + static_cast<int32_t>(random() % (vocab - 3)));
  return ids;
}

// Greedy, and of exactly `tokens` tokens.
inline v1::GenerateRequest greedy(const Ids& prompt, uint32_t tokens) {
  v1::GenerateRequest request;
  request.mutable_token_ids()->mutable_ids()->Assign(prompt.begin(), prompt.end());
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(tokens);
  request.mutable_stop()->set_ignore_eos(true);
  return request;
}

inline v1::GenerateRequest sampled(const Ids& prompt, uint32_t tokens, uint64_t seed) {
  v1::GenerateRequest request = greedy(prompt, tokens);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(seed);
  return request;
}

// One streaming call on a thread of its own.
class Call {
 public:
  Call(std::shared_ptr<v1::Generation::Stub> stub, v1::GenerateRequest request,
       double timeout_s = 300)
      : stub_(std::move(stub)), request_(std::move(request)) {
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3)));
    thread_ = std::thread([this] { read(); });
  }
  ~Call() {
    if (thread_.joinable()) {
      context_.TryCancel();
      thread_.join();
    }
  }
  Call(const Call&) = delete;

  void cancel() { context_.TryCancel(); }
  int tokens() const { return tokens_; }  // so far
  bool over() const { return over_; }
  bool has_tokens(int count) const {
    return eventually([this, count] { return tokens_ >= count || over_; }) && tokens_ >= count;
  }
  const Answer& answer() {
    if (thread_.joinable()) thread_.join();
    return answer_;
  }

 private:
  void read() {
    const auto reader = stub_->Generate(&context_, request_);
    v1::GenerateResponse message;
    while (reader->Read(&message)) {
      ++answer_.messages;
      answer_.text += message.text();
      answer_.ids.insert(answer_.ids.end(), message.token_ids().begin(), message.token_ids().end());
      for (const auto& score : message.logprobs()) answer_.logprobs.push_back(score.logprob());
      for (const auto& score : message.prompt_logprobs()) {
        answer_.prompt_logprobs.push_back(score.logprob());
      }
      if (message.has_effective()) answer_.effective = message.effective();
      if (message.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) answer_.last = message;
      tokens_ = static_cast<int>(answer_.ids.size());
    }
    answer_.status = reader->Finish();
    over_ = true;
  }

  const std::shared_ptr<v1::Generation::Stub> stub_;
  const v1::GenerateRequest request_;
  grpc::ClientContext context_;
  Answer answer_;  // the thread's until it has ended
  std::atomic<int> tokens_ = 0;
  std::atomic<bool> over_ = false;
  std::thread thread_;
};

using Calls = std::vector<std::unique_ptr<Call>>;

class Client {
 public:
  explicit Client(const TestServer& server)
      : channel_(grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials())),
        stub_(v1::Generation::NewStub(channel_)),
        metrics_address_(server.metrics_address()) {}

  std::unique_ptr<Call> start(const v1::GenerateRequest& request, double timeout_s = 300) const {
    return std::make_unique<Call>(stub_, request, timeout_s);
  }
  Answer generate(const v1::GenerateRequest& request, double timeout_s = 300) const {
    return start(request, timeout_s)->answer();
  }
  Calls start_all(const std::vector<v1::GenerateRequest>& requests) const {
    Calls calls;
    for (const v1::GenerateRequest& request : requests) calls.push_back(start(request));
    return calls;
  }
  v1::GetModelResponse model() const {
    grpc::ClientContext context;
    v1::GetModelResponse response;
    EXPECT_TRUE(stub_->GetModel(&context, v1::GetModelRequest(), &response).ok());
    return response;
  }
  std::vector<v1::TokenPiece> tokenize(const std::string& text) const {
    grpc::ClientContext context;
    v1::TokenizeRequest request;
    request.set_text(text);
    v1::TokenizeResponse response;
    EXPECT_TRUE(stub_->Tokenize(&context, request, &response).ok());
    return {response.tokens().begin(), response.tokens().end()};
  }
  std::string detokenize(const Ids& ids) const {
    grpc::ClientContext context;
    v1::DetokenizeRequest request;
    request.mutable_token_ids()->Assign(ids.begin(), ids.end());
    v1::DetokenizeResponse response;
    EXPECT_TRUE(stub_->Detokenize(&context, request, &response).ok());
    return response.text();
  }
  // The sum of a family's samples whose labels hold all of `labels`, e.g. {R"(kind="used")"}.
  double metric(const std::string& family, const std::vector<std::string>& labels = {}) const;

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const std::shared_ptr<v1::Generation::Stub>& stub() const { return stub_; }

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::shared_ptr<v1::Generation::Stub> stub_;
  std::string metrics_address_;
};

// The body of http://ADDRESS/metrics; empty when nothing answers.
inline std::string read_metrics(const std::string& address) {
  const size_t colon = address.rfind(':');
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + colon + 1)));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  const int file = socket(AF_INET, SOCK_STREAM, 0);
  std::string out;
  if (connect(file, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) {
    const std::string request = "GET /metrics HTTP/1.0\r\nHost: " + address + "\r\n\r\n";
    char buffer[65536];
    ssize_t count = send(file, request.data(), request.size(), MSG_NOSIGNAL);
    while (count > 0 && (count = recv(file, buffer, sizeof buffer, 0)) > 0) {
      out.append(buffer, static_cast<size_t>(count));
    }
  }
  close(file);
  const size_t body = out.find("\r\n\r\n");
  return body == std::string::npos ? "" : out.substr(body + 4);
}

inline double Client::metric(const std::string& family,
                             const std::vector<std::string>& labels) const {
  const std::string body = read_metrics(metrics_address_);
  EXPECT_FALSE(body.empty()) << "nothing answers at " << metrics_address_;
  double sum = 0;
  for (size_t at = 0; at < body.size();) {
    const size_t end = std::min(body.find('\n', at), body.size());
    const std::string line = body.substr(at, end - at);
    at = end + 1;
    const size_t name_end = line.find_first_of("{ ");
    if (line.substr(0, name_end) != family) continue;
    bool wanted = true;
    for (const std::string& label : labels) wanted &= line.find(label) != std::string::npos;
    if (wanted) sum += std::atof(line.c_str() + line.rfind(' ') + 1);
  }
  return sum;
}

}  // namespace weir::testing
