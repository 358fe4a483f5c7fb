#include "clients/utf8.h"

#include <cstdint>

namespace weir {

namespace {

// Length of the character that begins at text[0]; 0 when it is not one (Unicode, table 3-7).
size_t character_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0; };
  const auto in = [](uint8_t value, uint8_t low, uint8_t high) {
    return low <= value && value <= high;
  };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (in(lead, 0xc2, 0xdf)) return in(byte(1), 0x80, 0xbf) ? 2 : 0;
  if (in(lead, 0xe0, 0xef)) {
    const uint8_t low = lead == 0xe0 ? 0xa0 : 0x80;   // overlong below
    const uint8_t high = lead == 0xed ? 0x9f : 0xbf;  // surrogates above
    return in(byte(1), low, high) && in(byte(2), 0x80, 0xbf) ? 3 : 0;
  }
  if (!in(lead, 0xf0, 0xf4)) return 0;
  const uint8_t low = lead == 0xf0 ? 0x90 : 0x80;   // overlong below
  const uint8_t high = lead == 0xf4 ? 0x8f : 0xbf;  // beyond U+10FFFF above
  return in(byte(1), low, high) && in(byte(2), 0x80, 0xbf) && in(byte(3), 0x80, 0xbf) ? 4 : 0;
}

}  // namespace

size_t valid_utf8_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const size_t length = character_length(text.substr(at));
    if (length == 0) break;
    at += length;
  }
  return at;
}

}  // namespace weir
