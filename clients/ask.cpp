// Asks a weir-server one question and streams the answer to the terminal.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "clients/command_line.h"
#include "clients/health.h"
#include "clients/interrupt_watch.h"
#include "clients/status_text.h"
#include "clients/text_file.h"
#include "clients/utf8.h"
#include "weir/v1/generation.grpc.pb.h"

// A flag that is not given is not sent: the server's default holds.
ABSL_FLAG(std::string, server, "127.0.0.1:50051", "HOST:PORT of the server");
ABSL_FLAG(std::string, file, "", "read the prompt from this file");
ABSL_FLAG(std::optional<float>, temperature, std::nullopt, "0..100; 0: the likeliest token");
ABSL_FLAG(std::optional<uint32_t>, top_k, std::nullopt, "keep the k likeliest tokens; 0: all");
ABSL_FLAG(std::optional<float>, top_p, std::nullopt, "keep this much probability, (0, 1]");
ABSL_FLAG(std::optional<float>, min_p, std::nullopt, "least part of the best probability, [0, 1]");
ABSL_FLAG(std::optional<float>, typical_p, std::nullopt, "locally typical sampling, (0, 1]");
ABSL_FLAG(std::optional<float>, repetition_penalty, std::nullopt, "(0, 100]; 1: none");
ABSL_FLAG(std::optional<float>, frequency_penalty, std::nullopt, "-100..100; 0: none");
ABSL_FLAG(std::optional<float>, presence_penalty, std::nullopt, "-100..100; 0: none");
ABSL_FLAG(std::optional<uint64_t>, seed, std::nullopt, "equal seeds give equal answers");
ABSL_FLAG(std::optional<uint32_t>, max_tokens, std::nullopt, "longest answer");
ABSL_FLAG(std::optional<uint32_t>, min_tokens, std::nullopt, "no end before this many tokens");
ABSL_FLAG(std::string, stop, "", "end before this text; may be given several times");
ABSL_FLAG(bool, include_stop, false, "print the stop text too");
ABSL_FLAG(bool, ignore_eos, false, "go on when the model ends its text");
ABSL_FLAG(bool, echo, false, "print the prompt before the answer");
ABSL_FLAG(bool, logprobs, false, "then print each token's log-probability to stderr");
ABSL_FLAG(bool, token_ids, false, "then print the answer's token ids to stderr");
ABSL_FLAG(std::optional<double>, timeout_s, std::nullopt, "give up after this many seconds");
ABSL_FLAG(double, wait_s, 0, "wait this long for the server to be ready");
ABSL_FLAG(bool, stats, false, "then print why it ended, usage, timings and seed to stderr");

namespace weir {
namespace {

constexpr char kUsage[] =
    "usage: weir-ask [flags] [PROMPT]\n"
    "\n"
    "Sends PROMPT (or --file, or standard input when there is neither or PROMPT is -) to a\n"
    "weir-server and prints the answer as it arrives. Ctrl-C cancels. One newline at the end of\n"
    "a file or of standard input does not belong to the prompt.\n"
    "\n"
    "Exit code 0: answered, 1: refused or failed, 2: wrong usage, 130: cancelled by Ctrl-C,\n"
    "141: nobody reads the output any more.\n";

constexpr int kFailed = 1, kPipeGone = 128 + SIGPIPE;

int fail(const std::string& message) {
  std::fprintf(stderr, "weir-ask: %s\n", message.c_str());
  return kFailed;
}

// What arrived besides the text.
struct Answer {
  std::vector<int32_t> token_ids;
  std::vector<v1::TokenLogprob> logprobs;
  v1::Effective effective;
  v1::GenerateResponse last;
  bool printed = false;      // some text has been written
  bool ends_line = true;     // it ends with a newline
  int write_error = 0;       // errno of standard output
};

std::string prompt_source(const CommandLine& line) {
  const std::string file = absl::GetFlag(FLAGS_file);
  if (line.positional.size() > 1) {
    exit_usage("one PROMPT expected, found " + std::to_string(line.positional.size()) +
               " arguments; put it in quotes");
  }
  if (!file.empty() && !line.positional.empty()) exit_usage("both --file and a PROMPT are given");
  if (!file.empty()) return file;
  return line.positional.empty() ? "-" : line.positional[0];
}

std::optional<std::string> read_prompt(const CommandLine& line) {
  const std::string source = prompt_source(line);
  std::string prompt = source;
  if (source == "-" || !absl::GetFlag(FLAGS_file).empty()) {
    if (source == "-" && isatty(STDIN_FILENO) == 1) {
      std::fprintf(stderr, "weir-ask: type the prompt; Ctrl-D ends it\n");
    }
    std::string error;
    std::optional<std::string> text = read_text(source, &error);
    if (!text) {
      fail(error);
      return std::nullopt;
    }
    prompt = *text;
    if (prompt.ends_with('\n')) prompt.pop_back();
  }
  const size_t valid = valid_utf8_prefix(prompt);
  if (valid == prompt.size()) return prompt;
  fail("the prompt is not UTF-8: byte " + std::to_string(valid) + " is wrong");
  return std::nullopt;
}

void fill_sampling(v1::SamplingParameters* sampling) {
  if (const auto value = absl::GetFlag(FLAGS_temperature)) sampling->set_temperature(*value);
  if (const auto value = absl::GetFlag(FLAGS_top_k)) sampling->set_top_k(*value);
  if (const auto value = absl::GetFlag(FLAGS_top_p)) sampling->set_top_p(*value);
  if (const auto value = absl::GetFlag(FLAGS_min_p)) sampling->set_min_p(*value);
  if (const auto value = absl::GetFlag(FLAGS_typical_p)) sampling->set_typical_p(*value);
  if (const auto value = absl::GetFlag(FLAGS_repetition_penalty)) {
    sampling->set_repetition_penalty(*value);
  }
  if (const auto value = absl::GetFlag(FLAGS_frequency_penalty)) {
    sampling->set_frequency_penalty(*value);
  }
  if (const auto value = absl::GetFlag(FLAGS_presence_penalty)) {
    sampling->set_presence_penalty(*value);
  }
  if (const auto value = absl::GetFlag(FLAGS_seed)) sampling->set_seed(*value);
}

v1::GenerateRequest make_request(const CommandLine& line, const std::string& prompt) {
  v1::GenerateRequest request;
  request.set_prompt(prompt);
  fill_sampling(request.mutable_sampling());
  v1::StopParameters* stop = request.mutable_stop();
  if (const auto stops = line.values.find("stop"); stops != line.values.end()) {
    for (const std::string& text : stops->second) {
      if (valid_utf8_prefix(text) != text.size()) exit_usage("flag --stop: not UTF-8");
      stop->add_strings(text);
    }
  }
  if (absl::GetFlag(FLAGS_include_stop)) stop->set_include_stop(true);
  if (absl::GetFlag(FLAGS_ignore_eos)) stop->set_ignore_eos(true);
  if (const auto value = absl::GetFlag(FLAGS_max_tokens)) stop->set_max_tokens(*value);
  if (const auto value = absl::GetFlag(FLAGS_min_tokens)) stop->set_min_tokens(*value);
  v1::OutputParameters* output = request.mutable_output();
  if (absl::GetFlag(FLAGS_echo)) output->set_echo(true);
  if (absl::GetFlag(FLAGS_logprobs)) output->set_logprobs(true);
  // --stats counts them, when the end that would say how many never comes.
  output->set_return_token_ids(absl::GetFlag(FLAGS_token_ids) || absl::GetFlag(FLAGS_stats));
  return request;
}

bool print(const std::string& text, Answer& answer) {
  if (text.empty()) return true;
  answer.printed = true;
  answer.ends_line = text.back() == '\n';
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) {
    return true;
  }
  answer.write_error = errno;
  return false;
}

grpc::Status stream(v1::Generation::Stub& stub, grpc::ClientContext& context,
                    const v1::GenerateRequest& request, Answer& answer) {
  const auto reader = stub.Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (response.has_effective()) answer.effective = response.effective();
    answer.token_ids.insert(answer.token_ids.end(), response.token_ids().begin(),
                            response.token_ids().end());
    answer.logprobs.insert(answer.logprobs.end(), response.logprobs().begin(),
                           response.logprobs().end());
    if (answer.write_error == 0 && !print(response.text(), answer)) context.TryCancel();
    if (response.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) answer.last = response;
  }
  return reader->Finish();
}

std::string finish_name(v1::FinishReason reason) {
  const std::string name = v1::FinishReason_Name(reason), prefix = "FINISH_REASON_";
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

void print_stats(const Answer& answer) {
  const v1::GenerateResponse& last = answer.last;
  const v1::Usage& usage = last.usage();
  const v1::Timings& timings = last.timings();
  std::fprintf(stderr, "finish: %s", finish_name(last.finish_reason()).c_str());
  if (!last.matched_stop().empty()) std::fprintf(stderr, " at '%s'", last.matched_stop().c_str());
  if (last.has_matched_token()) std::fprintf(stderr, " at token %d", last.matched_token());
  if (last.unfinished_bytes() > 0) {
    std::fprintf(stderr, ", %u bytes of a character unfinished", last.unfinished_bytes());
  }
  std::fprintf(stderr, "\ntokens: prompt %u (%u reused), generated %u\n", usage.prompt_tokens(),
               usage.cached_tokens(), usage.generated_tokens());
  std::fprintf(stderr, "seconds: queue %.3f, prefill %.3f, decode %.3f", timings.queue_seconds(),
               timings.prefill_seconds(), timings.decode_seconds());
  if (usage.generated_tokens() > 1 && timings.decode_seconds() > 0) {
    std::fprintf(stderr, " (%.1f tokens/s)",
                 (usage.generated_tokens() - 1) / timings.decode_seconds());
  }
  std::fprintf(stderr, "\nseed: %llu\n",
               static_cast<unsigned long long>(answer.effective.sampling().seed()));
}

// Of a call that ended before its answer did, by its deadline for one.
void print_stats_without_end(const Answer& answer, const grpc::Status& status) {
  std::fprintf(stderr, "finish: none, %s\ntokens: received %zu\n",
               code_name(status.error_code()).c_str(), answer.token_ids.size());
  if (!answer.effective.has_sampling()) return;  // nothing of the server arrived
  std::fprintf(stderr, "seed: %llu\n",
               static_cast<unsigned long long>(answer.effective.sampling().seed()));
}

void print_extras(const Answer& answer) {
  if (absl::GetFlag(FLAGS_token_ids)) {
    std::fprintf(stderr, "token ids:");
    for (const int32_t id : answer.token_ids) std::fprintf(stderr, " %d", id);
    std::fprintf(stderr, "\n");
  }
  if (absl::GetFlag(FLAGS_logprobs)) {
    std::fprintf(stderr, "token id  logprob\n");
    for (const v1::TokenLogprob& token : answer.logprobs) {
      std::fprintf(stderr, "%8d  %.4f\n", token.token_id(), token.logprob());
    }
  }
  if (absl::GetFlag(FLAGS_stats)) print_stats(answer);
}

int conclude(const grpc::Status& status, const Answer& answer, int signal) {
  if (answer.write_error == EPIPE) return kPipeGone;
  if (answer.write_error != 0) {
    return fail("cannot write the answer: " + std::string(std::strerror(answer.write_error)));
  }
  if (answer.printed && !answer.ends_line && isatty(STDOUT_FILENO) == 1) std::puts("");
  if (!status.ok() && absl::GetFlag(FLAGS_stats)) print_stats_without_end(answer, status);
  if (signal != 0 && status.error_code() == grpc::StatusCode::CANCELLED) return 128 + signal;
  if (!status.ok()) {
    const bool unreachable = status.error_code() == grpc::StatusCode::UNAVAILABLE;
    return fail(status_line(status) +
                (unreachable ? " (--server " + absl::GetFlag(FLAGS_server) + ")" : ""));
  }
  if (answer.last.finish_reason() == v1::FINISH_REASON_UNSPECIFIED) {
    return fail("the stream ended without a finish reason");
  }
  print_extras(answer);
  return 0;
}

int ask(int argc, char** argv) {
  const CommandLine line = parse_command_line(argc, argv, kUsage);
  const std::optional<double> timeout_s = absl::GetFlag(FLAGS_timeout_s);
  if (timeout_s && !(*timeout_s > 0 && *timeout_s <= 1e8)) {
    exit_usage("flag --timeout_s: expected above 0 and at most 1e8");
  }
  const double wait_s = absl::GetFlag(FLAGS_wait_s);
  if (!(wait_s >= 0 && wait_s <= 1e8)) exit_usage("flag --wait_s: expected 0..1e8");
  const std::optional<std::string> prompt = read_prompt(line);
  if (!prompt) return kFailed;
  const v1::GenerateRequest request = make_request(line, *prompt);

  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is an error of write(), not our end
  std::atomic<grpc::ClientContext*> running = nullptr;
  InterruptWatch watch([&running] {
    if (running == nullptr) std::_Exit(128 + SIGINT);
    running.load()->TryCancel();
  });
  const std::string server = absl::GetFlag(FLAGS_server);
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateChannel(server, grpc::InsecureChannelCredentials());
  if (wait_s > 0 && !wait_until_serving(channel, "weir.v1.Generation", wait_s)) {
    return fail("no server is ready at " + server);
  }
  grpc::ClientContext context;
  if (timeout_s) {
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::microseconds(static_cast<int64_t>(*timeout_s * 1e6)));
  }
  running = &context;
  const std::unique_ptr<v1::Generation::Stub> stub = v1::Generation::NewStub(channel);
  Answer answer;
  const grpc::Status status = stream(*stub, context, request, answer);
  running = nullptr;
  return conclude(status, answer, watch.received());
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) { return weir::ask(argc, argv); }
