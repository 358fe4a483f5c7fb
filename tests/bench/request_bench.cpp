// Whole requests through the engine, no gRPC: B prompts of 2,048 tokens at once, each answered with
// 128 tokens, greedy (the protocol of the SwiLA paper's efficiency table). Random models of 1.3B
// shape. Answers' tokens a second count from the first submission to the last token.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "engine/engine.h"
#include "engine/runner.h"
#include "tests/bench/bench_util.h"
#include "tests/bench/random_model.h"

namespace weir {
namespace {

using Clock = std::chrono::steady_clock;

struct Shape {
  const char* name;
  std::string type;
  nlohmann::json config = {};
  bool hybrid = false;  // softmax attention in every fourth layer
};

struct Protocol {
  int32_t prompt = 2048, answer = 128;
  std::vector<int32_t> batches{1, 8, 32, 64, 128};
  int32_t layers = 24, dim = 2048, heads = 16, hidden = 5632, vocab = 32000;
};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Answer final : public TokenSink {
 public:
  explicit Answer(Clock::time_point begin) : begin_(begin) {}
  void emit(const Emission& emission) override {
    if (emission.token && tokens++ == 0) first = seconds_since(begin_);
    if (!emission.finish) return;
    last = seconds_since(begin_);
    ended = true;
  }
  int32_t tokens = 0;
  double first = 0, last = 0;
  std::atomic<bool> ended{false};

 private:
  const Clock::time_point begin_;
};

// What B requests at once took, seconds.
struct Took {
  double first_tokens = 0;  // until the last of the first tokens
  double all = 0;
};

Took answer_all(Engine& engine, const Protocol& protocol, int32_t count) {
  const auto begin = Clock::now();
  std::vector<std::unique_ptr<Answer>> answers;
  for (int32_t i = 0; i < count; ++i) {
    Request request{.new_tokens = protocol.answer};
    for (int32_t t = 0; t < protocol.prompt; ++t) {
      request.prompt.push_back(Token((int64_t(i) * 7919 + int64_t(t) * 104729) % protocol.vocab));
    }
    answers.push_back(std::make_unique<Answer>(begin));
    if (engine.submit(std::move(request), *answers.back()).admission != Admission::Accepted) {
      std::fprintf(stderr, "a request was not accepted\n");
      std::exit(1);
    }
  }
  Took took;
  for (const auto& answer : answers) {
    while (!answer->ended) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (answer->tokens != protocol.answer) {
      std::fprintf(stderr, "%d tokens, expected %d\n", answer->tokens, protocol.answer);
      std::exit(1);
    }
    took.first_tokens = std::max(took.first_tokens, answer->first);
    took.all = std::max(took.all, answer->last);
  }
  return took;
}

class Quiet final : public Observer {
  void on_step(const StepReport&) override {}
  void on_occupancy(const Occupancy&) override {}
};

test::RandomModel model_of(const Shape& shape, const Protocol& protocol) {
  test::RandomModel model{.model_type = shape.type, .layers = protocol.layers, .dim = protocol.dim,
                          .heads = protocol.heads, .head_dim = protocol.dim / protocol.heads,
                          .mlp_hidden = protocol.hidden, .vocab = protocol.vocab,
                          .more = shape.config};
  for (int32_t i = 3; shape.hybrid && i < model.layers; i += 4) model.attention_layers.push_back(i);
  return model;
}

void bench_model(const BenchOptions& options, const Shape& shape, const Protocol& protocol,
                 nlohmann::json& results) {
  if (std::string(shape.name).find(options.only) == std::string::npos) return;
  const auto backend = bench_backend(options);
  const Model model = test::random_model(model_of(shape, protocol), 1, *backend);
  const int32_t most = protocol.batches.back(), length = protocol.prompt + protocol.answer;
  Limits limits{.slots = most, .step_tokens = 16384, .chunk_tokens = protocol.prompt,
                .queued = most, .prompt_tokens = protocol.prompt, .new_tokens = protocol.answer,
                .vocab = protocol.vocab};
  limits.pages = most * ((length + limits.page_tokens - 1) / limits.page_tokens);
  if (state_size(model.spec).kv_per_token == 0) limits.pages = 0;
  const StatePool pool(model.spec, limits, *backend);
  Runner runner(model, pool, limits, *backend);
  Quiet quiet;
  Engine engine(limits, runner, quiet);
  answer_all(engine, protocol, 1);  // what is made once has been made
  for (const int32_t batch : protocol.batches) {
    const Took took = answer_all(engine, protocol, batch);
    const double decode = (took.all - took.first_tokens) / (protocol.answer - 1);
    const double rate = batch * protocol.answer / took.all;
    const double prompts = double(batch) * protocol.prompt / took.first_tokens;
    std::printf("%-16s %4d %10.3f %12.0f %14.0f %12.3f\n", shape.name, batch, took.all, rate,
                prompts, decode * 1e3);
    std::fflush(stdout);
    results.push_back({{"model", shape.name}, {"device", backend->info().name}, {"batch", batch},
                       {"vectors", options.vectors}, {"seconds", took.all},
                       {"tokens_per_s", rate}, {"prompt_tokens_per_s", prompts},
                       {"decode_ms", decode * 1e3}});
  }
}

void bench_all(const BenchOptions& options) {
  Protocol protocol;
  if (options.device == "cpu") {
    protocol = {.prompt = 64, .answer = 8, .batches = {1, 4}, .layers = 4, .dim = 256, .heads = 2,
                .hidden = 704, .vocab = 2000};
  }
  const int32_t swila_heads = protocol.heads, swila_dim = protocol.dim / protocol.heads / 2;
  const nlohmann::json swila{{"num_heads", swila_heads}, {"head_dim", swila_dim},
                             {"num_mixtures", 4}, {"router_low_rank_dim", 64},
                             {"beta_low_rank_dim", 64}, {"gate_low_rank_dim", 64},
                             {"temporal", false}, {"gated", false}};
  nlohmann::json swila_all = swila;
  swila_all.update({{"temporal", true}, {"gated", true}});
  std::printf("%-16s %4s %10s %12s %14s %12s\n", "model", "B", "s", "tokens/s", "prompt tok/s",
              "decode ms");
  nlohmann::json results;
  for (const Shape& shape : std::vector<Shape>{{"GDN", "gated_deltanet"},
                                               {"KDA", "kda"},
                                               {"DeltaNet", "delta_net"},
                                               {"SwiLA", "swila", swila},
                                               {"SwiLA, g. t.", "swila", swila_all},
                                               {"GDN 3:1 softmax", "gated_deltanet", {}, true},
                                               {"Transformer++", "transformer"}}) {
    bench_model(options, shape, protocol, results);
  }
  write_json(options, results);
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) { weir::bench_all(weir::bench_options(argc, argv)); }
