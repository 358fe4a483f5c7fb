#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "engine/request.h"
#include "server/served_model.h"
#include "weir/v1/generation.pb.h"

namespace weir {

// What of an answer goes to the client, and in which form.
struct AnswerOptions {
  std::vector<std::string> stop_strings;
  bool include_stop = false;
  bool logprobs = false;
  bool return_token_ids = true;
  int32_t chunk_tokens = 1;      // tokens of a message at least
  std::string echo;              // the prompt's text, when it is to be sent first
  bool first_in_text = false;    // no text stands before the first token drawn
};

// A request that passed every check.
struct GenerateParameters {
  Request request;               // but for the deadline
  AnswerOptions answer;
  v1::Effective effective;
  std::string tenant;
};

// Why a request is refused.
struct Refusal {
  bool not_found = false;        // the model; otherwise an invalid argument
  std::string field;             // as the proto names it: "sampling.top_p"
  std::string problem;           // "expected (0, 1], found 1.5"
};

// Chances that the server takes when the client left them open.
struct RequestDefaults {
  uint64_t seed = 0;
  std::string request_id;
};

std::variant<GenerateParameters, Refusal> read_parameters(const v1::GenerateRequest& message,
                                                          const ServedModel& model,
                                                          const RequestDefaults& defaults);

// The effective parameters of a request that sets nothing; without seed and request id.
v1::Effective default_parameters(const ServedModel& model);

// An id of a request: "expected 0..4095, found 4096", or empty when it is fine.
std::string token_problem(Token id, const ServedModel& model);
// Likewise a text that is too long to become a prompt, whatever its tokens.
std::string text_problem(const std::string& text, const ServedModel& model);

}  // namespace weir
