// Vocabulary files of RWKV's "world" models. The known ones hold 65,529 tokens; these are small.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "engine/text_stream.h"
#include "tests/unit/tokenizer_cases.h"

namespace weir {
namespace {

const std::string kFile = "rwkv_vocab_v20230424.txt";

// One line for each of the 256 bytes, as the known files begin.
std::string all_bytes() {
  std::string lines;
  for (int byte = 0; byte < 256; ++byte) {
    const std::string hex = absl::StrCat("\\x", absl::Hex(byte, absl::kZeroPad2));
    lines += absl::StrCat(byte + 1, byte < 128 ? " '" : " b'", hex, "' 1\n");
  }
  return lines;
}

const std::vector<std::string> kWords = {
    "In", " the", " beginning", " be", "begin", "th", "the", " heaven and", "  ", "   ",
    "\n\n", "世界", "世", "こん", "\xe4\xb8", "\xf0\x9f\x91", "👩", "é", "aa", "aaaa", "a\"b'c\\"};

// The words as lines after the bytes; escapes where the file needs them, and bytes literals for
// what is no UTF-8.
std::string vocabulary() {
  std::string lines = all_bytes();
  int id = 257;
  for (const std::string& word : kWords) {
    const bool partial = word == "\xe4\xb8" || word == "\xf0\x9f\x91";
    std::string text;
    for (const char c : word) {
      if (partial) absl::StrAppend(&text, "\\x", absl::Hex(uint8_t(c)));
      else if (c == '\n') text += "\\n";
      else if (c == '\'' || c == '\\') text += std::string("\\") + c;
      else text += c;
    }
    absl::StrAppend(&lines, id++, partial ? " b'" : " '", text, "' ", word.size(), "\n");
  }
  return lines;
}

// The longest token at each place, found by trying all lengths.
std::vector<Token> cut(std::string_view text) {
  std::map<std::string, Token> ids;
  for (int byte = 0; byte < 256; ++byte) ids[std::string(1, char(byte))] = byte + 1;
  for (size_t i = 0; i < kWords.size(); ++i) ids[kWords[i]] = Token(257 + i);
  std::vector<Token> found;
  while (!text.empty()) {
    size_t size = std::min<size_t>(text.size(), 20);
    while (!ids.contains(std::string(text.substr(0, size)))) --size;
    found.push_back(ids[std::string(text.substr(0, size))]);
    text.remove_prefix(size);
  }
  return found;
}

absl::StatusOr<Tokenizer> open_lines(const std::string& lines) {
  const test::TemporaryFolder folder;
  folder.write(kFile, lines);
  return Tokenizer::open_folder(folder.path());
}

Tokenizer small() {
  auto tokenizer = open_lines(vocabulary());
  if (tokenizer.ok()) return *std::move(tokenizer);
  ADD_FAILURE() << tokenizer.status();
  std::abort();
}

TEST(RwkvTokenizer, CutsTheLongestTokenEachTime) {
  const Tokenizer tokenizer = small();
  EXPECT_EQ(tokenizer.size(), 257 + int32_t(kWords.size()));
  EXPECT_EQ(tokenizer.bos(), -1);
  EXPECT_EQ(tokenizer.eos(), 0);
  EXPECT_EQ(tokenizer.encode("In the beginning aaa"),
            (std::vector<Token>{257, 258, 259, ' ' + 1, 275, 'a' + 1}));
  EXPECT_EQ(tokenizer.encode(" heaven an"), cut(" heaven an"));  // a long token not quite there
  EXPECT_EQ(tokenizer.encode(""), std::vector<Token>{});
  for (const std::string& text : texts()) EXPECT_EQ(tokenizer.encode(text), cut(text)) << text;
  std::mt19937 random(4);
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (uint32_t n = random() % 12; n > 0; --n) text += kWords[random() % kWords.size()];
    text.resize(text.size() - random() % (text.size() + 1) / 2);
    EXPECT_EQ(tokenizer.encode(text), cut(text)) << text;
  }
}

TEST(RwkvTokenizer, TextsComeBackAndTokenByTokenToo) {
  const Tokenizer tokenizer = small();
  for (const std::string& text : texts()) {
    const std::vector<Tokenizer::Piece> pieces = tokenizer.encode_pieces(text);
    TextStream stream;
    std::string streamed;
    std::vector<Token> ids;
    int64_t at = 0;
    for (const Tokenizer::Piece& piece : pieces) {
      streamed += stream.push(tokenizer.bytes(piece.id, ids.empty()));
      ids.push_back(piece.id);
      EXPECT_EQ(piece.begin, at);
      at = piece.end;
    }
    EXPECT_EQ(at, int64_t(text.size()));
    EXPECT_EQ(streamed + stream.finish(), text);
    EXPECT_EQ(tokenizer.decode(ids), text);
  }
}

TEST(RwkvTokenizer, PiecesAreUtf8AndTheEndOfTextIsSilent) {
  const Tokenizer tokenizer = small();
  EXPECT_EQ(tokenizer.piece(258), " the");
  EXPECT_EQ(tokenizer.piece(271), "b'\\xe4\\xb8'");
  EXPECT_EQ(tokenizer.bytes(271, false), "\xe4\xb8");
  EXPECT_EQ(tokenizer.bytes(0, false), "");
  EXPECT_EQ(tokenizer.piece(0), "<|endoftext|>");
  EXPECT_EQ(tokenizer.decode(std::vector<Token>{257, 0, 258}), "In the");
}

// Ids without a line are allowed: they add nothing to a text, and no text becomes them.
TEST(RwkvTokenizer, IdsMayBeMissing) {
  const auto tokenizer = open_lines(all_bytes() + "900 'abc' 3\n");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(tokenizer->size(), 901);
  EXPECT_EQ(tokenizer->bytes(500, false), "");
  EXPECT_EQ(tokenizer->encode("abcab"), (std::vector<Token>{900, 'a' + 1, 'b' + 1}));
}

TEST(RwkvTokenizer, PythonsEscapes) {
  const std::pair<const char*, std::string> literals[] = {
      {R"('\\\'\"\a\b\f\n\r\t\v')", "\\'\"\a\b\f\n\r\t\v"},
      {R"("it's")", "it's"},
      {R"('say "x"')", "say \"x\""},
      {R"('a b  c')", "a b  c"},
      {R"('\x41\x7f\xe9')", "A\x7f\u00e9"},
      {R"(b'\x41\xe9\'"')", "A\xe9'\""},
      {R"('\u4e16\U0001F600\u00e9')", "世\U0001F600é"},
      {R"('\1012\0')", std::string("A2\0", 3)},
      {R"(b'\377\08')", std::string("\xff\0" "8", 3)},
      {R"('naïve\u200b')", "naïve\u200b"}};
  for (const auto& [literal, bytes] : literals) {
    const auto tokenizer = open_lines(
        absl::StrCat(all_bytes(), "257 ", literal, " ", bytes.size(), "\r\n"));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_EQ(tokenizer->bytes(257, false), bytes) << literal;
  }
}

TEST(RwkvTokenizer, MalformedLinesAreRefusedByFileAndLine) {
  const std::pair<std::string, const char*> lines[] = {
      {"257 'abc' 4", "expected a token of 4 bytes, as the line says, found 3"},
      {"257 '世' 1", "expected a token of 1 bytes, as the line says, found 3"},
      {"257 'abc'", "expected ID LITERAL BYTES"},
      {"", "expected ID LITERAL BYTES"},
      {"x 'abc' 3", "expected a whole number before the first space"},
      {"-7 'abc' 3", "expected a whole number before the first space"},
      {"257 'abc' 3 ", "expected a whole number after the last space"},
      {"0 'abc' 3", "expected an id from 1 to 1048575, found 0"},
      {"1048576 'abc' 3", "expected an id from 1 to 1048575, found 1048576"},
      {"99999999999 'abc' 3", "expected a whole number before the first space"},
      {"256 'abc' 3", "expected a new id, found 256 again"},
      {"257 '' 0", "expected a token of 1 to 1024 bytes, found 0"},
      {"257 '" + std::string(1025, 'a') + "' 1025", "expected a token of 1 to 1024 bytes"},
      {"257 abc 3", "expected a quote before the token"},
      {"257 u'abc' 3", "expected a quote before the token"},
      {"257 'abc 3", "expected a quote after the token"},
      {"257 'abc\\' 3", "expected a quote after the token"},
      {"257 'a'+'bc' 3", "expected nothing between the token's end and its length"},
      {"257 '''abc''' 3", "expected nothing between the token's end and its length"},
      {"257 '\\N{DASH}' 3", "expected an escape of Python's, found \\N"},
      {"257 '\\xz0' 1", "expected an escape of Python's, found \\xz0"},
      {"257 '\\ud800' 3", "expected an escape of Python's, found \\ud800"},
      {"257 '\\U00110000' 4", "expected an escape of Python's, found \\U00110000"},
      {"257 b'\\u4e16' 3", "expected an escape of Python's, found \\u"},
      {"257 b'\\777' 1", "expected an escape of Python's, found \\777"},
      {"257 b'é' 2", "expected ASCII in a bytes literal"},
      {"257 '\xe4\xb8' 2", "expected UTF-8"},
      {"257 __import__('os').system('true') 3", "expected a quote before the token"}};
  for (const auto& [line, part] : lines) {
    const absl::Status status = open_lines(all_bytes() + line + "\n258 'ok' 2\n").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << line;
    EXPECT_NE(std::string(status.message()).find(absl::StrCat(kFile, ":257: ", part)),
              std::string::npos)
        << line << "\n  " << status;
  }
}

TEST(RwkvTokenizer, VocabulariesThatCannotCutEveryTextAreRefused) {
  const auto expect = [](const std::string& lines, const std::string& part) {
    const absl::Status status = open_lines(lines).status();
    EXPECT_NE(std::string(status.message()).find(kFile + ": " + part), std::string::npos)
        << status;
  };
  std::string no_a = all_bytes();
  no_a.replace(no_a.find("98 '\\x61' 1"), 11, "98 'abc' 3");
  expect(no_a, "expected each of the 256 bytes to be a token, found none for 0x61");
  std::string no_last = all_bytes();
  no_last.resize(no_last.find("256 "));
  expect(no_last, "expected each of the 256 bytes to be a token, found none for 0xff");
  expect(all_bytes() + "257 'abc' 3\n300 b'abc' 3\n",
         "expected each token once, found ids 257 and 300 to be the same bytes");
  expect(all_bytes() + "257 '\\x61' 1\n",
         "expected each token once, found ids 98 and 257 to be the same bytes");
}

TEST(RwkvTokenizer, OneTokenizerAFolder) {
  const test::TemporaryFolder folder;
  folder.write(kFile, vocabulary());
  EXPECT_TRUE(Tokenizer::open_folder(folder.path()).ok());
  EXPECT_EQ(open(folder.path()).path(), folder.path() + "/" + kFile);
  folder.write("tokenizer.model", read(kFolder + "/tokenizer.model"));
  const absl::Status both = Tokenizer::open_folder(folder.path()).status();
  EXPECT_NE(std::string(both.message()).find("expected one tokenizer in the folder"),
            std::string::npos)
      << both;
  std::filesystem::remove(folder.path() + "/" + kFile);
  EXPECT_EQ(open(folder.path()).eos(), 2);
  std::filesystem::remove(folder.path() + "/tokenizer.model");
  folder.write(kFile, "");
  EXPECT_FALSE(Tokenizer::open_folder(folder.path()).ok());
}

TEST(RwkvTokenizer, DamagedFilesAreRefusedOrUsable) {
  const std::string whole = vocabulary();
  int refused = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    std::string bytes = whole;
    for (uint32_t flips = 1 + random() % 2; flips > 0; --flips) {
      bytes[random() % bytes.size()] ^= char(1 << random() % 8);
    }
    const auto tokenizer = open_lines(bytes);
    if (!tokenizer.ok()) ++refused;
    if (!tokenizer.ok()) continue;
    for (const std::string& text : texts()) {
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_LT(refused, 300);
}

// Milliseconds; something quadratic would take minutes.
TEST(RwkvTokenizer, LargeTextsEncodeInLinearTime) {
  std::string lines = vocabulary();
  for (int size = 5; size < 200; ++size) {
    absl::StrAppend(&lines, 500 + size, " '", std::string(size_t(size), 'a'), "' ", size, "\n");
  }
  const auto tokenizer = open_lines(lines);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  std::string prose, near;
  while (prose.size() < 1000000) prose += texts()[prose.size() % texts().size()] + " ";
  while (near.size() < 1000000) near += std::string(150, 'a') + "b";
  for (const std::string& text : {prose, near, std::string(1000000, 'a')}) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<Token> ids = tokenizer->encode(text);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    EXPECT_LT(seconds.count(), 60);
    EXPECT_EQ(tokenizer->decode(ids), text);
  }
}

}  // namespace
}  // namespace weir
