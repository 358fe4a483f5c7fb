#include "clients/load_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <utility>

namespace weir {

namespace {

constexpr int32_t kFirstOrdinaryToken = 3;  // by custom 0, 1, 2 are unknown, begin and end

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

std::optional<double> parse_number(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ':') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

}  // namespace

std::optional<LengthDistribution> parse_length(const std::string& text) {
  std::vector<std::string> parts = split(text);
  if (parts.size() == 1) parts.insert(parts.begin(), "fixed");
  std::vector<double> numbers;
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::optional<double> number = parse_number(parts[i]);
    if (!number || *number < 0 || *number > 1e9) return std::nullopt;
    numbers.push_back(*number);
  }
  const auto whole = [&](size_t i) { return static_cast<int64_t>(numbers[i]); };
  if (parts[0] == "fixed" && numbers.size() == 1 && whole(0) >= 1) return FixedLength{whole(0)};
  if (numbers.size() != 2) return std::nullopt;
  if (parts[0] == "uniform" && whole(0) >= 1 && whole(0) <= whole(1)) {
    return UniformLength{.low = whole(0), .high = whole(1)};
  }
  if (parts[0] == "lognormal" && numbers[0] >= 1) {
    return LogNormalLength{.median = numbers[0], .sigma = numbers[1]};
  }
  return std::nullopt;
}

int64_t longest_length(const LengthDistribution& distribution) {
  if (const auto* fixed = std::get_if<FixedLength>(&distribution)) return fixed->tokens;
  if (const auto* uniform = std::get_if<UniformLength>(&distribution)) return uniform->high;
  const auto& log_normal = std::get<LogNormalLength>(distribution);
  return static_cast<int64_t>(std::min(1e12, log_normal.median * std::exp(6 * log_normal.sigma)));
}

int64_t draw_length(const LengthDistribution& distribution, int64_t limit,
                    std::mt19937_64& random) {
  double length = 0;
  if (const auto* fixed = std::get_if<FixedLength>(&distribution)) {
    length = static_cast<double>(fixed->tokens);
  } else if (const auto* uniform = std::get_if<UniformLength>(&distribution)) {
    std::uniform_int_distribution<int64_t> draw(uniform->low, uniform->high);
    length = static_cast<double>(draw(random));
  } else if (const auto* log_normal = std::get_if<LogNormalLength>(&distribution)) {
    std::lognormal_distribution<double> draw(std::log(log_normal->median), log_normal->sigma);
    length = std::round(draw(random));
  }
  return static_cast<int64_t>(std::clamp(length, 1.0, static_cast<double>(limit)));
}

PromptText::PromptText(std::string text, const v1::TokenizeResponse& tokens)
    : text_(std::move(text)) {
  for (const v1::TokenPiece& token : tokens.tokens()) {
    size_t begin = std::min<size_t>(token.begin(), text_.size());
    size_t end = std::min<size_t>(token.end(), text_.size());
    while (begin > 0 && begin < text_.size() && is_continuation(text_[begin])) --begin;
    while (end < text_.size() && is_continuation(text_[end])) ++end;
    begin_.push_back(begin);
    end_.push_back(std::max(begin, end));
  }
}

std::string PromptText::cut(size_t first, int64_t length) const {
  std::string out;
  size_t at = first % tokens();
  while (length > 0) {
    const size_t count = std::min<size_t>(tokens() - at, static_cast<size_t>(length));
    out += text_.substr(begin_[at], end_[at + count - 1] - begin_[at]);
    length -= static_cast<int64_t>(count);
    at = 0;
  }
  return out;
}

std::string random_words(uint64_t seed, int count) {
  static constexpr std::array<const char*, 64> kWords = {
      "the",    "and",   "of",    "to",    "in",     "that",  "he",     "was",
      "it",     "his",   "is",    "with",  "as",     "for",   "they",   "be",
      "at",     "on",    "have",  "not",   "from",   "this",  "but",    "all",
      "sea",    "ship",  "whale", "man",   "day",    "water", "land",   "king",
      "people", "house", "great", "old",   "white",  "long",  "little", "deep",
      "said",   "came",  "went",  "made",  "saw",    "gave",  "took",   "stood",
      "heaven", "earth", "night", "light", "state",  "law",   "work",   "year",
      "world",  "hand",  "eye",   "heart", "nation", "peace", "river",  "stone"};
  std::mt19937_64 random(seed);
  std::string out;
  for (int i = 0; i < count; ++i) {
    out += kWords[random() % kWords.size()];
    out += i % 12 == 11 ? ". " : " ";
  }
  return out;
}

LoadPlan::LoadPlan(Options options, std::optional<PromptText> text)
    : options_(std::move(options)), text_(std::move(text)) {}

v1::GenerateRequest LoadPlan::request(uint64_t index) const {
  std::seed_seq seeds = {options_.seed, options_.seed >> 32, index, index >> 32};
  std::mt19937_64 random(seeds);
  const int64_t prompt = draw_length(options_.prompt_tokens, options_.prompt_limit, random);
  const int64_t answer = draw_length(options_.answer_tokens, options_.answer_limit, random);

  v1::GenerateRequest request;
  if (text_) {
    request.set_prompt(text_->cut(random() % text_->tokens(), prompt));
  } else {
    v1::TokenIds* ids = request.mutable_token_ids();
    const int32_t first = options_.vocab > kFirstOrdinaryToken ? kFirstOrdinaryToken : 0;
    for (int64_t i = 0; i < prompt; ++i) {
      ids->add_ids(first + static_cast<int32_t>(random() % (options_.vocab - first)));
    }
  }
  request.mutable_sampling()->set_seed(random());
  if (options_.temperature) request.mutable_sampling()->set_temperature(*options_.temperature);
  request.mutable_stop()->set_max_tokens(static_cast<uint32_t>(answer));
  request.mutable_stop()->set_ignore_eos(options_.ignore_eos);
  request.mutable_output()->set_return_token_ids(true);  // the client counts by them
  request.mutable_output()->set_stream_chunk_tokens(options_.stream_chunk_tokens);
  return request;
}

}  // namespace weir
