#include "engine/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "engine/tokenizer_impl.h"
#include "kernels/check.h"

namespace weir {
namespace {

constexpr uintmax_t kFileBytesMax = 64 << 20;

absl::Status invalid(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(path + ": " + what);
}

absl::StatusOr<std::string> read_file(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
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

// FOLDER/rwkv_vocab_*.txt, in order.
std::vector<std::string> rwkv_vocabularies(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name.starts_with("rwkv_vocab_") && name.ends_with(".txt")) {
      paths.push_back(at->path().string());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

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

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

absl::StatusOr<Tokenizer> Tokenizer::open_folder(const std::string& folder) {
  const std::string model = (std::filesystem::path(folder) / "tokenizer.model").string();
  std::vector<std::string> found = rwkv_vocabularies(folder);
  std::error_code error;
  if (std::filesystem::exists(model, error)) found.insert(found.begin(), model);
  if (found.empty()) {
    return absl::NotFoundError(model + ": no such file, and no rwkv_vocab_*.txt beside it");
  }
  if (found.size() > 1) {
    return invalid(found[0], "expected one tokenizer in the folder, found " + found[1] + " too");
  }
  const std::string& path = found[0];
  const absl::StatusOr<std::string> file = read_file(path);
  if (!file.ok()) return file.status();
  auto impl = path == model ? open_sentencepiece(path, *file) : open_rwkv_vocabulary(path, *file);
  if (!impl.ok()) return impl.status();
  (*impl)->path = path;
  return Tokenizer(*std::move(impl));
}

std::vector<Token> Tokenizer::encode(std::string_view text) const {
  std::vector<Token> ids;
  const std::vector<Impl::Span> spans = impl_->encode(text);
  ids.reserve(spans.size());
  for (const Impl::Span& span : spans) ids.push_back(span.id);
  return ids;
}

std::vector<Tokenizer::Piece> Tokenizer::encode_pieces(std::string_view text) const {
  std::vector<Piece> pieces;
  const std::vector<Impl::Span> spans = impl_->encode(text);
  pieces.reserve(spans.size());
  for (const Impl::Span& span : spans) {
    pieces.push_back(
        {.id = span.id, .piece = piece(span.id), .begin = span.begin, .end = span.end});
  }
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

const std::string& Tokenizer::path() const { return impl_->path; }
int32_t Tokenizer::size() const { return int32_t(impl_->entries.size()); }
Token Tokenizer::bos() const { return impl_->bos; }
Token Tokenizer::eos() const { return impl_->eos; }

}  // namespace weir
