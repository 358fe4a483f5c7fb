#include "engine/sentencepiece/model_check.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <unordered_set>
#include <vector>

namespace weir::sentencepiece_plugin {
namespace {

constexpr const char* kDamaged = "the file is truncated, or no sentencepiece model";

// One field of a protobuf message: a number, or the bytes of a length-delimited or fixed field.
struct Field {
  uint32_t number = 0;
  uint64_t value = 0;
  std::string_view bytes;
};

// Reads a protobuf message field by field. Groups, which the format has long given up, are damage.
class Message {
 public:
  explicit Message(std::string_view bytes) : rest_(bytes) {}

  // False at the end, and where the message is damaged.
  bool next(Field* field) {
    if (rest_.empty() || damaged_) return false;
    const uint64_t tag = varint();
    *field = {.number = uint32_t(tag >> 3)};
    switch (tag & 7) {
      case 0: field->value = varint(); break;
      case 1: field->bytes = take(8); break;
      case 2: field->bytes = take(varint()); break;
      case 5: field->bytes = take(4); break;
      default: damaged_ = true;
    }
    return !damaged_;
  }
  bool damaged() const { return damaged_; }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (size_t i = 0; i < 10 && i < rest_.size(); ++i) {
      value |= uint64_t(uint8_t(rest_[i]) & 0x7F) << (7 * i);
      if (uint8_t(rest_[i]) < 0x80) {
        rest_.remove_prefix(i + 1);
        return value;
      }
    }
    damaged_ = true;
    return 0;
  }

  std::string_view take(uint64_t size) {
    damaged_ = damaged_ || size > rest_.size();
    if (damaged_) return {};
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  std::string_view rest_;
  bool damaged_ = false;
};

// A unit of a Darts-clone double array.
struct Unit {
  uint32_t bits = 0;
  uint32_t label() const { return bits & ((1u << 31) | 0xFF); }
  uint32_t offset() const { return (bits >> 10) << ((bits & (1u << 9)) >> 6); }
  bool has_leaf() const { return (bits >> 8) & 1; }
  uint32_t value() const { return bits & ((1u << 31) - 1); }
};

// A text walks this trie from unit to unit, and a match is a position in the replacement texts
// behind it. sentencepiece follows both unchecked: so every step that some text can take is taken.
std::string charsmap_flaw(std::string_view charsmap) {
  if (charsmap.empty()) return "";
  uint32_t trie_bytes = 0;
  if (charsmap.size() <= sizeof(trie_bytes)) return "normalizer_spec: precompiled_charsmap is cut";
  std::memcpy(&trie_bytes, charsmap.data(), sizeof(trie_bytes));
  charsmap.remove_prefix(sizeof(trie_bytes));
  if (trie_bytes > charsmap.size() || trie_bytes < sizeof(Unit)) {
    return "normalizer_spec: precompiled_charsmap is cut: a trie of " + std::to_string(trie_bytes) +
           " bytes in " + std::to_string(charsmap.size());
  }
  std::vector<Unit> units(trie_bytes / sizeof(Unit));
  std::memcpy(units.data(), charsmap.data(), units.size() * sizeof(Unit));
  const size_t replacement_bytes = charsmap.size() - trie_bytes;

  std::vector<bool> seen(units.size());
  std::vector<uint32_t> bases = {units[0].offset()};
  while (!bases.empty()) {
    const uint32_t base = bases.back();
    bases.pop_back();
    if ((base | 0xFF) >= units.size()) {
      return "normalizer_spec: precompiled_charsmap points outside its trie";
    }
    if (seen[base]) continue;
    seen[base] = true;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const Unit unit = units[base ^ byte];
      if (unit.label() != byte) continue;
      const uint32_t next = base ^ byte ^ unit.offset();
      bases.push_back(next);
      if (unit.has_leaf() && next < units.size() && units[next].value() > replacement_bytes) {
        return "normalizer_spec: precompiled_charsmap points outside its replacement texts";
      }
    }
  }
  return "";
}

std::optional<std::string_view> charsmap_of(std::string_view normalizer) {
  Message message(normalizer);
  std::string_view charsmap;
  for (Field field; message.next(&field);) {
    if (field.number == 2) charsmap = field.bytes;
  }
  if (message.damaged()) return std::nullopt;
  return charsmap;
}

bool is_one_character(std::string_view text) {
  size_t characters = 0;
  for (const char c : text) characters += (uint8_t(c) & 0xC0) != 0x80;
  return characters <= 1;
}

// The pieces, collected while the file is read.
class Pieces {
 public:
  std::string add(std::string_view bytes) {
    std::string_view text;
    uint64_t type = kNormal;
    float score = 0;
    Message message(bytes);
    for (Field field; message.next(&field);) {
      if (field.number == 1) text = field.bytes;
      if (field.number == 2 && field.bytes.size() == sizeof(score)) {
        std::memcpy(&score, field.bytes.data(), sizeof(score));
      }
      if (field.number == 3) type = field.value;
    }
    if (message.damaged()) return kDamaged;
    const std::string name = "piece " + std::to_string(count_++) + " '" + std::string(text) + "'";
    if (text.find('\0') != text.npos) return name + " contains a zero byte";
    if (std::isnan(score)) return name + " has a score that is no number";

    const bool found_in_text = type == kNormal || type == kUserDefined || type == kUnused;
    (found_in_text ? in_text_ : reserved_).insert(text);
    // Encoding would meet this character in a text, and take it for the control piece.
    if (!found_in_text && is_one_character(text)) {
      return name + " is reserved (type " + std::to_string(type) + ") but one character long";
    }
    return "";
  }

  std::string flaw() const {
    for (const std::string_view text : reserved_) {
      if (in_text_.count(text) != 0) return "piece '" + std::string(text) + "' is there twice";
    }
    return count_ == 0 ? kDamaged : "";
  }

 private:
  static constexpr uint64_t kNormal = 1, kUserDefined = 4, kUnused = 5;
  std::unordered_set<std::string_view> in_text_, reserved_;
  int64_t count_ = 0;
};

}  // namespace

std::string model_flaw(std::string_view bytes) {
  Pieces pieces;
  Message message(bytes);
  for (Field field; message.next(&field);) {
    std::string flaw;
    if (field.number == 1) flaw = pieces.add(field.bytes);
    if (field.number == 3 || field.number == 5) {
      const std::optional<std::string_view> charsmap = charsmap_of(field.bytes);
      if (!charsmap) {
        flaw = kDamaged;
      } else if (field.number == 3) {
        flaw = charsmap_flaw(*charsmap);
      } else if (!charsmap->empty()) {
        // It rewrites whole texts: what a token adds would depend on those around it.
        flaw = "denormalizer_spec: precompiled_charsmap is not supported";
      }
    }
    if (!flaw.empty()) return flaw;
  }
  return message.damaged() ? kDamaged : pieces.flaw();
}

}  // namespace weir::sentencepiece_plugin
