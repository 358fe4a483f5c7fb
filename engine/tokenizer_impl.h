#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer.h"

namespace weir {

// What a kind of tokenizer file provides: a table of its tokens, and how a text becomes some of
// them. Everything else is Tokenizer's.
struct Tokenizer::Impl {
  struct Entry {
    std::string piece;
    std::string bytes, bytes_first;  // what it adds to a text, and to an empty one
  };
  struct Span {
    Token id = 0;
    int64_t begin = 0, end = 0;      // bytes of the text
  };

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  virtual ~Impl() = default;

  virtual std::vector<Span> encode(std::string_view text) const = 0;
  std::string decode(std::span<const Token> ids) const;

  std::string path;
  std::vector<Entry> entries;
  // Whether every space piece is dropped before the first visible one, or only one.
  bool drops_all_spaces = false;
  Token bos = -1, eos = -1;
};

// Each takes a whole file. What it refuses begins with the file's path.
absl::StatusOr<std::unique_ptr<Tokenizer::Impl>> open_sentencepiece(const std::string& path,
                                                                    const std::string& file);
absl::StatusOr<std::unique_ptr<Tokenizer::Impl>> open_rwkv_vocabulary(const std::string& path,
                                                                      const std::string& file);

}  // namespace weir
