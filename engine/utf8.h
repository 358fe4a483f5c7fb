#pragma once
#include <cstddef>
#include <string_view>

namespace weir {

// What stands at the beginning of some bytes.
struct Utf8Step {
  enum class Kind {
    Character,   // one whole character
    Invalid,     // a maximal subpart: what one U+FFFD replaces
    Unfinished,  // all bytes there are, and more may make a character of them
  };
  Kind kind = Kind::Invalid;
  size_t bytes = 0;
};

// `bytes` is not empty.
Utf8Step next_utf8(std::string_view bytes);

}  // namespace weir
