// Puts a load on a weir-server and reports how it bore it.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "clients/command_line.h"
#include "clients/load_run.h"
#include "clients/interrupt_watch.h"
#include "clients/status_text.h"
#include "clients/text_file.h"
#include "clients/utf8.h"

ABSL_FLAG(std::string, server, "127.0.0.1:50051", "HOST:PORT of the server");
ABSL_FLAG(int32_t, concurrency, 8, "closed loop: this many calls at any time");
ABSL_FLAG(std::optional<double>, rate, std::nullopt, "open loop: calls a second, Poisson arrivals");
ABSL_FLAG(int64_t, requests, 100, "start no more calls than this");
ABSL_FLAG(double, seconds, 60, "start no call later than this");
ABSL_FLAG(double, timeout_s, 120, "deadline of each call");
ABSL_FLAG(int64_t, outstanding_max, 4096, "open loop: calls beyond count as failed, unsent");
ABSL_FLAG(std::string, prompt_tokens, "64", "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA");
ABSL_FLAG(std::string, answer_tokens, "64", "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA");
ABSL_FLAG(std::string, prompt_kind, "text", "text, or ids: random token ids");
ABSL_FLAG(std::string, prompt_file, "", "cut text prompts from this file, not from random words");
ABSL_FLAG(std::optional<float>, temperature, std::nullopt, "the server's default if not given");
ABSL_FLAG(bool, ignore_eos, true, "answers have the length asked for");
ABSL_FLAG(uint32_t, stream_chunk_tokens, 1, "tokens of a message");
ABSL_FLAG(int32_t, channels, 1, "connections to the server");
ABSL_FLAG(uint64_t, seed, 1, "of prompts, lengths, arrivals and the requests' own seeds");
ABSL_FLAG(std::string, json, "", "write the report to this file too");

namespace weir {
namespace {

constexpr char kUsage[] =
    "usage: weir-load [flags]\n"
    "\n"
    "Keeps --concurrency calls running (closed loop), or starts --rate calls a second whatever\n"
    "the server does (open loop; latency then counts from the moment a call was due). Ends after\n"
    "--requests or --seconds, when the calls that run have ended. Ctrl-C cancels and reports.\n"
    "Inter-token time is the time between messages divided by the tokens of the later one.\n"
    "\n"
    "Exit code 0: at least one call ended well, 1: none, 2: wrong usage, 130: Ctrl-C.\n";

constexpr size_t kTextBytes = 256 * 1024;  // of --prompt_file; enough variety for any prompt
constexpr int kRandomWords = 6000;

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "weir-load: %s\n", message.c_str());
  std::exit(1);
}

LengthDistribution length_flag(const char* name, const std::string& value) {
  const std::optional<LengthDistribution> length = parse_length(value);
  if (!length) {
    exit_usage("flag --" + std::string(name) + ": expected N, uniform:LOW:HIGH or " +
               "lognormal:MEDIAN:SIGMA with lengths from 1 on, found '" + value + "'");
  }
  return *length;
}

void check(bool holds, const std::string& message) {
  if (!holds) exit_usage(message);
}

LoadOptions read_options() {
  const LoadOptions options = {.concurrency = absl::GetFlag(FLAGS_concurrency),
                               .rate = absl::GetFlag(FLAGS_rate),
                               .requests = absl::GetFlag(FLAGS_requests),
                               .seconds = absl::GetFlag(FLAGS_seconds),
                               .timeout_s = absl::GetFlag(FLAGS_timeout_s),
                               .outstanding_max = absl::GetFlag(FLAGS_outstanding_max),
                               .seed = absl::GetFlag(FLAGS_seed)};
  const auto in = [](double value, double low, double high) {
    return value >= low && value <= high;
  };
  check(in(options.concurrency, 1, 100'000), "flag --concurrency: expected 1..100000");
  check(!options.rate || in(*options.rate, 1e-3, 1e6), "flag --rate: expected 0.001..1e6");
  check(options.requests >= 1, "flag --requests: expected 1 or more");
  check(in(options.seconds, 1e-3, 1e7), "flag --seconds: expected 0.001..1e7");
  check(in(options.timeout_s, 1e-3, 1e7), "flag --timeout_s: expected 0.001..1e7");
  check(options.outstanding_max >= 1, "flag --outstanding_max: expected 1 or more");
  check(in(absl::GetFlag(FLAGS_channels), 1, 1024), "flag --channels: expected 1..1024");
  const std::string kind = absl::GetFlag(FLAGS_prompt_kind);
  check(kind == "text" || kind == "ids", "flag --prompt_kind: expected text or ids");
  check(kind == "text" || absl::GetFlag(FLAGS_prompt_file).empty(),
        "--prompt_file needs --prompt_kind=text");
  return options;
}

void set_short_deadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
}

v1::GetModelResponse get_model(v1::Generation::Stub& stub) {
  grpc::ClientContext context;
  set_short_deadline(context);
  v1::GetModelResponse model;
  const grpc::Status status = stub.GetModel(&context, v1::GetModelRequest(), &model);
  if (!status.ok()) {
    fail("GetModel: " + status_line(status) + " (--server " + absl::GetFlag(FLAGS_server) + ")");
  }
  return model;
}

// At most `bytes_max` bytes of text, which prompts are cut from, round and round.
PromptText get_prompt_text(v1::Generation::Stub& stub, size_t bytes_max) {
  const std::string path = absl::GetFlag(FLAGS_prompt_file);
  std::string text = random_words(absl::GetFlag(FLAGS_seed), kRandomWords);
  if (!path.empty()) {
    std::string error;
    const std::optional<std::string> read = read_text(path, &error);
    if (!read) fail(error);
    text = read->substr(0, bytes_max);
    const size_t valid = valid_utf8_prefix(text);
    if (valid + 3 < text.size() || valid == 0) {  // the cut may have split one character
      fail(path + ": expected text in UTF-8; byte " + std::to_string(valid) + " is not");
    }
    text.resize(valid);
  }
  text.resize(std::min(text.size(), bytes_max));
  v1::TokenizeRequest request;
  request.set_text(text);
  v1::TokenizeResponse response;
  grpc::ClientContext context;
  set_short_deadline(context);
  const grpc::Status status = stub.Tokenize(&context, request, &response);
  if (!status.ok()) fail("Tokenize: " + status_line(status));
  if (response.tokens_size() == 0) fail("Tokenize: the prompt text has no tokens");
  return PromptText(std::move(text), response);
}

std::vector<std::unique_ptr<v1::Generation::Stub>> connect() {
  std::vector<std::unique_ptr<v1::Generation::Stub>> stubs;
  for (int i = 0; i < absl::GetFlag(FLAGS_channels); ++i) {
    grpc::ChannelArguments arguments;
    // Channels of equal arguments share a connection unless told not to.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(-1);
    stubs.push_back(v1::Generation::NewStub(grpc::CreateCustomChannel(
        absl::GetFlag(FLAGS_server), grpc::InsecureChannelCredentials(), arguments)));
  }
  return stubs;
}

// A length that the server would refuse is said before the first call: fixed and uniform ones are
// wrong usage; a log-normal one always has a tail, which is cut.
void check_length(const char* name, const std::string& value, const LengthDistribution& length,
                  int64_t limit) {
  const int64_t longest = longest_length(length);
  if (longest <= limit) return;
  const std::string flag = "flag --" + std::string(name) + ": ";
  const std::string most = std::to_string(limit);
  if (!std::holds_alternative<LogNormalLength>(length)) {
    exit_usage(flag + "expected at most " + most + ", what this server takes, found '" + value +
               "'");
  }
  std::fprintf(stderr, "weir-load: %slonger ones are cut to %s tokens, what this server takes\n",
               flag.c_str(), most.c_str());
}

LoadPlan make_plan(v1::Generation::Stub& stub, const v1::GetModelResponse& model,
                   LengthDistribution prompt, LengthDistribution answer) {
  const bool is_text = absl::GetFlag(FLAGS_prompt_kind) == "text";
  // Text is tokenized again by the server and may take a few tokens more, bos among them.
  const int64_t margin = is_text ? 16 : 0;
  const auto prompt_limit = std::max<int64_t>(1, model.limits().prompt_tokens() - margin);
  const auto answer_limit = std::max<int64_t>(1, model.limits().new_tokens());
  check_length("prompt_tokens", absl::GetFlag(FLAGS_prompt_tokens), prompt, prompt_limit);
  check_length("answer_tokens", absl::GetFlag(FLAGS_answer_tokens), answer, answer_limit);
  // The server takes texts of as many bytes as its longest prompt can have: at least one a token.
  std::optional<PromptText> text;
  if (is_text) {
    text = get_prompt_text(stub, std::min<size_t>(kTextBytes, model.limits().prompt_tokens()));
  }
  return LoadPlan({.prompt_tokens = prompt,
                   .answer_tokens = answer,
                   .prompt_limit = prompt_limit,
                   .answer_limit = answer_limit,
                   .vocab = static_cast<int32_t>(model.vocab_size()),
                   .seed = absl::GetFlag(FLAGS_seed),
                   .ignore_eos = absl::GetFlag(FLAGS_ignore_eos),
                   .stream_chunk_tokens = absl::GetFlag(FLAGS_stream_chunk_tokens),
                   .temperature = absl::GetFlag(FLAGS_temperature)},
                  std::move(text));
}

LoadSettings settings(const LoadOptions& options, const v1::GetModelResponse& model) {
  char loop[80];
  if (options.rate) {
    std::snprintf(loop, sizeof loop, "open, %g calls/s", *options.rate);
  } else {
    std::snprintf(loop, sizeof loop, "closed, %d calls at a time", options.concurrency);
  }
  return {{"model", model.name()},
          {"device", model.device()},
          {"slots", std::to_string(model.state().slots())},
          {"loop", loop},
          {"prompt tokens", absl::GetFlag(FLAGS_prompt_tokens)},
          {"answer tokens", absl::GetFlag(FLAGS_answer_tokens)},
          {"seed", std::to_string(absl::GetFlag(FLAGS_seed))}};
}

void print_progress(const LoadOptions& options, const LoadProgress& progress, bool terminal) {
  const double share = std::max(static_cast<double>(progress.finished) / options.requests,
                                std::min(1.0, progress.seconds / options.seconds));
  const double speed = progress.seconds > 0 ? progress.tokens / progress.seconds : 0;
  char line[200];
  std::snprintf(line, sizeof line, "%lld of %lld requests, %lld running, %.0f tokens/s, %.1f s",
                static_cast<long long>(progress.finished),
                static_cast<long long>(options.requests),
                static_cast<long long>(progress.running), speed, progress.seconds);
  if (!terminal) {
    std::fprintf(stderr, "%s\n", line);
    return;
  }
  const int width = 24, filled = static_cast<int>(share * width);
  const std::string bar = std::string(filled, '#') + std::string(width - filled, '.');
  std::fprintf(stderr, "\r[%s] %s\033[K", bar.c_str(), line);
}

void write_json(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) fail("cannot write " + path + ": " + std::strerror(errno));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !written) {
    fail("cannot write " + path + ": " + std::strerror(errno));
  }
}

// That the report can be written is found out before the load is put on. What the file holds stays
// until then; one that this makes is removed again.
void check_writable(const std::string& path) {
  const bool existed = access(path.c_str(), F_OK) == 0;
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) fail("--json: cannot write " + path + ": " + std::strerror(errno));
  std::fclose(file);
  if (!existed) std::remove(path.c_str());
}

int load(int argc, char** argv) {
  const CommandLine line = parse_command_line(argc, argv, kUsage);
  if (!line.positional.empty()) exit_usage("unexpected argument '" + line.positional[0] + "'");
  const LoadOptions options = read_options();
  const LengthDistribution prompt =
      length_flag("prompt_tokens", absl::GetFlag(FLAGS_prompt_tokens));
  const LengthDistribution answer =
      length_flag("answer_tokens", absl::GetFlag(FLAGS_answer_tokens));
  const std::string path = absl::GetFlag(FLAGS_json);
  if (!path.empty()) check_writable(path);

  std::atomic<LoadRun*> running = nullptr;
  InterruptWatch watch([&running] {
    if (running == nullptr) std::_Exit(130);
    running.load()->interrupt();
  });
  std::vector<std::unique_ptr<v1::Generation::Stub>> stubs = connect();
  const v1::GetModelResponse model = get_model(*stubs[0]);
  const LoadPlan plan = make_plan(*stubs[0], model, prompt, answer);
  LoadRun run(options, plan, std::move(stubs));
  running = &run;

  const bool terminal = isatty(STDERR_FILENO) == 1;
  const LoadResult result = run.run(
      [&](const LoadProgress& progress) { print_progress(options, progress, terminal); },
      terminal ? 0.2 : 5);
  running = nullptr;
  if (terminal) std::fprintf(stderr, "\n");
  std::fputs(to_table(settings(options, model), result).c_str(), stdout);
  if (!path.empty()) write_json(path, to_json(settings(options, model), result));
  if (watch.received() != 0) return 128 + watch.received();
  return result.ok > 0 ? 0 : 1;
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) { return weir::load(argc, argv); }
