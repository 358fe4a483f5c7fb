#include "engine/text_stream.h"

#include <algorithm>
#include <utility>

#include "engine/utf8.h"
#include "kernels/check.h"

namespace weir {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Knuth, Morris and Pratt's table: every byte of a text is then looked at once for each stop
// string, however often the text almost matches.
std::vector<uint32_t> shorter_matches(std::string_view text) {
  std::vector<uint32_t> shorter(text.size(), 0);
  for (size_t i = 1; i < text.size(); ++i) {
    uint32_t length = shorter[i - 1];
    while (length > 0 && text[i] != text[length]) length = shorter[length - 1];
    shorter[i] = length + (text[i] == text[length] ? 1 : 0);
  }
  return shorter;
}

}  // namespace

TextStream::TextStream(std::vector<std::string> stop_strings, bool include_stop)
    : include_stop_(include_stop) {
  stops_.reserve(stop_strings.size());
  for (std::string& text : stop_strings) {
    WEIR_CHECK(!text.empty() && is_utf8(text));
    std::vector<uint32_t> shorter = shorter_matches(text);
    stops_.push_back({.text = std::move(text), .shorter = std::move(shorter)});
  }
}

std::string TextStream::push(std::string_view bytes) {
  if (stopped_) return "";
  partial_ += bytes;
  std::string_view rest = partial_;
  bool complete = false;
  while (!rest.empty() && !complete) {
    const Utf8Step step = next_utf8(rest);
    if (step.kind == Utf8Step::Kind::Unfinished) break;
    complete = read(step.kind == Utf8Step::Kind::Character ? rest.substr(0, step.bytes)
                                                           : kReplacement);
    rest.remove_prefix(step.bytes);
  }
  if (complete) {
    partial_.clear();
    return std::exchange(held_, {});
  }
  partial_.erase(0, partial_.size() - rest.size());

  size_t kept = 0;
  for (const Stop& stop : stops_) kept = std::max(kept, stop.matched);
  std::string text = held_.substr(0, held_.size() - kept);
  held_.erase(0, text.size());
  return text;
}

bool TextStream::read(std::string_view character) {
  held_ += character;
  const Stop* longest = nullptr;
  for (Stop& stop : stops_) {
    for (const char byte : character) {
      while (stop.matched > 0 && stop.text[stop.matched] != byte) {
        stop.matched = stop.shorter[stop.matched - 1];
      }
      if (stop.text[stop.matched] == byte) ++stop.matched;
    }
    // Stop strings are whole characters, so one cannot end before this character does.
    if (stop.matched < stop.text.size()) continue;
    if (longest == nullptr || stop.text.size() > longest->text.size()) longest = &stop;
  }
  if (longest == nullptr) return false;
  stopped_ = longest->text;
  if (!include_stop_) held_.resize(held_.size() - longest->text.size());
  return true;
}

std::string TextStream::finish() {
  unfinished_bytes_ = partial_.size();
  partial_.clear();
  return std::exchange(held_, {});
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8Step step = next_utf8(text);
    if (step.kind != Utf8Step::Kind::Character) return false;
    text.remove_prefix(step.bytes);
  }
  return true;
}

}  // namespace weir
