#include "engine/tokenizer.h"

#include <dlfcn.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "engine/sentencepiece/plugin.h"
#include "kernels/check.h"

namespace weir {
namespace {

namespace plugin = sentencepiece_plugin;

constexpr uintmax_t kFileBytesMax = 64 << 20;
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

absl::StatusOr<std::string> read_model(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return absl::NotFoundError(path + ": no such file");
  if (!std::filesystem::is_regular_file(status)) return invalid(path, "not a regular file");
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error) return invalid(path, error.message());
  if (size == 0) return invalid(path, "the file is empty");
  if (size > kFileBytesMax) {
    return invalid(path, "expected at most " + std::to_string(kFileBytesMax) + " bytes, found " +
                             std::to_string(size));
  }
  std::string bytes(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(bytes.data(), std::streamsize(size))) return invalid(path, "cannot be read");
  return bytes;
}

// "<0x0A>" to the byte; sentencepiece admits no byte piece of another form.
char byte_of(const std::string& piece) {
  unsigned byte = 0;
  WEIR_CHECK(std::sscanf(piece.c_str(), "<0x%2X>", &byte) == 1);
  return char(byte);
}

}  // namespace

struct Tokenizer::Impl {
  struct Entry {
    std::string piece;
    std::string bytes, bytes_first;  // what it adds to a text, and to an empty one
    plugin::Kind kind = plugin::Kind::Normal;
  };

  explicit Impl(const plugin::Api& plugin_api) : api(plugin_api) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (model != nullptr) api.close(model);
  }

  absl::StatusOr<std::string> decode_by_model(const std::vector<Token>& ids) const {
    plugin::Bytes text, error;
    if (api.decode(model, ids.data(), ids.size(), &text, &error)) return take(api, text);
    return absl::InvalidArgumentError(take(api, error));
  }

  absl::Status fill();
  absl::Status fill_bytes(Token id, Token before, const std::string& text_before);
  absl::Status check() const;
  std::string decode(std::span<const Token> ids) const;
  template <typename Use>
  void encode(std::string_view text, Use use) const;

  const plugin::Api& api;
  plugin::Model* model = nullptr;
  std::vector<Entry> entries;
  // Whether every space piece is dropped before the first visible one, or only one.
  bool drops_all_spaces = false;
};

// The table is sentencepiece's own answers: each id decoded alone, and after a visible piece.
absl::Status Tokenizer::Impl::fill() {
  entries.resize(size_t(api.size(model)));
  std::optional<Token> before, space;
  std::string text_before;
  for (size_t id = 0; id < entries.size(); ++id) {
    Entry& entry = entries[id];
    const plugin::Borrowed piece = api.piece(model, Token(id));
    entry.piece.assign(piece.data, piece.size);
    entry.kind = api.kind(model, Token(id));
    if (entry.kind != plugin::Kind::Normal) continue;
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

absl::Status Tokenizer::Impl::fill_bytes(Token id, Token before, const std::string& text_before) {
  Entry& entry = entries[size_t(id)];
  if (entry.kind == plugin::Kind::Control) return absl::OkStatus();
  if (entry.kind == plugin::Kind::Byte) {
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
absl::Status Tokenizer::Impl::check() const {
  std::vector<Token> ids;
  for (size_t id = 0; id < entries.size(); ++id) {
    if (entries[id].kind != plugin::Kind::Byte) ids.push_back(Token(id));
  }
  const absl::StatusOr<std::string> together = decode_by_model(ids);
  if (!together.ok()) return together.status();
  if (*together != decode(ids)) {
    return absl::InvalidArgumentError("what a piece adds to a text depends on those around it");
  }
  plugin::Spans spans;
  plugin::Bytes error;
  const std::string_view sample = "A text, 1 of many.\n\u00e4\u4e16\U0001f600";
  if (!api.encode(model, sample.data(), sample.size(), &spans, &error)) {
    return absl::InvalidArgumentError("cannot encode a text: " + take(api, error));
  }
  api.release(spans.data);
  return absl::OkStatus();
}

std::string Tokenizer::Impl::decode(std::span<const Token> ids) const {
  std::string text;
  bool first = true;
  for (const Token id : ids) {
    WEIR_CHECK(id >= 0 && size_t(id) < entries.size());
    const Entry& entry = entries[size_t(id)];
    const std::string& added = first ? entry.bytes_first : entry.bytes;
    text += added;
    const bool dropped_space = first && added.size() < entry.bytes.size();
    if (!text.empty() || (dropped_space && !drops_all_spaces)) first = false;
  }
  return text;
}

template <typename Use>
void Tokenizer::Impl::encode(std::string_view text, Use use) const {
  WEIR_CHECK(text.size() <= size_t(INT32_MAX));  // sentencepiece counts in 32 bits
  plugin::Spans spans;
  plugin::Bytes error;
  if (!api.encode(model, text.data(), text.size(), &spans, &error)) {
    std::fprintf(stderr, "sentencepiece cannot encode a text: %s\n", take(api, error).c_str());
    WEIR_UNREACHABLE("open_folder() admits no model that fails on some texts");
  }
  use(std::span<const plugin::Span>(spans.data, spans.size));
  api.release(spans.data);
}

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

absl::StatusOr<Tokenizer> Tokenizer::open_folder(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / "tokenizer.model").string();
  const absl::StatusOr<std::string> bytes = read_model(path);
  if (!bytes.ok()) return bytes.status();
  const absl::StatusOr<const plugin::Api*> api = load_plugin();
  if (!api.ok()) return api.status();

  auto impl = std::make_unique<Impl>(**api);
  plugin::Bytes error;
  impl->model = impl->api.open(bytes->data(), bytes->size(), &error);
  if (impl->model == nullptr) return invalid(path, take(impl->api, error));
  if (const absl::Status status = impl->fill(); !status.ok()) {
    return invalid(path, std::string(status.message()));
  }
  return Tokenizer(std::move(impl));
}

std::vector<Token> Tokenizer::encode(std::string_view text) const {
  std::vector<Token> ids;
  impl_->encode(text, [&](std::span<const plugin::Span> spans) {
    ids.reserve(spans.size());
    for (const plugin::Span& span : spans) ids.push_back(span.id);
  });
  return ids;
}

std::vector<Tokenizer::Piece> Tokenizer::encode_pieces(std::string_view text) const {
  std::vector<Piece> pieces;
  impl_->encode(text, [&](std::span<const plugin::Span> spans) {
    pieces.reserve(spans.size());
    for (const plugin::Span& span : spans) {
      pieces.push_back(
          {.id = span.id, .piece = piece(span.id), .begin = span.begin, .end = span.end});
    }
  });
  return pieces;
}

std::string Tokenizer::bytes(Token id, bool first) const {
  WEIR_CHECK(id >= 0 && id < size());
  const Impl::Entry& entry = impl_->entries[size_t(id)];
  return first ? entry.bytes_first : entry.bytes;
}

std::string Tokenizer::decode(std::span<const Token> ids) const { return impl_->decode(ids); }

const std::string& Tokenizer::piece(Token id) const {
  WEIR_CHECK(id >= 0 && id < size());
  return impl_->entries[size_t(id)].piece;
}

int32_t Tokenizer::size() const { return int32_t(impl_->entries.size()); }
Token Tokenizer::bos() const { return impl_->api.bos(impl_->model); }
Token Tokenizer::eos() const { return impl_->api.eos(impl_->model); }

}  // namespace weir
