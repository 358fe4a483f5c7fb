#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/limits.h"
#include "kernels/sample.h"

namespace weir {

using SequenceId = uint64_t;
using Nanoseconds = int64_t;  // of one steady clock; the core never reads it, it is told

inline constexpr Nanoseconds kNever = INT64_MAX;

using SnapshotId = uint64_t;  // never used twice
inline constexpr SnapshotId kNoSnapshot = 0;

struct Request {
  std::vector<Token> prompt;           // at least one token
  int32_t new_tokens = 0;              // at most this many are drawn
  int32_t min_tokens = 0;              // stop tokens are forbidden before this many are drawn
  std::vector<Token> stop;             // drawing one of these ends the sequence
  Sampling sampling;
  std::vector<std::pair<Token, float>> logit_bias;
  bool logprobs = false;               // of each token drawn
  int32_t top_logprobs = 0;            // alternatives for each, 0 .. Sample::kTop
  bool prompt_logprobs = false;        // of prompt tokens 1 .. n - 1, given those before
  int32_t priority = 0;                // larger goes first; equal ones in order of arrival
  Nanoseconds deadline = kNever;
  // Where in the prompt the state is kept: after so many tokens, 1 .. n, in rising order. The
  // emission that follows such a token says the snapshot's id; it stays until its owner, who
  // submitted this, drops it.
  std::vector<int32_t> snapshots;
  // Not kNoSnapshot: start from this state instead of from zero. The prompt begins with the tokens
  // that it has read, which are not read again, and goes on for one or more.
  SnapshotId start_from = kNoSnapshot;
};

// Whether a request can be served at all under these limits, whatever else runs.
enum class Admission : uint8_t {
  Accepted,
  QueueFull,
  EmptyPrompt,
  PromptTooLong,
  BadToken,       // an id outside 0 .. vocab - 1, in the prompt, the stop list or the bias
  BadLength,      // new_tokens outside 1 .. limit, or min_tokens above it
  TooManyPages,   // needs more KV pages than there are
  BadSampling,    // a number that is not finite or out of its range
  BadSnapshot,    // positions outside the prompt, not rising or read already; a snapshot of other
                  // tokens, or of the whole prompt; prompt_logprobs of tokens that are not read
  NoSnapshotFree,   // more than there are, or than are neither kept nor promised
  UnknownSnapshot,  // to start from: never made, or dropped
  SnapshotOfPages,  // this model also remembers in KV pages, which are not kept
};
Admission check(const Request& request, const Limits& limits);

// KV pages that a request can ever fill: the last token drawn is never read.
int64_t pages_for(const Request& request, const Limits& limits);

enum class Finish : uint8_t {
  Stop,       // a stop token was drawn
  Length,     // new_tokens were drawn
  Cancelled,
  Deadline,
  Error,      // the model produced no finite number for this row
};

struct TokenScore {
  Token token = 0;
  float logprob = 0;
};

// Something that happened to a sequence. Prompt scores come before the first token. The last
// emission of a sequence, and only that one, carries `finish`; it may carry a token too.
struct Emission {
  SequenceId id = 0;
  std::optional<Token> token;
  std::optional<float> logprob;         // of token
  std::vector<TokenScore> top;          // alternatives at token's place, most likely first
  struct PromptScore {
    int32_t position = 0;               // of the prompt token it scores
    float logprob = 0;
    std::vector<TokenScore> top;
  };
  std::vector<PromptScore> prompt;      // newly scored prompt positions, in order
  struct Snapshot {
    SnapshotId id = kNoSnapshot;
    int32_t position = 0;               // how many of the prompt's tokens it has read
  };
  std::optional<Snapshot> snapshot;     // newly kept
  std::optional<Finish> finish;
  bool started = false;                 // had left the queue when it finished
  Nanoseconds started_at = kNever;      // when it left the queue; kNever: it did not
};

}  // namespace weir
