#include "engine/text_stream.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/text_stream_model.h"

namespace weir {
namespace {

using text_stream_model::Case;
using text_stream_model::disagreement;

// Pushes each part; returns what came for each, and last what finish() gave.
std::vector<std::string> pieces(TextStream& stream, const std::vector<std::string>& parts) {
  std::vector<std::string> out;
  for (const std::string& part : parts) out.push_back(stream.push(part));
  out.push_back(stream.finish());
  return out;
}

using Pieces = std::vector<std::string>;

TEST(TextStream, AStopStringSpansTokens) {
  TextStream stream({"own fox"});
  EXPECT_EQ(pieces(stream, {"The br", "own", " f", "ox", " jumps"}),
            (Pieces{"The br", "", "", "", "", ""}));
  EXPECT_EQ(stream.stopped(), "own fox");
  EXPECT_EQ(stream.unfinished_bytes(), 0u);
}

TEST(TextStream, ANearMissArrivesWhole) {
  TextStream stream({"own fox"});
  EXPECT_EQ(pieces(stream, {"brown fo", "al", " own fo"}),
            (Pieces{"br", "own foal", " ", "own fo"}));
  EXPECT_EQ(stream.stopped(), std::nullopt);
}

TEST(TextStream, TheStopIsKeptWhenAskedFor) {
  TextStream stream({"own fox"}, true);
  EXPECT_EQ(pieces(stream, {"brown", " fox jumps", "!"}), (Pieces{"br", "own fox", "", ""}));
}

TEST(TextStream, OneStopBeginsTheOther) {
  for (const auto& stops : {Pieces{"ab", "abc"}, Pieces{"abc", "ab"}}) {
    TextStream stream(stops);
    EXPECT_EQ(pieces(stream, {"xa", "bcd"}), (Pieces{"x", "", ""}));
    EXPECT_EQ(stream.stopped(), "ab");
  }
}

TEST(TextStream, OfTwoCompleteAtTheSameByteTheOneThatBeginsFirstWins) {
  for (const auto& stops : {Pieces{"bc", "abc"}, Pieces{"abc", "bc"}}) {
    TextStream stream(stops);
    EXPECT_EQ(pieces(stream, {"xa", "b", "c"}), (Pieces{"x", "", "", ""}));
    EXPECT_EQ(stream.stopped(), "abc");
  }
}

TEST(TextStream, AStopAtTheVeryEnd) {
  TextStream stream({"END"});
  EXPECT_EQ(pieces(stream, {"text E", "N", "D"}), (Pieces{"text ", "", "", ""}));
  EXPECT_EQ(stream.stopped(), "END");
}

TEST(TextStream, AStopOfManyByteCharacters) {
  TextStream stream({"世界"});
  EXPECT_EQ(pieces(stream, {"世", "世\xE7\x95", "\x8C", "x"}), (Pieces{"", "世", "", "", ""}));
  EXPECT_EQ(stream.stopped(), "世界");
}

TEST(TextStream, AFalseStartInsideAFalseStart) {
  TextStream stream({"aabaaa"});
  EXPECT_EQ(pieces(stream, {"aabaa", "b", "aaa"}), (Pieces{"", "aab", "", ""}));
  EXPECT_EQ(stream.stopped(), "aabaaa");
}

TEST(TextStream, ACharacterWaitsForItsLastByte) {
  TextStream stream;
  EXPECT_EQ(pieces(stream, {"\xF0", "\x9F", "\x98", "\x80", "\xE2\x80\x8D"}),
            (Pieces{"", "", "", "😀", "\xE2\x80\x8D", ""}));
}

TEST(TextStream, AnUnfinishedTailIsCountedNotInvented) {
  TextStream stream;
  EXPECT_EQ(pieces(stream, {"a\xF0\x9F", "\x98"}), (Pieces{"a", "", ""}));
  EXPECT_EQ(stream.unfinished_bytes(), 3u);
}

TEST(TextStream, WhatNeverBecomesACharacterIsReplacedByMaximalSubparts) {
  const struct {
    std::string bytes, text;
  } cases[] = {
      {"\x80" "a", "\uFFFDa"},
      {"\xC0\x80" "a", "\uFFFD\uFFFDa"},                 // overlong: each byte
      {"\xE2\x82" "a", "\uFFFDa"},                       // a cut character: once
      {"\xED\xA0\x80" "a", "\uFFFD\uFFFD\uFFFDa"},       // a surrogate: each byte
      {"\xF0\x9F\x98" "a", "\uFFFDa"},
      {"\xF0\x9F\xE2\x82\xAC", "\uFFFD€"},
      {"\xF4\x90\x80\x80" "a", "\uFFFD\uFFFD\uFFFD\uFFFDa"},
      {"\xF8\x88\x80\x80\x80" "a", "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDa"},
      {"\xC3\xC3\xA4", "\uFFFDä"},
  };
  for (const auto& [bytes, text] : cases) {
    TextStream one;
    EXPECT_EQ(one.push(bytes) + one.finish(), text);
    TextStream stream;
    std::string found;
    for (const char byte : bytes) found += stream.push({&byte, 1});
    EXPECT_EQ(found + stream.finish(), text);
  }
}

TEST(TextStream, NothingComesAfterAStop) {
  TextStream stream({"."});
  EXPECT_EQ(pieces(stream, {"a.b", "c", "\xF0", "."}), (Pieces{"a", "", "", "", ""}));
  EXPECT_EQ(stream.unfinished_bytes(), 0u);
}

TEST(TextStream, AZeroByteIsACharacter) {
  TextStream stream({std::string("\0b", 2)});
  EXPECT_EQ(stream.push(std::string("a\0", 2)), "a");
  EXPECT_EQ(stream.push("c"), std::string("\0c", 2));
}

TEST(TextStream, Utf8IsJudgedByTheStandardsTable) {
  for (const char* good : {"", "a", "\u00e4", "\uD7FF", "\uE000", "\uFFFF", "\U00010000"}) {
    EXPECT_TRUE(is_utf8(good));
  }
  EXPECT_TRUE(is_utf8("\xF4\x8F\xBF\xBF"));
  for (const char* bad : {"\x80", "\xC1\x81", "\xE0\x9F\x80", "\xED\xA0\x80", "\xF0\x8F\x80\x80",
                          "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE2\x82", "a\xFF"}) {
    EXPECT_FALSE(is_utf8(bad));
  }
}

// Texts of few characters, so that stops match often and almost match oftener.
Case random_case(std::mt19937& random) {
  static const std::vector<std::string> kParts = {"a",    "b",    "ab",   "世",   "界",  "😀",
                                                  "\x80", "\xE4", "\xB8", "\xF0", "\x9F", "\uFFFD"};
  const auto draw = [&](size_t below) { return size_t(random() % below); };
  Case each;
  each.include = draw(2) == 1;
  for (size_t count = draw(4); count > 0; --count) {
    std::string stop;
    for (size_t parts = 1 + draw(4); parts > 0; --parts) {
      stop += kParts[draw(8) < 6 ? draw(6) : kParts.size() - 1];
    }
    each.stops.push_back(stop);
  }
  for (size_t parts = draw(40); parts > 0; --parts) {
    each.bytes += kParts[draw(4) == 0 ? draw(kParts.size()) : draw(6)];
  }
  for (size_t cut = draw(4); cut < each.bytes.size(); cut += draw(5)) each.cuts.push_back(cut);
  return each;
}

TEST(TextStream, EqualsDecodingAndSearchingTheWhole) {
  int stopped = 0;
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    std::mt19937 random(seed);
    const Case each = random_case(random);
    ASSERT_EQ(disagreement(each), "") << "seed " << seed;
    if (text_stream_model::whole(each.bytes, each.stops, each.include).stopped) ++stopped;
  }
  EXPECT_GT(stopped, 5000);   // the cases reach both outcomes
  EXPECT_LT(stopped, 18000);
}

TEST(TextStream, TheFuzzersFindingsStayFixed) {
  int files = 0;
  const std::string folder = WEIR_SOURCE_DIR "/tests/fuzz/corpus/text_stream";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string data{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    EXPECT_EQ(disagreement(text_stream_model::read_case(data)), "") << entry.path();
    ++files;
  }
  EXPECT_GT(files, 0);
}

// A million near misses: a stream that searched again what it held would take minutes.
TEST(TextStream, LongAnswersTakeLinearTime) {
  const std::string stop = std::string(2000, 'a') + "b";
  TextStream stream({stop, "世界"});
  size_t bytes = 0;
  for (int i = 0; i < 1000000; ++i) bytes += stream.push("a").size();
  EXPECT_EQ(bytes + stream.finish().size(), 1000000u);
}

}  // namespace
}  // namespace weir
