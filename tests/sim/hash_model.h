#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <deque>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "kernels/check.h"

namespace weir {

// A model that stands where the Runner stands. A slot's state is a hash of every token it has
// read, a page keeps what was written to it, and a draw is a hash of both and of everything the
// request says about drawing. A lost, doubled or swapped token, a slot or page that is shared,
// stale or missing, a parameter, penalty or position that is wrong or a neighbour's: each changes
// the rest of the answer, so comparing with alone() checks the whole of scheduling at once.
class HashModel final : public StepRunner {
 public:
  // Computes in begin() whatever the number of steps that may be out, as a device in order does.
  explicit HashModel(const Limits& limits, size_t steps_out = 1)
      : limits_(limits),
        steps_out_(steps_out),
        slots_(size_t(limits.slots) + size_t(limits.snapshots)),
        cells_(size_t(limits.pages) * size_t(limits.page_tokens)) {}

  size_t steps_out() const override { return steps_out_; }

  void begin(const StepBatch& batch) override {
    WEIR_CHECK(answers_.size() < steps_out_);
    drawn_.clear();
    std::set<Slot> slots;
    std::set<int32_t> pages;
    size_t begin = 0;
    for (const SlotCopy& start : batch.starts) {
      WEIR_CHECK(start.from >= limits_.slots);
      copy(start);
    }
    for (const Row& row : batch.rows) {
      WEIR_CHECK(row.count >= 1 && size_t(row.begin) == begin);
      WEIR_CHECK(slots.insert(row.slot).second);
      for (const int32_t page : row.pages) WEIR_CHECK(pages.insert(page).second);
      read(row, batch);
      begin += size_t(row.count);
    }
    WEIR_CHECK(begin == batch.tokens.size());
    WEIR_CHECK(drawn_.size() == batch.outputs.size());
    for (const SlotCopy& keep : batch.keeps) {
      WEIR_CHECK(slots.contains(keep.from) && keep.to >= limits_.slots);
      copy(keep);
    }
    bytes_ = 1000 + begin;
    last_drawn_ = drawn_;
    answers_.push_back(drawn_);
  }

  std::span<const Drawn> finish() override {
    answer_ = std::move(answers_.front());
    answers_.pop_front();
    return answer_;
  }

  size_t step_bytes() const override { return bytes_; }

  // What a sequence must answer, whatever runs beside it.
  struct Answer {
    std::vector<Emission::PromptScore> prompt;
    std::vector<Drawn> tokens;
    Finish finish = Finish::Length;
  };
  static Answer alone(const Request& request, const Limits& limits);

 private:
  struct State {
    uint64_t hash = 0;
    int32_t length = 0;
  };

  static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ (value + 0x632BE59BD9B4E019ull)) * 0x9E3779B97F4A7C15ull;
    return hash ^ (hash >> 29);
  }
  static uint64_t mix(uint64_t hash, float value) {
    return mix(hash, uint64_t(std::bit_cast<uint32_t>(value)));
  }
  // What a token leaves in the page at its position.
  static uint64_t cell_of(Token token, int32_t position) {
    return mix(uint64_t(position), uint64_t(token));
  }
  static uint64_t effect(const Sampling& sampling, const LogitEdit& edit);
  static uint64_t hash_of(const Sampling& sampling);
  static Drawn answer(uint64_t seen, const Output& output, int32_t vocab);
  static std::vector<LogitEdit> edits_of(const Request& request, std::span<const Token> tokens,
                                         int32_t vocab);

  void copy(const SlotCopy& copy) {
    WEIR_CHECK(slots_.at(size_t(copy.from)).length == copy.position);
    slots_.at(size_t(copy.to)) = slots_[size_t(copy.from)];
  }

  void read(const Row& row, const StepBatch& batch) {
    WEIR_CHECK(row.slot >= 0 && row.slot < limits_.slots);
    State& state = slots_[size_t(row.slot)];
    if (row.first == 0) state = {};
    WEIR_CHECK(row.first == state.length);
    for (int32_t token = row.begin; token < row.begin + row.count; ++token) {
      const Token id = id_of(batch.tokens[size_t(token)]);
      state.hash = mix(state.hash, uint64_t(id));
      if (limits_.pages > 0) cell(row, state.length) = cell_of(id, state.length);
      ++state.length;
      if (drawn_.size() == batch.outputs.size()) continue;
      Output output = batch.outputs[drawn_.size()];
      if (output.token != token) continue;
      WEIR_CHECK(output.id == row.id);
      if (output.counts_last) count(id, output.edits);
      uint64_t seen = state.hash;
      const int32_t kept = limits_.pages > 0 ? state.length : 0;
      for (int32_t position = 0; position < kept; ++position) seen = mix(seen, cell(row, position));
      drawn_.push_back(answer(seen, output, limits_.vocab));
    }
  }

  // A token that the step before has drawn is known here alone.
  Token id_of(Token token) const {
    if (token >= 0) return token;
    WEIR_CHECK(size_t(~token) < last_drawn_.size());
    return std::max(last_drawn_[size_t(~token)].token, 0);
  }
  static void count(Token last, std::vector<LogitEdit>& edits) {
    auto place = std::ranges::find(edits, last, &LogitEdit::token);
    if (place == edits.end()) place = edits.insert(place, {.token = last});
    ++place->generated;
    place->seen = true;
  }

  uint64_t& cell(const Row& row, int32_t position) {
    const auto place = size_t(position / limits_.page_tokens);
    WEIR_CHECK(place < row.pages.size());
    WEIR_CHECK(row.pages[place] >= 0 && row.pages[place] < limits_.pages);
    return cells_[size_t(row.pages[place]) * size_t(limits_.page_tokens) +
                  size_t(position % limits_.page_tokens)];
  }

  const Limits limits_;
  const size_t steps_out_;
  std::vector<State> slots_;
  std::vector<uint64_t> cells_;
  std::vector<Drawn> drawn_, last_drawn_, answer_;
  std::deque<std::vector<Drawn>> answers_;  // of the steps that are out
  size_t bytes_ = 0;
};

inline uint64_t HashModel::hash_of(const Sampling& s) {
  uint64_t hash = mix(s.seed, s.temperature);
  hash = mix(mix(hash, uint64_t(s.top_k)), s.top_p);
  hash = mix(mix(hash, s.min_p), s.typical_p);
  hash = mix(mix(hash, s.repetition_penalty), s.frequency_penalty);
  return mix(hash, s.presence_penalty);
}

// Only what would change a logit: an edit may name more than its request's penalties use.
inline uint64_t HashModel::effect(const Sampling& sampling, const LogitEdit& edit) {
  const bool seen = edit.seen && sampling.repetition_penalty != 1;
  const bool counted = sampling.frequency_penalty != 0 || sampling.presence_penalty != 0;
  const int32_t generated = counted ? edit.generated : 0;
  if (edit.bias == 0 && !seen && generated == 0) return 0;
  return mix(mix(mix(uint64_t(edit.token), edit.bias), uint64_t(seen)), uint64_t(generated));
}

inline Drawn HashModel::answer(uint64_t seen, const Output& output, int32_t vocab) {
  Drawn drawn;
  seen = mix(seen, uint64_t(output.position));
  if (seen % 701 == 0) return drawn;  // no finite logit
  for (int32_t i = 0; i < output.top; ++i) {
    drawn.top.push_back({Token(mix(seen, uint64_t(i)) % uint64_t(vocab)), -float(i)});
  }
  if (output.target >= 0) {
    drawn.token = output.target;
  } else {
    uint64_t hash = mix(seen, hash_of(output.sampling));
    std::vector<bool> forbidden(size_t(vocab), false);
    uint64_t effects = 0;  // a sum: the order of edits means nothing
    for (const LogitEdit& edit : output.edits) {
      effects += effect(output.sampling, edit);
      forbidden.at(size_t(edit.token)) = std::isinf(edit.bias);
    }
    hash = mix(hash, effects);
    int32_t tried = 0;
    auto token = Token(hash % uint64_t(vocab));
    while (tried++ < vocab && forbidden[size_t(token)]) token = (token + 1) % vocab;
    if (tried > vocab) return drawn;
    drawn.token = token;
  }
  drawn.logprob = -float(mix(seen, uint64_t(drawn.token)) % 1000) / 100;
  return drawn;
}

// Counted anew for each draw, as the request's definition reads.
inline std::vector<LogitEdit> HashModel::edits_of(const Request& request,
                                                  std::span<const Token> tokens, int32_t vocab) {
  std::vector<LogitEdit> edits;
  for (Token token = 0; token < vocab; ++token) edits.push_back({.token = token});
  for (size_t i = 0; i < tokens.size(); ++i) {
    LogitEdit& edit = edits[size_t(tokens[i])];
    edit.seen = true;
    if (i >= request.prompt.size()) ++edit.generated;
  }
  for (const auto& [token, bias] : request.logit_bias) edits[size_t(token)].bias = bias;
  if (tokens.size() - request.prompt.size() < size_t(request.min_tokens)) {
    for (const Token token : request.stop) edits[size_t(token)].bias = -INFINITY;
  }
  return edits;
}

inline HashModel::Answer HashModel::alone(const Request& request, const Limits& limits) {
  Answer answer;
  std::vector<Token> tokens = request.prompt;
  uint64_t state = 0;
  for (size_t length = 1; length <= tokens.size(); ++length) {
    state = mix(state, uint64_t(tokens[length - 1]));
    const bool in_prompt = length < request.prompt.size();
    if (in_prompt && !request.prompt_logprobs) continue;

    uint64_t seen = state;
    for (size_t i = 0; limits.pages > 0 && i < length; ++i) {
      seen = mix(seen, cell_of(tokens[i], int32_t(i)));
    }
    Output output{.position = int32_t(length), .top = request.top_logprobs};
    if (in_prompt) {
      output.target = tokens[length];
    } else {
      output.sampling = request.sampling;
      output.edits = edits_of(request, tokens, limits.vocab);
    }
    const Drawn drawn = HashModel::answer(seen, output, limits.vocab);
    if (drawn.token < 0) {
      answer.finish = Finish::Error;
      return answer;
    }
    if (in_prompt) {
      answer.prompt.push_back({int32_t(length), drawn.logprob, drawn.top});
      continue;
    }
    answer.tokens.push_back(drawn);
    tokens.push_back(drawn.token);
    for (const Token stop : request.stop) {
      if (drawn.token == stop) answer.finish = Finish::Stop;
    }
    if (answer.finish == Finish::Stop) return answer;
    if (answer.tokens.size() == size_t(request.new_tokens)) return answer;
  }
  WEIR_UNREACHABLE("each pass over a whole sequence returns or makes it longer");
}

}  // namespace weir
