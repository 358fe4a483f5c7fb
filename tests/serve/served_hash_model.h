#pragma once
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "server/generation_service.h"
#include "tests/sim/hash_model.h"

namespace weir::testing {

// The hash model, as slow as a test wants it.
class SlowModel final : public StepRunner {
 public:
  explicit SlowModel(const Limits& limits) : model_(limits) {}
  void begin(const StepBatch& batch) override { model_.begin(batch); }
  std::span<const Drawn> finish() override {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    const std::span<const Drawn> drawn = model_.finish();
    if (!never_fails) return drawn;
    drawn_.assign(drawn.begin(), drawn.end());
    for (Drawn& one : drawn_) one.token = std::max(one.token, 3);
    return drawn_;
  }
  size_t step_bytes() const override { return model_.step_bytes(); }

  std::atomic<int> microseconds{0};  // of each step
  std::atomic<bool> never_fails{false};  // the hash model does, once in 701 draws

 private:
  HashModel model_;
  std::vector<Drawn> drawn_;
};

// The whole service on the hash model, in this process.
struct ServedHashModel {
  explicit ServedHashModel(int32_t slots = 4, int32_t queued = 1000) {
    auto opened = Tokenizer::open_folder(WEIR_SOURCE_DIR "/models/demo");
    if (!opened.ok()) std::abort();
    tokenizer.emplace(*std::move(opened));
    spec = {.model_type = "hash", .vocab = tokenizer->size(), .bos = 1, .eos = {2}};
    limits = {.slots = slots, .step_tokens = 64, .chunk_tokens = 16, .queued = queued,
              .prompt_tokens = 500, .new_tokens = 100'000, .vocab = spec.vocab};
    model.emplace(ServedModel{
        .name = "hash", .spec = spec, .tokenizer = *tokenizer, .limits = limits});
    capacity.limits = limits;
    metrics = std::make_unique<Metrics>(*model, capacity, 1e9);
    delivery = std::make_unique<Delivery>();
    runner = std::make_unique<SlowModel>(limits);
    engine = std::make_unique<Engine>(limits, *runner, *metrics);
    support.emplace(CallSupport{.engine = *engine, .delivery = *delivery, .metrics = *metrics,
                                .gate = gate, .tokenizer = *tokenizer});
    service = std::make_unique<GenerationService>(*model, *support, "the warm-up");
    grpc::ServerBuilder builder;
    builder.RegisterService(service.get());
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    server = builder.BuildAndStart();
    channel = grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                  grpc::InsecureChannelCredentials());
    stub = v1::Generation::NewStub(channel);
    gate.open();
  }
  ~ServedHashModel() {
    engine->cancel_all();
    server->Shutdown(std::chrono::system_clock::now());
    while (gate.calls() > 0) std::this_thread::yield();
  }

  // The sum of the series of `family` whose labels hold `label`.
  double metric(const std::string& family, const std::string& label = "") const {
    std::istringstream lines(
        prometheus::TextSerializer().Serialize(metrics->registry()->Collect()));
    double sum = 0;
    for (std::string line; std::getline(lines, line);) {
      const bool named = line.substr(0, line.find_first_of("{ ")) == family;
      if (named && line.find(label) != std::string::npos) {
        sum += std::stod(line.substr(line.rfind(' ') + 1));
      }
    }
    return sum;
  }
  template <typename Holds>
  static bool eventually(const Holds& holds) {
    for (int i = 0; i < 20'000 && !holds(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return holds();
  }
  bool idle() const {
    return gate.calls() == 0 && metric("weir_requests_running") == 0 &&
           metric("weir_requests_waiting") == 0 &&
           metric("weir_state_slots", "kind=\"used\"") == 0;
  }

  std::optional<Tokenizer> tokenizer;
  ModelSpec spec;
  Limits limits;
  std::optional<ServedModel> model;
  Capacity capacity;
  std::unique_ptr<Metrics> metrics;
  std::unique_ptr<Delivery> delivery;
  std::unique_ptr<SlowModel> runner;
  std::unique_ptr<Engine> engine;
  Gate gate;
  std::optional<CallSupport> support;
  std::unique_ptr<GenerationService> service;
  std::unique_ptr<grpc::Server> server;
  int port = 0;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Generation::Stub> stub;
};

}  // namespace weir::testing
