#include "engine/logit_edits.h"

#include <algorithm>
#include <limits>

namespace weir {
namespace {

// The token's edit, made when there is none.
LogitEdit& edit_of(Token token, std::vector<LogitEdit>& edits) {
  const auto place = std::ranges::lower_bound(edits, token, {}, &LogitEdit::token);
  if (place != edits.end() && place->token == token) return *place;
  return *edits.insert(place, {.token = token});
}

// Sorted as a whole: one insertion after another would be quadratic in a long prompt.
std::vector<LogitEdit> seen_tokens(std::span<const Token> prompt) {
  std::vector<Token> tokens(prompt.begin(), prompt.end());
  std::ranges::sort(tokens);
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  std::vector<LogitEdit> edits;
  edits.reserve(tokens.size());
  for (const Token token : tokens) edits.push_back({.token = token, .seen = true});
  return edits;
}

}  // namespace

LogitEdits::LogitEdits(const Request& request, std::span<const Token> prompt) {
  const Sampling& sampling = request.sampling;
  const bool repetition = sampling.repetition_penalty != 1;
  penalised_ = repetition || sampling.frequency_penalty != 0 || sampling.presence_penalty != 0;
  // The other two penalties look at generated tokens only.
  if (repetition) edits_ = seen_tokens(prompt);
  for (const auto& [token, bias] : request.logit_bias) edit_of(token, edits_).bias = bias;
}

void LogitEdits::add_generated(Token token) {
  if (!penalised_) return;
  LogitEdit& edit = edit_of(token, edits_);
  ++edit.generated;
  edit.seen = true;
}

void LogitEdits::list(std::span<const Token> forbidden, std::vector<LogitEdit>& out) const {
  out.assign(edits_.begin(), edits_.end());
  for (const Token token : forbidden) {
    edit_of(token, out).bias = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace weir
