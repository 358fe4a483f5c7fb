#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text_stream.h"

// TextStream against an obvious model: decode the whole, then search it.
namespace weir::text_stream_model {

struct Outcome {
  std::string text;
  std::optional<std::string> stopped;
  size_t unfinished_bytes = 0;
  bool operator==(const Outcome&) const = default;
};

// The text that lossy decoding of all bytes at once gives, and how many bytes at the end are the
// beginning of a character. Written from the table of well-formed byte sequences, character class
// by character class, unlike the product's.
inline std::string decode_whole(std::string_view bytes, size_t* unfinished) {
  struct Form {
    uint8_t first_min, first_max, second_min, second_max;
    size_t length;
  };
  static constexpr Form kForms[] = {
      {0x00, 0x7F, 0, 0, 1},       {0xC2, 0xDF, 0x80, 0xBF, 2}, {0xE0, 0xE0, 0xA0, 0xBF, 3},
      {0xE1, 0xEC, 0x80, 0xBF, 3}, {0xED, 0xED, 0x80, 0x9F, 3}, {0xEE, 0xEF, 0x80, 0xBF, 3},
      {0xF0, 0xF0, 0x90, 0xBF, 4}, {0xF1, 0xF3, 0x80, 0xBF, 4}, {0xF4, 0xF4, 0x80, 0x8F, 4}};
  std::string text;
  *unfinished = 0;
  for (size_t i = 0; i < bytes.size();) {
    size_t good = 0, length = 0;
    for (const Form& form : kForms) {
      const uint8_t first = uint8_t(bytes[i]);
      if (first < form.first_min || first > form.first_max) continue;
      length = form.length;
      for (good = 1; good < length && i + good < bytes.size(); ++good) {
        const uint8_t byte = uint8_t(bytes[i + good]);
        if (byte < (good == 1 ? form.second_min : 0x80)) break;
        if (byte > (good == 1 ? form.second_max : 0xBF)) break;
      }
    }
    if (length != 0 && good == length) {
      text += bytes.substr(i, length);
    } else if (length != 0 && i + good == bytes.size()) {
      *unfinished = good;
      return text;
    } else {
      text += "\xEF\xBF\xBD";
    }
    i += good == 0 ? 1 : good;
  }
  return text;
}

inline Outcome whole(std::string_view bytes, const std::vector<std::string>& stops, bool include) {
  Outcome outcome;
  outcome.text = decode_whole(bytes, &outcome.unfinished_bytes);
  for (size_t end = 1; end <= outcome.text.size(); ++end) {
    const std::string_view so_far(outcome.text.data(), end);
    for (const std::string& stop : stops) {
      if (stop.size() > end || so_far.substr(end - stop.size()) != stop) continue;
      if (!outcome.stopped || stop.size() > outcome.stopped->size()) outcome.stopped = stop;
    }
    if (!outcome.stopped) continue;
    outcome.text.resize(end - (include ? 0 : outcome.stopped->size()));
    outcome.unfinished_bytes = 0;
    break;
  }
  return outcome;
}

struct Run {
  Outcome outcome;
  std::string flaw;  // empty: every piece was whole, and nothing was held back for nothing
};

// Pushes `bytes` cut before each of the increasing positions in `cuts`.
inline Run streamed(std::string_view bytes, const std::vector<size_t>& cuts,
                    const std::vector<std::string>& stops, bool include) {
  TextStream stream(stops, include);
  Run run;
  size_t at = 0;
  const auto take = [&](size_t end) {
    const std::string piece = stream.push(bytes.substr(at, end - at));
    if (!is_utf8(piece)) run.flaw = "a piece is not whole UTF-8";
    at = end;
    run.outcome.text += piece;
    if (stream.stopped()) return;
    size_t unfinished = 0;
    const std::string all = decode_whole(bytes.substr(0, end), &unfinished);
    size_t held = 0;  // the longest end of the text that begins a stop string
    for (const std::string& stop : stops) {
      for (size_t length = 1; length < stop.size() && length <= all.size(); ++length) {
        if (all.compare(all.size() - length, length, stop, 0, length) == 0 && length > held) {
          held = length;
        }
      }
    }
    if (run.outcome.text.size() + held != all.size()) run.flaw = "held back too much or too little";
  };
  for (const size_t cut : cuts) take(cut);
  take(bytes.size());
  const std::optional<std::string> stopped = stream.stopped();
  if (stopped && !stream.push("more").empty()) run.flaw = "text after a stop string";
  const std::string last = stream.finish();
  if (!is_utf8(last)) run.flaw = "the last piece is not whole UTF-8";
  if (stopped && !last.empty()) run.flaw = "text at the end, after a stop string";
  run.outcome.text += last;
  run.outcome.stopped = stream.stopped();
  run.outcome.unfinished_bytes = stream.unfinished_bytes();
  return run;
}

// A case as bytes, for the fuzzer and its corpus:
// flags, count of stops (0..3), then for each its length and bytes; count of cuts, each as the
// distance from the one before; the rest is what is pushed.
struct Case {
  bool include = false;
  std::vector<std::string> stops;
  std::vector<size_t> cuts;
  std::string bytes;
};

inline Case read_case(std::string_view data) {
  Case out;
  size_t at = 0;
  const auto byte = [&]() -> size_t { return at < data.size() ? uint8_t(data[at++]) : 0; };
  out.include = byte() & 1;
  for (size_t count = byte() % 4; count > 0; --count) {
    const size_t length = byte() % 16;
    const std::string_view stop = data.substr(at, length);
    at += stop.size();
    if (!stop.empty() && is_utf8(stop)) out.stops.emplace_back(stop);
  }
  std::vector<size_t> steps;
  for (size_t count = byte() % 16; count > 0; --count) steps.push_back(byte());
  out.bytes = data.substr(at);
  size_t cut = 0;
  for (const size_t step : steps) {
    cut += step;
    if (cut > out.bytes.size()) break;
    out.cuts.push_back(cut);
  }
  return out;
}

// What is wrong with TextStream on this case; empty when nothing is.
inline std::string disagreement(const Case& each) {
  const Outcome expected = whole(each.bytes, each.stops, each.include);
  const Run run = streamed(each.bytes, each.cuts, each.stops, each.include);
  if (!run.flaw.empty()) return run.flaw;
  if (run.outcome == expected) return "";
  const auto show = [](const Outcome& outcome) {
    return "'" + outcome.text + "' stopped by '" + outcome.stopped.value_or("(nothing)") +
           "', unfinished " + std::to_string(outcome.unfinished_bytes);
  };
  return "expected " + show(expected) + ", found " + show(run.outcome);
}

}  // namespace weir::text_stream_model
