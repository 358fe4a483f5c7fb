#pragma once
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "weir/v1/generation.pb.h"

namespace weir {

struct FixedLength {
  int64_t tokens = 0;
};
struct UniformLength {
  int64_t low = 0, high = 0;  // both included
};
struct LogNormalLength {
  double median = 0, sigma = 0;
};
using LengthDistribution = std::variant<FixedLength, UniformLength, LogNormalLength>;

// "64", "fixed:64", "uniform:16:256" or "lognormal:64:0.8"; nothing when it is none of these.
std::optional<LengthDistribution> parse_length(const std::string& text);

// The longest length that may be drawn; of a log-normal one, which has no longest, one in 10^9 is
// longer (six sigma).
int64_t longest_length(const LengthDistribution& distribution);

// A length of at least 1 and at most `limit` tokens.
int64_t draw_length(const LengthDistribution& distribution, int64_t limit, std::mt19937_64& random);

// A long text cut at token borders, from which prompts of a wanted number of tokens are taken.
class PromptText {
 public:
  PromptText(std::string text, const v1::TokenizeResponse& tokens);

  size_t tokens() const { return begin_.size(); }
  // About `length` tokens from the `first`-th on; goes round at the end.
  std::string cut(size_t first, int64_t length) const;

 private:
  std::string text_;
  std::vector<size_t> begin_, end_;  // bytes of each token, moved to whole characters
};

// Words in random order, the same for the same seed.
std::string random_words(uint64_t seed, int count);

// Makes the i-th request of a run. The i-th is the same however the earlier ones went.
class LoadPlan {
 public:
  struct Options {
    LengthDistribution prompt_tokens = FixedLength{64}, answer_tokens = FixedLength{64};
    int64_t prompt_limit = 0, answer_limit = 0;
    int32_t vocab = 0;
    uint64_t seed = 0;
    bool ignore_eos = true;
    uint32_t stream_chunk_tokens = 1;
    std::optional<float> temperature;
  };
  // Without a text, prompts are random token ids.
  LoadPlan(Options options, std::optional<PromptText> text);

  v1::GenerateRequest request(uint64_t index) const;

 private:
  Options options_;
  std::optional<PromptText> text_;
};

}  // namespace weir
