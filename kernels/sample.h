#pragma once
#include "kernels/types.h"

namespace weir {

// How one token is drawn. Defaults draw the most likely token.
struct Sampling {
  float temperature = 0;         // 0: greedy
  int32_t top_k = 0;             // 0: all
  float top_p = 1;               // keep the smallest set with at least this probability
  float min_p = 0;               // drop tokens below min_p times the largest probability
  float typical_p = 1;           // locally typical sampling (arXiv 2202.00666)
  float repetition_penalty = 1;  // seen tokens: positive logits divided, others multiplied by it
  float frequency_penalty = 0;   // subtracted once for each time the token was generated
  float presence_penalty = 0;    // subtracted when the token was generated at all
  uint64_t seed = 0;
};

// A change to one token's logit, made before anything else.
struct LogitEdit {
  Token token = 0;
  float bias = 0;           // added; -inf forbids the token
  int32_t generated = 0;    // times generated so far
  bool seen = false;        // in the prompt or generated
};

// Draws a token for each row of logits, or looks up a given one.
//
// Order: edits (repetition, frequency and presence penalties, bias), temperature, top_k, typical_p,
// top_p, min_p; each filter sees the distribution renormalised after the one before. The random
// number is a function of (seed, position) alone. Equal logits: the smaller id wins.
// Log-probabilities are of the model's own distribution: log_softmax of the logits as they came.
struct Sample {
  static constexpr int kTop = 20;  // most alternatives reported

  int32_t count = 0, vocab = 0;
  Acts logits;                             // [count, vocab]; edits are applied in place
  const Sampling* sampling = nullptr;      // [count]
  const int32_t* position = nullptr;       // [count] position of the token to be drawn
  const Token* target = nullptr;           // [count]; >= 0: do not draw, report this token
  const int32_t* top = nullptr;            // [count] alternatives wanted, 0..kTop
  const int32_t* edit_begin = nullptr;     // [count + 1]
  const LogitEdit* edits = nullptr;        // [edit_begin[count]]
  // Where the edits were made before the last token was known: it counts as generated once more.
  const Token* read = nullptr;             // [tokens] of this step
  const int32_t* counts = nullptr;         // [count] which of them; -1: none. Null: none of all
  Token* token = nullptr;                  // [count] drawn, or the target; -1: no finite logit
  float* logprob = nullptr;                // [count]
  Token* top_token = nullptr;              // [count, kTop], most likely first
  float* top_logprob = nullptr;            // [count, kTop]
};

}  // namespace weir
