// Sentencepiece models, read by sentencepiece itself in a library of its own.
#include <dlfcn.h>

#include <cstdio>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "engine/sentencepiece/plugin.h"
#include "engine/tokenizer_impl.h"
#include "kernels/check.h"

namespace weir {
namespace {

namespace plugin = sentencepiece_plugin;

constexpr const char* kSpace = "\u2581";  // how a piece writes a space
constexpr size_t kSpaceBytes = 3;

absl::Status invalid(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(path + ": " + what);
}

// Takes over what the plugin allocated.
std::string take(const plugin::Api& api, plugin::Bytes bytes) {
  std::string text(bytes.data == nullptr ? "out of memory" : std::string(bytes.data, bytes.size));
  api.release(bytes.data);
  return text;
}

// bin/PROGRAM finds lib/libweir-sentencepiece.so beside it, wherever both were moved.
absl::StatusOr<const plugin::Api*> load_plugin() {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return absl::InternalError("/proc/self/exe: " + error.message());
  const std::string path =
      (program.parent_path().parent_path() / "lib" / "libweir-sentencepiece.so").string();
  // Local: its protobuf and the program's must not meet. It stays loaded once it is, since threads
  // may still hold its thread-local memory.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* why = dlerror();
    return absl::FailedPreconditionError("cannot load the tokenizer library " + path + ": " +
                                         (why == nullptr ? "unknown error" : why));
  }
  using Entry = const plugin::Api* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(library, plugin::kSymbol));
  const plugin::Api* api = entry == nullptr ? nullptr : entry();
  dlclose(library);
  if (api == nullptr) {
    return absl::FailedPreconditionError(path + ": expected the symbol " + plugin::kSymbol +
                                         ", found none: it belongs to another version");
  }
  return api;
}

// "<0x0A>" to the byte; sentencepiece admits no byte piece of another form.
char byte_of(const std::string& piece) {
  unsigned byte = 0;
  WEIR_CHECK(std::sscanf(piece.c_str(), "<0x%2X>", &byte) == 1);
  return char(byte);
}

class Sentencepiece final : public Tokenizer::Impl {
 public:
  explicit Sentencepiece(const plugin::Api& api) : api_(api) {}
  ~Sentencepiece() override {
    if (model_ != nullptr) api_.close(model_);
  }

  absl::Status open(const std::string& file);
  std::vector<Span> encode(std::string_view text) const override;

 private:
  absl::StatusOr<std::string> decode_by_model(const std::vector<Token>& ids) const {
    plugin::Bytes text, error;
    if (api_.decode(model_, ids.data(), ids.size(), &text, &error)) return take(api_, text);
    return absl::InvalidArgumentError(take(api_, error));
  }
  plugin::Kind kind(size_t id) const { return api_.kind(model_, Token(id)); }
  absl::Status fill();
  absl::Status fill_bytes(Token id, Token before, const std::string& text_before);
  absl::Status check() const;

  const plugin::Api& api_;
  plugin::Model* model_ = nullptr;
};

// The table is sentencepiece's own answers: each id decoded alone, and after a visible piece.
absl::Status Sentencepiece::fill() {
  entries.resize(size_t(api_.size(model_)));
  std::optional<Token> before, space;
  std::string text_before;
  for (size_t id = 0; id < entries.size(); ++id) {
    Entry& entry = entries[id];
    const plugin::Borrowed piece = api_.piece(model_, Token(id));
    entry.piece.assign(piece.data, piece.size);
    if (kind(id) != plugin::Kind::Normal) continue;
    if (entry.piece == kSpace) space = Token(id);
    if (before) continue;
    absl::StatusOr<std::string> text = decode_by_model({Token(id)});
    if (!text.ok()) return text.status();
    if (text->empty()) continue;
    before = Token(id);
    text_before = *std::move(text);
  }
  if (!before) return absl::InvalidArgumentError("no piece of the model gives any text");
  for (size_t id = 0; id < entries.size(); ++id) {
    if (const absl::Status status = fill_bytes(Token(id), *before, text_before); !status.ok()) {
      return status;
    }
  }
  if (space) {
    const absl::StatusOr<std::string> two_spaces = decode_by_model({*space, *space});
    if (!two_spaces.ok()) return two_spaces.status();
    drops_all_spaces = two_spaces->empty();
  }
  return check();
}

absl::Status Sentencepiece::fill_bytes(Token id, Token before, const std::string& text_before) {
  Entry& entry = entries[size_t(id)];
  if (kind(size_t(id)) == plugin::Kind::Control) return absl::OkStatus();
  if (kind(size_t(id)) == plugin::Kind::Byte) {
    entry.bytes = entry.bytes_first = std::string(1, byte_of(entry.piece));
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> both = decode_by_model({before, id});
  if (!both.ok()) return both.status();
  if (both->compare(0, text_before.size(), text_before) != 0) {
    return absl::InvalidArgumentError("piece '" + entry.piece + "' changes the text before it");
  }
  entry.bytes = both->substr(text_before.size());
  entry.bytes_first = entry.bytes;
  if (entry.piece.compare(0, kSpaceBytes, kSpace) == 0) {
    absl::StatusOr<std::string> alone = decode_by_model({id});
    if (!alone.ok()) return alone.status();
    entry.bytes_first = *std::move(alone);
  }
  return absl::OkStatus();
}

// The pieces joined must be what sentencepiece makes of them together, and a text must encode.
absl::Status Sentencepiece::check() const {
  std::vector<Token> ids;
  for (size_t id = 0; id < entries.size(); ++id) {
    if (kind(id) != plugin::Kind::Byte) ids.push_back(Token(id));
  }
  const absl::StatusOr<std::string> together = decode_by_model(ids);
  if (!together.ok()) return together.status();
  if (*together != decode(ids)) {
    return absl::InvalidArgumentError("what a piece adds to a text depends on those around it");
  }
  plugin::Spans spans;
  plugin::Bytes error;
  const std::string_view sample = "A text, 1 of many.\n\u00e4\u4e16\U0001f600";
  if (!api_.encode(model_, sample.data(), sample.size(), &spans, &error)) {
    return absl::InvalidArgumentError("cannot encode a text: " + take(api_, error));
  }
  api_.release(spans.data);
  return absl::OkStatus();
}

std::vector<Tokenizer::Impl::Span> Sentencepiece::encode(std::string_view text) const {
  WEIR_CHECK(text.size() <= size_t(INT32_MAX));  // sentencepiece counts in 32 bits
  plugin::Spans spans;
  plugin::Bytes error;
  if (!api_.encode(model_, text.data(), text.size(), &spans, &error)) {
    std::fprintf(stderr, "sentencepiece cannot encode a text: %s\n", take(api_, error).c_str());
    WEIR_UNREACHABLE("open() admits no model that fails on some texts");
  }
  std::vector<Span> found;
  found.reserve(spans.size);
  for (size_t i = 0; i < spans.size; ++i) {
    const plugin::Span& span = spans.data[i];
    found.push_back({.id = span.id, .begin = span.begin, .end = span.end});
  }
  api_.release(spans.data);
  return found;
}

absl::Status Sentencepiece::open(const std::string& file) {
  plugin::Bytes error;
  model_ = api_.open(file.data(), file.size(), &error);
  if (model_ == nullptr) return absl::InvalidArgumentError(take(api_, error));
  bos = api_.bos(model_);
  eos = api_.eos(model_);
  return fill();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer::Impl>> open_sentencepiece(const std::string& path,
                                                                    const std::string& file) {
  const absl::StatusOr<const plugin::Api*> api = load_plugin();
  if (!api.ok()) return api.status();
  auto impl = std::make_unique<Sentencepiece>(**api);
  const absl::Status status = impl->open(file);
  if (!status.ok()) return invalid(path, std::string(status.message()));
  return impl;
}

}  // namespace weir
