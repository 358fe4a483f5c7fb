#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "engine/text_stream.h"
#include "engine/tokenizer.h"
#include "server/parameters.h"
#include "weir/v1/generation.pb.h"

namespace weir {

// An emission and when it came.
struct TimedEmission {
  Emission emission;
  Nanoseconds at = 0;
};

// Emissions of one sequence to response messages. No threads, no gRPC: one owner at a time.
class Answer {
 public:
  Answer(GenerateParameters parameters, const Tokenizer& tokenizer, Nanoseconds received);

  // Adds to the message under way. Nothing more is taken once ended().
  void add(const TimedEmission& timed);
  // Whether the message under way has something to say.
  bool worth_sending() const;
  const v1::GenerateResponse& message() const { return message_; }
  int32_t message_tokens() const { return message_tokens_; }
  // Begins the next message.
  void clear();

  // Set once: by a stop string, or by the engine's last emission. The last message then carries
  // the reason, usage and timings.
  bool ended() const { return reason_ != v1::FINISH_REASON_UNSPECIFIED; }
  v1::FinishReason reason() const { return reason_; }
  // Completes the message under way as the last one.
  void finish_message();
  void end(v1::FinishReason reason) { reason_ = reason; }  // for another reason than came

  const GenerateParameters& parameters() const { return parameters_; }
  int32_t prompt_tokens() const { return int32_t(parameters_.effective.prompt_tokens()); }
  int32_t generated() const { return generated_; }

  // Moments; kNever until they come.
  Nanoseconds received() const { return received_; }
  Nanoseconds started() const { return started_; }
  Nanoseconds first_token() const { return first_token_; }
  Nanoseconds last_token() const { return last_token_; }

 private:
  void add_token(const Emission& emission, Nanoseconds at);
  void add_logprobs(const Emission& emission);

  const GenerateParameters parameters_;
  const Tokenizer& tokenizer_;
  TextStream text_;
  v1::GenerateResponse message_;
  int32_t message_tokens_ = 0;
  int32_t generated_ = 0;
  v1::FinishReason reason_ = v1::FINISH_REASON_UNSPECIFIED;
  std::optional<Token> matched_token_;
  const Nanoseconds received_;
  Nanoseconds started_ = kNever, first_token_ = kNever, last_token_ = kNever;
};

}  // namespace weir
