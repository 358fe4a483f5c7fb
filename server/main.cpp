#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <google/protobuf/stubs/logging.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/deferred_writes.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/fingerprint.h"
#include "engine/model.h"
#include "engine/read_spec.h"
#include "engine/runner.h"
#include "kernels/check.h"
#include "server/bandwidth.h"
#include "server/capacity.h"
#include "server/checkpoint_files.h"
#include "server/flags.h"
#include "server/generation_service.h"
#include "server/grpc_server.h"
#include "server/metrics_endpoint.h"
#include "server/process_metrics.h"
#include "server/signal_watch.h"
#include "server/warm_up.h"

namespace weir {
namespace {

constexpr int kExitStart = 1, kExitFlags = 2;

void say(const std::string& line) {
  const std::string text = absl::StrCat("weir-server: ", line, "\n");
  std::fwrite(text.data(), 1, text.size(), stderr);
}

int fail(const absl::Status& status, int code) {
  say(std::string(status.message()));
  return code;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::F32: return "float32";
    case DType::BF16: return "bfloat16";
    case DType::F16: return "float16";
  }
  WEIR_UNREACHABLE("every DType is listed");
}

int thread_count(const Options& options) {
  return options.threads > 0 ? options.threads
                             : int(std::max(1u, std::thread::hardware_concurrency()));
}

bool on_cpu(const Options& options) { return options.device == "cpu"; }

// Everything that serves, in the order of dependence: what is below uses what is above.
struct Server {
  explicit Server(const Options& options) : options(options) {}
  ~Server();

  absl::Status plan();     // capacity, before any weights are read
  absl::Status load();
  absl::Status serve();    // up to ready
  void go_down();

  const Options& options;
  std::unique_ptr<Backend> backend;
  Capacity capacity;
  std::optional<Model> model;
  std::optional<Tokenizer> tokenizer;
  std::optional<ServedModel> served;
  std::unique_ptr<StatePool> pool;
  std::unique_ptr<Runner> runner;
  std::unique_ptr<Metrics> metrics;
  std::shared_ptr<ProcessMetrics> process_metrics = std::make_shared<ProcessMetrics>();
  std::unique_ptr<Delivery> delivery;
  std::unique_ptr<Engine> engine;
  Gate gate;
  std::unique_ptr<CallSupport> support;
  std::unique_ptr<GenerationService> service;
  std::unique_ptr<GrpcServer> grpc;
  std::unique_ptr<MetricsEndpoint> endpoint;

 private:
  absl::Status expose_metrics();
  bool wait_for_calls(std::chrono::milliseconds at_most);
};

// Keys of config.json that mean nothing here: misspelt, or of another type of model.
absl::Status report_unread(const Options& options, const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    const std::string line = absl::StrCat(options.model_folder, "/config.json: ", key,
                                          ": nothing reads this key; is it misspelt?");
    if (options.strict) return absl::InvalidArgumentError(line);
    say(absl::StrCat("ignored: ", line));
  }
  return absl::OkStatus();
}

absl::Status Server::plan() {
  std::vector<std::string> unread;
  const absl::StatusOr<ModelSpec> spec = read_spec_folder(options.model_folder, &unread);
  if (!spec.ok()) return spec.status();
  if (absl::Status status = report_unread(options, unread); !status.ok()) return status;
  auto opened = open_device(options.device, {.threads = thread_count(options)}, options.vectors,
                            options.defer_writes);
  if (!opened.ok()) return opened.status();
  backend = *std::move(opened);
  const DeviceInfo device = backend->info();
  // Where memory leaves so few that no step defers, room is counted that the pool does not take.
  const int32_t slots = options.slots > 0 ? options.slots : kSlotsByDefault;
  const CapacityAsked asked{.slots = options.slots,
                            .kv_pages = options.kv_pages,
                            .kv_page_tokens = options.kv_page_tokens,
                            .state_bytes = size_t(options.state_memory_mib) << 20,
                            .step_tokens = options.step_tokens,
                            .chunk_tokens = options.chunk_tokens,
                            .queue = options.queue,
                            .prompt_tokens = options.max_prompt_tokens,
                            .new_tokens = options.max_new_tokens,
                            .strict = options.strict};
  CapacityGiven given{.free_bytes = device.free_bytes,
                      .weights_bytes = weight_file_bytes(options.model_folder),
                      .step_padding = backend->remembers_programs() ? kStepPadding : 0,
                      .defers_writes = defers_writes(*spec, slots, *backend),
                      .workspace_bytes = [&spec](const Limits& limits) {
                        return Runner::workspace_bytes(*spec, limits);
                      }};
  if (!on_cpu(options)) {  // a GPU is the server's alone; the driver and the graphs need a GiB
    given.left_alone = std::min(0.1, 0x1p30 / double(device.free_bytes));
    given.for_states = 1;
  }
  auto planned = plan_capacity(*spec, asked, given);
  if (!planned.ok()) return planned.status();
  capacity = *std::move(planned);
  say(absl::StrCat("version ", WEIR_VERSION, ", model ", options.model_folder, " (",
                   spec->model_type, ", ", spec->layers.size(), " layers), device ", device.name));
  for (const std::string& line : capacity.lines) say(line);
  return absl::OkStatus();
}

absl::Status Server::load() {
  auto loaded = load_model(options.model_folder, *backend);
  if (!loaded.ok()) return loaded.status();
  model = *std::move(loaded);
  auto opened = Tokenizer::open_folder(options.model_folder);
  if (!opened.ok()) return opened.status();
  tokenizer = *std::move(opened);
  if (tokenizer->size() > model->spec.vocab) {
    return absl::InvalidArgumentError(
        absl::StrCat(tokenizer->path(), ": expected at most ", model->spec.vocab,
                     " pieces, the vocab_size of config.json, found ", tokenizer->size()));
  }
  auto fingerprint = fingerprint_folder(options.model_folder, model->files);
  if (!fingerprint.ok()) return fingerprint.status();
  served.emplace(ServedModel{
      .name = options.model_name.empty() ? folder_name(options.model_folder) : options.model_name,
      .spec = model->spec,
      .tokenizer = *tokenizer,
      .limits = capacity.limits,
      .state = capacity.size,
      .weights_dtype = dtype_name(model->weights.embedding.dtype),
      .weights_bytes = model->weights.bytes,
      .weights_fingerprint = *fingerprint,
      .device = backend->info().name,
      .receive_bytes = size_t(options.max_receive_mib) << 20,
      .text_bytes = text_bytes_max(*tokenizer, capacity.limits)});
  return absl::OkStatus();
}

absl::Status Server::serve() {
  pool = std::make_unique<StatePool>(model->spec, capacity.limits, *backend);
  runner = std::make_unique<Runner>(*model, *pool, capacity.limits, *backend);
  metrics = std::make_unique<Metrics>(*served, capacity,
                                      on_cpu(options)
                                          ? measure_read_bandwidth(thread_count(options))
                                          : measure_copy_bandwidth(*backend));
  delivery = std::make_unique<Delivery>();
  engine = std::make_unique<Engine>(capacity.limits, *runner, *metrics);
  support = std::make_unique<CallSupport>(CallSupport{.engine = *engine,
                                                      .delivery = *delivery,
                                                      .metrics = *metrics,
                                                      .gate = gate,
                                                      .tokenizer = *tokenizer,
                                                      .log_requests = options.log_requests});
  std::random_device chance;
  const std::string warm_up_id = absl::StrCat("warm-up-", chance(), "-", chance());
  service = std::make_unique<GenerationService>(*served, *support, warm_up_id);
  auto started = GrpcServer::start(options, *service);
  if (!started.ok()) return started.status();
  grpc = *std::move(started);
  if (absl::Status status = expose_metrics(); !status.ok()) return status;
  if (absl::Status status = warm_up(grpc->in_process_channel(), warm_up_id); !status.ok()) {
    return status;
  }
  gate.open();
  grpc->set_ready(true);
  return absl::OkStatus();
}

absl::Status Server::expose_metrics() {
  auto started = MetricsEndpoint::start(options.metrics_host, options.metrics_port);
  if (!started.ok()) return started.status();
  endpoint = *std::move(started);
  endpoint->add(metrics->registry());
  endpoint->add(process_metrics);
  return absl::OkStatus();
}

bool Server::wait_for_calls(std::chrono::milliseconds at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  while (gate.calls() > 0) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void Server::go_down() {
  grpc->set_ready(false);
  gate.drain();
  say(absl::StrCat("going down: ", gate.calls(), " calls have ", options.drain_seconds,
                   " s to finish"));
  if (!wait_for_calls(std::chrono::seconds(options.drain_seconds))) {
    say(absl::StrCat("grace is over: ending ", gate.calls(), " calls"));
    engine->cancel_all();
    wait_for_calls(std::chrono::seconds(2));  // for their last messages to leave
  }
}

// Calls end before what they use does: gRPC cancels what is left, and the engine, told to cancel
// all, lets go of every call within a step.
Server::~Server() {
  if (engine != nullptr) engine->cancel_all();
  if (grpc != nullptr) grpc->shut_down(std::chrono::milliseconds(500));
  while (!wait_for_calls(std::chrono::hours(1))) {
  }
}

int run(const Options& options, SignalWatch& signals) {
  Server server(options);
  absl::Status status = server.plan();
  if (status.ok()) status = server.load();
  if (status.ok()) status = server.serve();
  if (!status.ok()) return fail(status, kExitStart);
  signals.serving();
  const std::string metrics_address =
      address(options.metrics_host, server.endpoint->port());
  std::printf("weir-server: serving %s on %s, metrics on %s\n", server.served->name.c_str(),
              address(options.host, server.grpc->port()).c_str(), metrics_address.c_str());
  std::fflush(stdout);
  signals.wait();
  server.go_down();
  return 0;
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) {
  weir::SignalWatch signals;  // first: threads inherit the mask
  // Bytes that do not parse are answered and counted; they shall not fill the log as well.
  google::protobuf::SetLogHandler(nullptr);
  bool help = false;
  const absl::StatusOr<weir::Options> options = weir::parse_flags(argc, argv, help);
  if (help) {
    std::fputs(weir::usage().c_str(), stdout);
    return 0;
  }
  if (!options.ok()) return weir::fail(options.status(), weir::kExitFlags);
  const int code = weir::run(*options, signals);
  if (code == 0) weir::say("stopped");
  return code;
}
