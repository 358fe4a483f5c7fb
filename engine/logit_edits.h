#pragma once
#include <span>
#include <vector>

#include "engine/request.h"

namespace weir {

// The changes to the logits that a request asks for: its bias, and penalties for what its sequence
// has seen. Each token stands once, in order of id, so that a step costs one copy of what this one
// sequence has seen; a request without penalties keeps its bias alone.
class LogitEdits {
 public:
  LogitEdits() = default;
  LogitEdits(const Request& request, std::span<const Token> prompt);

  void add_generated(Token token);
  bool penalise() const { return penalised_; }  // whether generated tokens count
  // Those that hold for the next draw, with the `forbidden` tokens out of it.
  void list(std::span<const Token> forbidden, std::vector<LogitEdit>& out) const;

 private:
  std::vector<LogitEdit> edits_;
  bool penalised_ = false;
};

}  // namespace weir
