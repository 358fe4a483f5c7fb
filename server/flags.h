#pragma once
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace weir {

// The command line of weir-server. Defaults and ranges: flags.cpp, or --help.
struct Options {
  std::string model_folder;
  std::string model_name;

  std::string host, metrics_host;
  int32_t port = 0, metrics_port = 0;
  std::string tls_cert, tls_key, tls_client_ca;
  bool insecure_any_address = false;
  int32_t max_receive_mib = 0;
  int32_t max_concurrent_streams = 0;
  int32_t max_connection_age_seconds = 0;

  std::string device, vectors;
  bool defer_writes = true;
  int32_t threads = 0;

  int32_t slots = 0, kv_pages = 0, kv_page_tokens = 0;
  int32_t state_memory_mib = 0;
  int32_t step_tokens = 0, chunk_tokens = 0;
  int32_t queue = 0, max_prompt_tokens = 0, max_new_tokens = 0;
  bool strict = false;

  int32_t drain_seconds = 0;
  bool log_requests = false;
};

// Fills Options, or says what is wrong with which flag. Dashes and underscores in a flag's name
// mean the same. `help` is set when the usage was asked for; nothing else is then checked.
absl::StatusOr<Options> parse_flags(int argc, char** argv, bool& help);
std::string usage();

// 127.0.0.0/8, ::1, localhost.
bool is_loopback(const std::string& host);
// HOST:PORT, with brackets around an IPv6 address.
std::string address(const std::string& host, int32_t port);

}  // namespace weir
