#include "server/flags.h"

#include <algorithm>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/device.h"

ABSL_FLAG(std::string, host, "127.0.0.1", "address to serve gRPC on");
ABSL_FLAG(int32_t, port, 50051, "port to serve gRPC on; 0 takes a free one");
ABSL_FLAG(std::string, metrics_host, "127.0.0.1", "address to serve Prometheus metrics on");
ABSL_FLAG(int32_t, metrics_port, 9464, "port to serve Prometheus metrics on; 0 takes a free one");
ABSL_FLAG(bool, insecure_any_address, false,
          "serve without TLS on an address that is not loopback");
ABSL_FLAG(std::string, tls_cert, "", "PEM file: the server's certificate chain; turns TLS on");
ABSL_FLAG(std::string, tls_key, "", "PEM file: its private key");
ABSL_FLAG(std::string, tls_client_ca, "",
          "PEM file: authorities whose client certificates are demanded");
ABSL_FLAG(int32_t, max_receive_mib, 16, "largest request message, MiB");
ABSL_FLAG(int32_t, max_concurrent_streams, 1024, "calls at one time on one connection");
ABSL_FLAG(int32_t, max_connection_age_seconds, 0,
          "ask clients to reconnect after this long; 0: never");
ABSL_FLAG(std::string, model_name, "", "name that clients see; default: the folder's name");
ABSL_FLAG(std::string, device, "cpu", "device to run on: cpu, cuda (the first GPU) or cuda:N");
ABSL_FLAG(std::string, vectors, "split",
          "how linear layers, and softmax attention over prompts, take vectors on a GPU: split, as "
          "high and low halves, within 3e-6; bf16, rounded, within 2e-3, faster");
ABSL_FLAG(bool, defer_writes, true,
          "on a GPU, write a state back with every fourth token instead of each, where a kernel "
          "can: faster, but a sequence takes 5 to 11 % more state memory");
ABSL_FLAG(int32_t, threads, 0, "threads of the CPU device; 0: one for each core");
ABSL_FLAG(int32_t, slots, 0, "sequences that run at one time; 0: at most 64, fewer if memory says");
ABSL_FLAG(int32_t, state_memory_mib, 0,
          "memory for the states of sequences, MiB; 0: half of what is free after the weights");
ABSL_FLAG(int32_t, kv_pages, 0,
          "pages of keys and values, for models with growing attention; 0: what memory allows");
ABSL_FLAG(int32_t, kv_page_tokens, 64, "tokens in a page of keys and values");
ABSL_FLAG(int32_t, step_tokens, 512,
          "tokens computed in one step; raised to the slots if below. On a GPU prompts beside "
          "other sequences leave 8 of up to 1024 free, for padding");
ABSL_FLAG(int32_t, chunk_tokens, 256, "prompt tokens of one sequence in one step");
ABSL_FLAG(int32_t, queue, 256, "requests that may wait for a slot; more are RESOURCE_EXHAUSTED");
ABSL_FLAG(int32_t, max_prompt_tokens, 32768, "longest prompt");
ABSL_FLAG(int32_t, max_new_tokens, 4096, "longest answer");
ABSL_FLAG(bool, strict, false,
          "refuse to start rather than clamp slots, memory, steps, chunks or lengths, or to ignore "
          "a key of config.json");
ABSL_FLAG(int32_t, drain_seconds, 30,
          "time for running calls to finish after SIGTERM; then they end with UNAVAILABLE");
ABSL_FLAG(bool, log_requests, false, "one JSON line on stderr for each finished Generate call");

namespace weir {
namespace {

struct Known {
  const char* name;
  int64_t min = 0, max = 0;  // equal: not a number
};

// In the order of --help.
const std::vector<Known>& known_flags() {
  static const std::vector<Known> known = {
      {"host"},
      {"port", 0, 65535},
      {"metrics_host"},
      {"metrics_port", 0, 65535},
      {"insecure_any_address"},
      {"tls_cert"},
      {"tls_key"},
      {"tls_client_ca"},
      {"max_receive_mib", 1, 1024},
      {"max_concurrent_streams", 1, 1 << 20},
      {"max_connection_age_seconds", 0, 1 << 30},
      {"model_name"},
      {"device"},
      {"vectors"},
      {"defer_writes"},
      {"threads", 0, 128},
      {"slots", 0, 65535},
      {"state_memory_mib", 0, 1 << 30},
      {"kv_pages", 0, 1 << 24},
      {"kv_page_tokens", 1, 4096},
      {"step_tokens", 1, 1 << 16},
      {"chunk_tokens", 1, 1 << 16},
      {"queue", 0, 1 << 20},
      {"max_prompt_tokens", 1, 1 << 24},
      {"max_new_tokens", 1, 1 << 24},
      {"strict"},
      {"drain_seconds", 0, 86400},
      {"log_requests"},
  };
  return known;
}

const Known* find_known(const std::string& name) {
  for (const Known& known : known_flags()) {
    if (name == known.name) return &known;
  }
  return nullptr;
}

absl::Status set_flag(const Known& known, const std::string& value) {
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(known.name);
  const bool number = known.min != known.max;
  int64_t parsed = 0;
  const bool fits = !number || (absl::SimpleAtoi(value, &parsed) && parsed >= known.min &&
                                parsed <= known.max);
  std::string error;
  if (fits && flag->ParseFrom(value, &error)) return absl::OkStatus();
  const std::string expected =
      number ? absl::StrCat("a whole number ", known.min, "..", known.max) : "true or false";
  return absl::InvalidArgumentError(
      absl::StrCat("--", known.name, ": expected ", expected, ", found \"", value, "\""));
}

// One argument that begins with "--"; takes its value from the next one when it has no "=".
absl::Status parse_argument(int argc, char** argv, int& at) {
  const std::string argument = std::string(argv[at]).substr(2);
  const size_t equals = argument.find('=');
  std::string name = argument.substr(0, equals);
  std::replace(name.begin(), name.end(), '-', '_');
  const Known* known = find_known(name);
  bool negated = false;
  if (known == nullptr && name.rfind("no", 0) == 0) {
    known = find_known(name.substr(name.rfind("no_", 0) == 0 ? 3 : 2));
    negated = known != nullptr && absl::FindCommandLineFlag(known->name)->IsOfType<bool>();
    if (!negated) known = nullptr;
  }
  if (known == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("--", name, ": no such flag; see --help"));
  }
  const bool boolean = absl::FindCommandLineFlag(known->name)->IsOfType<bool>();
  if (equals != std::string::npos && !negated) {
    return set_flag(*known, argument.substr(equals + 1));
  }
  if (boolean) return set_flag(*known, negated ? "false" : "true");
  if (at + 1 >= argc) return absl::InvalidArgumentError(absl::StrCat("--", name, ": no value"));
  return set_flag(*known, argv[++at]);
}

Options read_flags() {
  return {.model_folder = "",
          .model_name = absl::GetFlag(FLAGS_model_name),
          .host = absl::GetFlag(FLAGS_host),
          .metrics_host = absl::GetFlag(FLAGS_metrics_host),
          .port = absl::GetFlag(FLAGS_port),
          .metrics_port = absl::GetFlag(FLAGS_metrics_port),
          .tls_cert = absl::GetFlag(FLAGS_tls_cert),
          .tls_key = absl::GetFlag(FLAGS_tls_key),
          .tls_client_ca = absl::GetFlag(FLAGS_tls_client_ca),
          .insecure_any_address = absl::GetFlag(FLAGS_insecure_any_address),
          .max_receive_mib = absl::GetFlag(FLAGS_max_receive_mib),
          .max_concurrent_streams = absl::GetFlag(FLAGS_max_concurrent_streams),
          .max_connection_age_seconds = absl::GetFlag(FLAGS_max_connection_age_seconds),
          .device = absl::GetFlag(FLAGS_device),
          .vectors = absl::GetFlag(FLAGS_vectors),
          .defer_writes = absl::GetFlag(FLAGS_defer_writes),
          .threads = absl::GetFlag(FLAGS_threads),
          .slots = absl::GetFlag(FLAGS_slots),
          .kv_pages = absl::GetFlag(FLAGS_kv_pages),
          .kv_page_tokens = absl::GetFlag(FLAGS_kv_page_tokens),
          .state_memory_mib = absl::GetFlag(FLAGS_state_memory_mib),
          .step_tokens = absl::GetFlag(FLAGS_step_tokens),
          .chunk_tokens = absl::GetFlag(FLAGS_chunk_tokens),
          .queue = absl::GetFlag(FLAGS_queue),
          .max_prompt_tokens = absl::GetFlag(FLAGS_max_prompt_tokens),
          .max_new_tokens = absl::GetFlag(FLAGS_max_new_tokens),
          .strict = absl::GetFlag(FLAGS_strict),
          .drain_seconds = absl::GetFlag(FLAGS_drain_seconds),
          .log_requests = absl::GetFlag(FLAGS_log_requests)};
}

// What flags must be to each other.
absl::Status check_together(const Options& options) {
  if (options.model_folder.empty()) {
    return absl::InvalidArgumentError("expected a model folder; see --help");
  }
  for (const absl::Status& status :
       {check_device(options.device), check_vectors(options.vectors, options.device)}) {
    if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat("--", status.message()));
  }
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError("--tls_cert and --tls_key: expected both or neither");
  }
  if (!options.tls_client_ca.empty() && options.tls_cert.empty()) {
    return absl::InvalidArgumentError("--tls_client_ca: expected --tls_cert beside it");
  }
  if (options.tls_cert.empty() && !is_loopback(options.host) && !options.insecure_any_address) {
    return absl::InvalidArgumentError(
        absl::StrCat("--host: expected a loopback address, TLS or --insecure_any_address, found ",
                     options.host));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Options> parse_flags(int argc, char** argv, bool& help) {
  help = false;
  std::string folder;
  for (int at = 1; at < argc; ++at) {
    const std::string argument = argv[at];
    if (argument == "--help" || argument == "-h") {
      help = true;
      return Options{};
    }
    if (argument.rfind("--", 0) == 0) {
      if (absl::Status status = parse_argument(argc, argv, at); !status.ok()) return status;
    } else if (argument.rfind("-", 0) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(argument, ": no such flag; see --help"));
    } else if (!folder.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("expected one model folder, found ", folder, " and ", argument));
    } else {
      folder = argument;
    }
  }
  Options options = read_flags();
  options.model_folder = folder;
  if (absl::Status status = check_together(options); !status.ok()) return status;
  return options;
}

std::string usage() {
  std::string text = "usage: weir-server MODEL_DIR [flags]\n\nServes a checkpoint over gRPC.\n\n";
  for (const Known& known : known_flags()) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(known.name);
    absl::StrAppend(&text, "  --", known.name);
    if (!flag->DefaultValue().empty()) absl::StrAppend(&text, "=", flag->DefaultValue());
    if (known.min != known.max) absl::StrAppend(&text, "  (", known.min, "..", known.max, ")");
    absl::StrAppend(&text, "\n      ", flag->Help(), "\n");
  }
  absl::StrAppend(&text,
                  "\nSIGTERM or SIGINT: running calls finish within --drain_seconds, exit 0; a "
                  "second one ends at once,\nexit 1, unless it is the same within a second. "
                  "Wrong flags exit 2, a model that cannot\nbe served exits 1.\n");
  return text;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host == "[::1]" || host.rfind("127.", 0) == 0;
}

std::string address(const std::string& host, int32_t port) {
  const bool bare_ipv6 = host.find(':') != std::string::npos && host.front() != '[';
  return bare_ipv6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

}  // namespace weir
