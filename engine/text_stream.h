#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/types.h"

namespace weir {

// Joins the bytes of tokens into text that may be sent: whole UTF-8 only, and nothing that may
// still turn out to be part of a stop string.
//
// The texts returned, end to end, are the bytes pushed, up to the first stop string (with or
// without it, as asked). Bytes that can never become valid UTF-8 are replaced one maximal subpart
// at a time by U+FFFD, exactly as a one-shot decoding of the whole would. Of several stop strings
// the one that is complete first wins; of those complete at the same byte, the one that begins
// first.
class TextStream {
 public:
  // Stop strings are not empty and are valid UTF-8.
  explicit TextStream(std::vector<std::string> stop_strings = {}, bool include_stop = false);

  // What may be sent now. Nothing more comes once stopped() is set.
  std::string push(std::string_view bytes);
  // The end of generation: everything held back. An unfinished character at the end is left out
  // of the text and counted in unfinished_bytes().
  std::string finish();

  // The stop string that matched.
  const std::optional<std::string>& stopped() const { return stopped_; }
  size_t unfinished_bytes() const { return unfinished_bytes_; }

 private:
  // A stop string, and how much of it the text read so far ends with.
  struct Stop {
    std::string text;
    std::vector<uint32_t> shorter;  // [i]: how much of it its own first i + 1 bytes end with
    size_t matched = 0;
  };

  // Reads one whole character; true when it completes a stop string.
  bool read(std::string_view character);

  std::vector<Stop> stops_;
  bool include_stop_ = false;
  std::string held_;      // valid text that may begin a stop string
  std::string partial_;   // up to 3 bytes of an unfinished character
  std::optional<std::string> stopped_;
  size_t unfinished_bytes_ = 0;
};

// Whether all of `text` is UTF-8 (no surrogates, no overlong forms, at most U+10FFFF).
bool is_utf8(std::string_view text);

}  // namespace weir
