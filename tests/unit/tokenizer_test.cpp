#include "engine/tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/text_stream.h"
#include "tests/unit/tokenizer_cases.h"

namespace weir {
namespace {

absl::Status status_of(const std::string& model_bytes) {
  const test::TemporaryFolder folder;
  folder.write("tokenizer.model", model_bytes);
  return Tokenizer::open_folder(folder.path()).status();
}

TEST(Tokenizer, AFileThatIsMissingEmptyOrNoFileIsRefusedByName) {
  const test::TemporaryFolder folder;
  const absl::Status missing = Tokenizer::open_folder(folder.path()).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(missing.message()).find(folder.path() + "/tokenizer.model"),
            std::string::npos);
  folder.write("tokenizer.model", "");
  const absl::Status empty = Tokenizer::open_folder(folder.path()).status();
  EXPECT_EQ(empty.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(empty.message()).find("tokenizer.model"), std::string::npos);
  std::filesystem::remove(folder.path() + "/tokenizer.model");
  std::filesystem::create_directory(folder.path() + "/tokenizer.model");
  EXPECT_EQ(Tokenizer::open_folder(folder.path()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Tokenizer, AFileTooLargeIsRefusedBeforeItIsRead) {
  const test::TemporaryFolder folder;
  folder.write("tokenizer.model", "x");
  std::filesystem::resize_file(folder.path() + "/tokenizer.model", uintmax_t(1) << 40);
  EXPECT_EQ(Tokenizer::open_folder(folder.path()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Tokenizer, ATruncatedFileIsRefusedOrStillWhole) {
  const std::string whole = read(kFolder + "/tokenizer.model");
  for (size_t size = 1; size < whole.size(); size += 97) {
    const absl::Status status = status_of(whole.substr(0, size));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << size;
  }
  EXPECT_FALSE(status_of("hello").ok());
  EXPECT_FALSE(status_of(std::string(1000, '\0')).ok());
}

TEST(Tokenizer, DamagedFilesAreRefusedOrUsable) {
  const std::string whole = read(kFolder + "/tokenizer.model");
  int refused = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    std::string bytes = whole;
    for (uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
      bytes[random() % bytes.size()] ^= char(1 << random() % 8);
    }
    const test::TemporaryFolder folder;
    folder.write("tokenizer.model", bytes);
    const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::open_folder(folder.path());
    if (!tokenizer.ok()) ++refused;
    if (!tokenizer.ok()) continue;
    for (const std::string& text : texts()) tokenizer->decode(tokenizer->encode(text));
  }
  EXPECT_GT(refused, 0);
}

// The bytes of a model are a protobuf; these are the few fields the cases below need.
std::string field(int number, const std::string& bytes) {
  std::string out(1, char(number << 3 | 2));
  for (size_t size = bytes.size(); ; size >>= 7) {
    out += char((size & 0x7F) | (size > 0x7F ? 0x80 : 0));
    if (size <= 0x7F) return out + bytes;
  }
}
std::string piece(const std::string& text, char type, const std::string& score = "") {
  return field(1, field(1, text) + score + std::string("\x18") + type);
}
const std::string kBase = piece("<unk>", 2) + piece("<s>", 3) + piece("</s>", 3) + piece("a", 1) +
                          field(2, std::string("\x18\x02", 2));  // model_type: BPE

TEST(Tokenizer, ASmallModelOfOnesOwn) {
  EXPECT_EQ(status_of(kBase), absl::OkStatus());
}

TEST(Tokenizer, WhatSentencepieceWouldOnlyFailOnLaterIsRefusedByName) {
  const auto expect = [](const std::string& bytes, const std::string& part) {
    const absl::Status status = status_of(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status;
  };
  expect(kBase + piece("\u00a7", 3), "piece 4 '\u00a7' is reserved");
  expect(kBase + piece("a", 3), "one character");
  expect(kBase + piece("ab", 3) + piece("ab", 1), "piece 'ab' is there twice");
  expect(kBase + piece(std::string("a\0b", 3), 4), "zero byte");
  expect(kBase + piece("b", 1, std::string("\x15\x00\x00\xC0\x7F", 5)), "no number");
  expect(kBase + field(5, field(2, std::string(40, 'x'))), "denormalizer_spec");
  expect(piece("<unk>", 2) + piece("<s>", 3), "no pieces");
}

TEST(Tokenizer, ANormalizerThatPointsOutsideItselfIsRefused) {
  const auto charsmap = [](const std::vector<uint32_t>& units, const std::string& texts) {
    const uint32_t bytes = uint32_t(units.size() * 4);
    std::string out(reinterpret_cast<const char*>(&bytes), 4);
    out.append(reinterpret_cast<const char*>(units.data()), bytes);
    return kBase + field(3, field(2, out + texts));
  };
  // Unit 0 leads to 1 ^ byte; 'b' there leads to the leaf, whose value is a place in the texts.
  std::vector<uint32_t> units(512, 0x80000000u);
  units[0] = 1 << 10;
  units[1 ^ 'b'] = 'b' | 1 << 8 | (1 ^ 'b' ^ 256) << 10;
  units[256] = 0x80000000u | 2;
  const std::string texts("x\0a\0", 4);
  EXPECT_EQ(status_of(charsmap(units, texts)), absl::OkStatus());
  const test::TemporaryFolder folder;
  folder.write("tokenizer.model", charsmap(units, texts));
  EXPECT_EQ(open(folder.path()).encode("ab"), open(folder.path()).encode("aa"));

  std::vector<uint32_t> far_text = units;
  far_text[256] = 0x80000000u | 1000000;
  EXPECT_FALSE(status_of(charsmap(far_text, texts)).ok());
  std::vector<uint32_t> far_unit = units;
  far_unit[1 ^ 'b'] = 'b' | 1 << 8 | (1 << 20) << 10;
  EXPECT_FALSE(status_of(charsmap(far_unit, texts)).ok());
  EXPECT_FALSE(status_of(charsmap({1 << 10}, texts)).ok());
  EXPECT_FALSE(status_of(charsmap({}, texts)).ok());
}

TEST(Tokenizer, KnownIdsOfTheTestCheckpoints) {
  const Tokenizer tokenizer = open();
  EXPECT_EQ(tokenizer.size(), 512);
  EXPECT_EQ(tokenizer.bos(), 1);
  EXPECT_EQ(tokenizer.eos(), 2);
  EXPECT_EQ(tokenizer.encode(""), std::vector<Token>{});
  EXPECT_EQ(tokenizer.encode(texts()[0]),
            (std::vector<Token>{338, 438, 264, 313, 450, 262, 438, 286, 415, 370, 274, 267, 269,
                                279, 264, 343, 436, 455, 275, 290, 264, 309, 289, 375, 460}));
}

TEST(Tokenizer, PiecesTellWhereTheyStand) {
  for (const std::string& folder : {kFolder, kDemo}) {
    const Tokenizer tokenizer = open(folder);
    for (const std::string& text : texts()) {
      const std::vector<Token> ids = tokenizer.encode(text);
      const std::vector<Tokenizer::Piece> pieces = tokenizer.encode_pieces(text);
      ASSERT_EQ(pieces.size(), ids.size());
      int64_t at = 0;
      for (size_t i = 0; i < pieces.size(); ++i) {
        EXPECT_EQ(pieces[i].id, ids[i]);
        EXPECT_EQ(pieces[i].piece, tokenizer.piece(ids[i]));
        EXPECT_EQ(pieces[i].begin, at);  // these models keep all of a text
        at = pieces[i].end;
      }
      EXPECT_EQ(at, int64_t(text.size()));
    }
  }
}

TEST(Tokenizer, TextsComeBackAndTokenByTokenToo) {
  for (const std::string& folder : {kFolder, kDemo}) {
    const Tokenizer tokenizer = open(folder);
    for (const std::string& text : texts()) {
      const std::vector<Token> ids = tokenizer.encode(text);
      EXPECT_EQ(tokenizer.decode(ids), text);
      TextStream stream;
      std::string streamed;
      for (size_t i = 0; i < ids.size(); ++i) {
        streamed += stream.push(tokenizer.bytes(ids[i], i == 0));
      }
      EXPECT_EQ(streamed + stream.finish(), text);
    }
  }
}

// A piece writes a space as U+2581, so a text's own U+2581 comes back as one.
TEST(Tokenizer, TheSpaceSignBecomesASpace) {
  const Tokenizer tokenizer = open();
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("a▁▁b")), "a  b");
}

TEST(Tokenizer, ControlPiecesAreSilentAndUnknownOnesShow) {
  const Tokenizer tokenizer = open();
  EXPECT_EQ(tokenizer.bytes(1, true), "");
  EXPECT_EQ(tokenizer.bytes(2, false), "");
  EXPECT_EQ(tokenizer.bytes(0, false), " \u2047 ");
  EXPECT_EQ(tokenizer.piece(0), "<unk>");
}

TEST(Tokenizer, AnIdOutsideTheVocabularyIsTheCallersMistake) {
  const Tokenizer tokenizer = open();
  EXPECT_DEATH(tokenizer.bytes(512, false), "size");
  EXPECT_DEATH(tokenizer.piece(-1), "size");
  const std::vector<Token> ids = {512};
  EXPECT_DEATH(tokenizer.decode(ids), "entries");
}

// Each takes milliseconds; something quadratic would take minutes.
TEST(Tokenizer, LargeAndOddTextsEncodeInLinearTime) {
  const Tokenizer tokenizer = open(kDemo);
  std::string prose, cjk, emoji, zeros;
  while (prose.size() < 1000000) prose += texts()[prose.size() % texts().size()] + " ";
  while (cjk.size() < 300000) cjk += "世界";
  while (emoji.size() < 300000) emoji += "👩‍👩‍👧‍👦";
  for (int i = 0; i < 50000; ++i) zeros += std::string("a\0", 2);
  for (const std::string& text : {prose, std::string(100000, 'a'), std::string(100000, ' '),
                                  std::string(100000, '\n'), cjk, emoji, zeros,
                                  std::string(100000, '\0')}) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<Token> ids = tokenizer.encode(text);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    EXPECT_LT(seconds.count(), 60) << text.size();
    EXPECT_EQ(tokenizer.decode(ids), text);
  }
}

TEST(Tokenizer, ManyThreadsGetTheSameIds) {
  const Tokenizer tokenizer = open();
  std::vector<std::vector<Token>> expected;
  for (const std::string& text : texts()) expected.push_back(tokenizer.encode(text));
  std::vector<int> wrong(8, 0);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 50 * texts().size(); ++i) {
        const size_t which = (i + t) % texts().size();
        if (tokenizer.encode(texts()[which]) != expected[which]) ++wrong[t];
        if (tokenizer.decode(expected[which]) != texts()[which]) ++wrong[t];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(8, 0));
}

TEST(Tokenizer, ModelsOpenAndCloseInManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 3; ++i) EXPECT_EQ(open().encode("a").size(), open().encode("b").size());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace weir
