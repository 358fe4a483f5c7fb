#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "engine/tokenizer.h"
#include "tests/unit/temporary_folder.h"

// What the tokenizer's tests share: models, texts.
namespace weir {

inline const std::string kFolder = WEIR_SOURCE_DIR "/tests/vectors/gated-deltanet";
inline const std::string kDemo = WEIR_SOURCE_DIR "/models/demo";

inline Tokenizer open(const std::string& folder = kFolder) {
  absl::StatusOr<Tokenizer> tokenizer = Tokenizer::open_folder(folder);
  if (!tokenizer.ok()) {
    ADD_FAILURE() << tokenizer.status();
    std::abort();
  }
  return *std::move(tokenizer);
}

inline std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline const std::vector<std::string>& texts() {
  static const std::vector<std::string> kTexts = {
      "In the beginning God created the heaven and the earth.",
      " leading and  double   spaces ",
      "tabs\tand\nnewlines\r\n\n",
      "naïve café, Ærøskøbing, €12.50",
      "世界、こんにちは。안녕하세요",
      "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽",
      "e\u0301 combining, \u200b zero width, \ufeff mark, \uFFFD replaced",
      "1234567890 3.14159 0x1F600",
      "<s> </s> <unk> <0x0A> are written here",
      " ",
      "a"};
  return kTexts;
}

}  // namespace weir
