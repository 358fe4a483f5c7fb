#include "engine/utf8.h"

#include <cstdint>

#include "kernels/check.h"

namespace weir {
namespace {

// A character's length by its first byte, and what its second byte may be: that range alone keeps
// out overlong forms, surrogates and everything above U+10FFFF. Length 0: no character begins so.
struct Lead {
  size_t length = 0;
  uint8_t second_min = 0x80, second_max = 0xBF;
};

Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {.length = 1};
  if (byte < 0xC2) return {.length = 0};
  if (byte < 0xE0) return {.length = 2};
  if (byte == 0xE0) return {.length = 3, .second_min = 0xA0};
  if (byte == 0xED) return {.length = 3, .second_max = 0x9F};
  if (byte < 0xF0) return {.length = 3};
  if (byte == 0xF0) return {.length = 4, .second_min = 0x90};
  if (byte < 0xF4) return {.length = 4};
  if (byte == 0xF4) return {.length = 4, .second_max = 0x8F};
  return {.length = 0};
}

}  // namespace

Utf8Step next_utf8(std::string_view bytes) {
  WEIR_CHECK(!bytes.empty());
  const Lead lead = lead_of(uint8_t(bytes[0]));
  if (lead.length == 0) return {.kind = Utf8Step::Kind::Invalid, .bytes = 1};
  for (size_t i = 1; i < lead.length; ++i) {
    if (i == bytes.size()) return {.kind = Utf8Step::Kind::Unfinished, .bytes = i};
    const uint8_t byte = uint8_t(bytes[i]);
    const uint8_t low = i == 1 ? lead.second_min : 0x80;
    const uint8_t high = i == 1 ? lead.second_max : 0xBF;
    if (byte < low || byte > high) return {.kind = Utf8Step::Kind::Invalid, .bytes = i};
  }
  return {.kind = Utf8Step::Kind::Character, .bytes = lead.length};
}

}  // namespace weir
