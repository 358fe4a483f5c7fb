// The vocabulary files of RWKV's "world" models: one token a line,
//   ID LITERAL BYTES
// where LITERAL is Python's way of writing the token, 'the' or b'\xe4\xb8', and BYTES its length.
// Id 0 is in no file: it ends a text. A text becomes, from its beginning on, the longest token that
// it goes on with, again and again. The literals are read here as data; nothing evaluates them.
#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer_impl.h"
#include "engine/utf8.h"

namespace weir {
namespace {

constexpr int32_t kIdMax = (1 << 20) - 1;
constexpr size_t kTokenBytesMax = 1024;  // the longest known is 128
constexpr size_t kQuotedMax = 80;        // of a line in a message
constexpr const char* kEndOfText = "<|endoftext|>";

bool is_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const Utf8Step step = next_utf8(bytes);
    if (step.kind != Utf8Step::Kind::Character) return false;
    bytes.remove_prefix(step.bytes);
  }
  return true;
}

void append_utf8(std::string& text, uint32_t code) {
  const auto last = [&](uint32_t bits) { text += char(0x80 | (bits & 0x3F)); };
  if (code < 0x80) {
    text += char(code);
  } else if (code < 0x800) {
    text += char(0xC0 | code >> 6), last(code);
  } else if (code < 0x10000) {
    text += char(0xE0 | code >> 12), last(code >> 6), last(code);
  } else {
    text += char(0xF0 | code >> 18), last(code >> 12), last(code >> 6), last(code);
  }
}

// A whole number, written in no other way than with digits of this base.
std::optional<uint32_t> number(std::string_view digits, int base = 10) {
  uint32_t value = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size()) return {};
  return value;
}

// Python's string or bytes literal, to the bytes it stands for.
class Literal {
 public:
  explicit Literal(std::string_view text) : rest_(text) {}

  // Nothing when it is none; problem() then says why.
  std::optional<std::string> read() {
    bytes_ = take("b");
    const char quote = rest_.empty() ? '\0' : rest_[0];
    if (quote != '\'' && quote != '"') return fail("expected a quote before the token");
    rest_.remove_prefix(1);
    while (!rest_.empty() && rest_[0] != quote) {
      if (!(rest_[0] == '\\' ? escape() : plain())) return {};
    }
    if (rest_.empty()) return fail("expected a quote after the token");
    if (rest_.size() > 1) return fail("expected nothing between the token's end and its length");
    return std::move(out_);
  }
  const std::string& problem() const { return problem_; }

 private:
  std::nullopt_t fail(const std::string& problem) {
    problem_ = problem;
    return std::nullopt;
  }
  bool take(std::string_view start) {
    if (!rest_.starts_with(start)) return false;
    rest_.remove_prefix(start.size());
    return true;
  }
  bool plain() {
    const Utf8Step step = next_utf8(rest_);
    if (step.kind != Utf8Step::Kind::Character || (bytes_ && step.bytes > 1)) {
      fail(bytes_ ? "expected ASCII in a bytes literal" : "expected UTF-8");
      return false;
    }
    out_ += rest_.substr(0, step.bytes);
    rest_.remove_prefix(step.bytes);
    return true;
  }
  // A byte, or in a string the character of this number.
  bool append(std::optional<uint32_t> code, std::string_view escape) {
    const bool surrogate = code && *code >= 0xD800 && *code < 0xE000;
    if (!code || *code > (bytes_ ? 0xFFu : 0x10FFFFu) || (surrogate && !bytes_)) {
      fail("expected an escape of Python's, found " + std::string(escape));
      return false;
    }
    if (bytes_) {
      out_ += char(*code);
    } else {
      append_utf8(out_, *code);
    }
    rest_.remove_prefix(escape.size());
    return true;
  }
  bool escape() {
    static constexpr std::string_view kNames = "\\'\"abfnrtv", kMeaning = "\\'\"\a\b\f\n\r\t\v";
    const char name = rest_.size() > 1 ? rest_[1] : '\0';
    const size_t simple = kNames.find(name);
    if (name != '\0' && simple != std::string_view::npos) {
      return append(uint8_t(kMeaning[simple]), rest_.substr(0, 2));
    }
    if (name >= '0' && name <= '7') {
      size_t size = 2;
      while (size < 4 && size < rest_.size() && rest_[size] >= '0' && rest_[size] <= '7') ++size;
      return append(number(rest_.substr(1, size - 1), 8), rest_.substr(0, size));
    }
    size_t digits = 0;
    if (name == 'x') digits = 2;
    if (name == 'u' && !bytes_) digits = 4;
    if (name == 'U' && !bytes_) digits = 8;
    const std::string_view whole = rest_.substr(0, 2 + digits);
    if (digits == 0 || whole.size() < 2 + digits) return append({}, whole);
    return append(number(whole.substr(2), 16), whole);
  }

  std::string_view rest_;
  bool bytes_ = false;
  std::string out_, problem_;
};

class RwkvVocabulary final : public Tokenizer::Impl {
 public:
  absl::Status open(const std::string& path, std::string_view file);
  std::vector<Span> encode(std::string_view text) const override;

 private:
  // Nothing, or what is wrong with the line.
  std::optional<std::string> read_line(std::string_view line);
  std::optional<std::string> add(uint32_t id, std::string bytes, std::string_view literal);
  absl::Status sort(const std::string& path);
  Token longest(std::string_view text) const;

  std::vector<Token> sorted_;                // by bytes: tokens that begin alike stand together
  std::array<uint32_t, 257> begins_with_{};  // where in it those with each first byte begin
};

std::optional<std::string> RwkvVocabulary::add(uint32_t id, std::string bytes,
                                               std::string_view literal) {
  if (id < 1 || id > uint32_t(kIdMax)) {
    return absl::StrCat("expected an id from 1 to ", kIdMax, ", found ", id);
  }
  if (bytes.empty() || bytes.size() > kTokenBytesMax) {
    return absl::StrCat("expected a token of 1 to ", kTokenBytesMax, " bytes, found ",
                        bytes.size());
  }
  if (entries.size() <= id) entries.resize(size_t(id) + 1);
  Entry& entry = entries[id];
  if (!entry.bytes.empty()) return absl::StrCat("expected a new id, found ", id, " again");
  entry.piece = is_utf8(bytes) ? bytes : std::string(literal);
  entry.bytes = entry.bytes_first = std::move(bytes);
  return std::nullopt;
}

std::optional<std::string> RwkvVocabulary::read_line(std::string_view line) {
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) return "expected ID LITERAL BYTES";
  const std::string_view text = line.substr(first + 1, last - first - 1);
  const std::optional<uint32_t> id = number(line.substr(0, first));
  const std::optional<uint32_t> size = number(line.substr(last + 1));
  if (!id) return "expected a whole number before the first space";
  if (!size) return "expected a whole number after the last space";
  Literal literal(text);
  std::optional<std::string> bytes = literal.read();
  if (!bytes) return literal.problem();
  if (bytes->size() != *size) {
    return absl::StrCat("expected a token of ", *size, " bytes, as the line says, found ",
                        bytes->size());
  }
  return add(*id, *std::move(bytes), text);
}

absl::Status RwkvVocabulary::open(const std::string& path, std::string_view file) {
  entries.push_back({.piece = kEndOfText, .bytes = "", .bytes_first = ""});
  eos = 0;
  for (int64_t line_number = 1; !file.empty(); ++line_number) {
    const size_t size = std::min(file.find('\n'), file.size());
    std::string_view line = file.substr(0, size);
    file.remove_prefix(std::min(size + 1, file.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    const std::optional<std::string> problem = read_line(line);
    if (!problem) continue;
    std::string quoted(line.substr(0, kQuotedMax));
    std::replace_if(quoted.begin(), quoted.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    return absl::InvalidArgumentError(
        absl::StrCat(path, ":", line_number, ": ", *problem, " in: ", quoted));
  }
  return sort(path);
}

// So that texts can be cut by longest match; every text can when every byte is a token.
absl::Status RwkvVocabulary::sort(const std::string& path) {
  for (size_t id = 1; id < entries.size(); ++id) {
    if (!entries[id].bytes.empty()) sorted_.push_back(Token(id));
  }
  const auto bytes_of = [&](Token id) -> const std::string& { return entries[size_t(id)].bytes; };
  std::sort(sorted_.begin(), sorted_.end(),
            [&](Token a, Token b) { return bytes_of(a) < bytes_of(b); });  // bytes as unsigned
  for (size_t i = 1; i < sorted_.size(); ++i) {
    if (bytes_of(sorted_[i - 1]) != bytes_of(sorted_[i])) continue;
    const auto [less, more] = std::minmax(sorted_[i - 1], sorted_[i]);
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected each token once, found ids ", less, " and ", more,
                     " to be the same bytes"));
  }
  uint32_t at = 0;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    begins_with_[byte] = at;
    const std::string one(1, char(byte));
    if (at == sorted_.size() || bytes_of(sorted_[at]) != one) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": expected each of the 256 bytes to be a token, found none for 0x",
          absl::Hex(byte, absl::kZeroPad2)));
    }
    while (at < sorted_.size() && bytes_of(sorted_[at])[0] == one[0]) ++at;
  }
  begins_with_[256] = at;
  return absl::OkStatus();
}

// The longest token that the text begins with. A walk down a trie whose nodes are ranges of the
// sorted tokens: those that begin with the text's first `depth` bytes. The token that is just
// these bytes, where there is one, comes first.
Token RwkvVocabulary::longest(std::string_view text) const {
  const auto byte = uint8_t(text[0]);
  auto begin = sorted_.begin() + begins_with_[byte];
  auto end = sorted_.begin() + begins_with_[byte + 1u];
  Token best = *begin++;
  for (size_t depth = 1; depth < text.size() && begin != end; ++depth) {
    const auto next = uint8_t(text[depth]);
    const auto at_depth = [&](Token id) { return uint8_t(entries[size_t(id)].bytes[depth]); };
    begin = std::partition_point(begin, end, [&](Token id) { return at_depth(id) < next; });
    end = std::partition_point(begin, end, [&](Token id) { return at_depth(id) == next; });
    if (begin != end && entries[size_t(*begin)].bytes.size() == depth + 1) best = *begin++;
  }
  return best;
}

std::vector<Tokenizer::Impl::Span> RwkvVocabulary::encode(std::string_view text) const {
  std::vector<Span> spans;
  int64_t at = 0;
  while (!text.empty()) {
    const Token id = longest(text);
    const size_t size = entries[size_t(id)].bytes.size();
    spans.push_back({.id = id, .begin = at, .end = at + int64_t(size)});
    text.remove_prefix(size);
    at += int64_t(size);
  }
  return spans;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer::Impl>> open_rwkv_vocabulary(const std::string& path,
                                                                      const std::string& file) {
  auto impl = std::make_unique<RwkvVocabulary>();
  const absl::Status status = impl->open(path, file);
  if (!status.ok()) return status;
  return impl;
}

}  // namespace weir
