#pragma once
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/types.h"

namespace weir {

// Text to ids and back. Constant after loading; every method may be called from any thread.
class Tokenizer {
 public:
  // FOLDER/tokenizer.model, a sentencepiece model, or FOLDER/rwkv_vocab_*.txt, a vocabulary of
  // RWKV's "world" models. Exactly one of them is there.
  static absl::StatusOr<Tokenizer> open_folder(const std::string& folder);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  struct Piece {
    Token id = 0;
    std::string piece;                // as the file writes it, "▁the"; valid UTF-8
    int64_t begin = 0, end = 0;       // bytes of the input text
  };
  // `text` is valid UTF-8. No bos or eos is added.
  std::vector<Token> encode(std::string_view text) const;
  std::vector<Piece> encode_pieces(std::string_view text) const;

  // The bytes that a token adds to a text; `first` when nothing stands before it (the model's
  // dummy space is dropped there). Byte pieces give one raw byte, control pieces none.
  std::string bytes(Token id, bool first) const;
  // All of them joined; not necessarily valid UTF-8.
  std::string decode(std::span<const Token> ids) const;
  const std::string& piece(Token id) const;

  const std::string& path() const;  // of the file
  int32_t size() const;             // ids 0 .. size - 1
  Token bos() const;                // -1: none
  Token eos() const;

  struct Impl;  // of one kind of file: tokenizer_impl.h

 private:
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

}  // namespace weir
