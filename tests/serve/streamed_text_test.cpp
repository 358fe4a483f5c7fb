// The text of a stream: characters that span tokens, and stop strings.
#include <gtest/gtest.h>

#include "engine/text_stream.h"
#include "tests/serve/client.h"

namespace weir::testing {
namespace {

// The ids of the tokens that are single bytes, by the names the vocabulary gives them.
Ids byte_ids(const Client& client, const std::string& text) {
  Ids ids;
  for (const v1::TokenPiece& token : client.tokenize(text)) {
    if (token.piece().size() == 6 && token.piece().starts_with("<0x")) ids.push_back(token.id());
  }
  return ids;
}

// Draws only among these tokens.
v1::GenerateRequest only(const Ids& allowed, uint32_t tokens, uint64_t seed) {
  v1::GenerateRequest request = sampled({7, 8, 9}, tokens, seed);
  for (const int32_t id : allowed) (*request.mutable_sampling()->mutable_logit_bias())[id] = 1000;
  return request;
}

void expect_whole_text(const Client& client, const Answer& answer, const std::string& what) {
  ASSERT_TRUE(answer.status.ok()) << what << ": " << answer.status.error_message();
  EXPECT_TRUE(is_utf8(answer.text)) << what;
  // The tokens at the end are single bytes here, so as many tokens as bytes are unfinished.
  const size_t unfinished = answer.last.unfinished_bytes();
  ASSERT_LE(unfinished, 3u) << what;
  ASSERT_LE(unfinished, answer.ids.size()) << what;
  const Ids finished(answer.ids.begin(),
                     answer.ids.end() - static_cast<std::ptrdiff_t>(unfinished));
  EXPECT_EQ(answer.text, client.detokenize(finished)) << what;
}

TEST(Case12, LettersThatSpanTokens) {
  TestServer server(demo_model());
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const std::string family = "👩‍👩‍👧", chinese = "漢字", umlaut = "ü";
  int unfinished = 0, replaced = 0, characters = 0;
  for (const std::string& alphabet : {umlaut, chinese, family, umlaut + chinese + family}) {
    const Ids bytes = byte_ids(client, alphabet);
    ASSERT_GE(bytes.size(), 2u) << alphabet << " is not spelt in bytes";
    for (uint64_t seed = 0; seed < 12; ++seed) {
      const std::string what = alphabet + ", seed " + std::to_string(seed);
      const Answer answer = client.generate(only(bytes, 20 + static_cast<uint32_t>(seed), seed));
      expect_whole_text(client, answer, what);
      unfinished += answer.last.unfinished_bytes() > 0;
      replaced += answer.text.find("\xef\xbf\xbd") != std::string::npos;
      characters += answer.text.find(umlaut) != std::string::npos;
    }
  }
  EXPECT_GT(unfinished, 0) << "no answer ended inside a character: the test shows nothing";
  EXPECT_GT(replaced, 0) << "no answer had a wrong byte: the test shows nothing";
  EXPECT_GT(characters, 0) << "no answer had a character of two bytes: the test shows nothing";
}

// One byte of a character and then the end: the tail is reported, not invented.
TEST(Case12, UnfinishedTail) {
  TestServer server(demo_model());
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const Ids bytes = byte_ids(client, "😀");
  ASSERT_EQ(bytes.size(), 4u);
  const Answer one = client.generate(only({bytes[0]}, 1, 1));
  EXPECT_EQ(one.text, "");
  EXPECT_EQ(one.last.unfinished_bytes(), 1u);
  const Answer two = client.generate(only({bytes[0]}, 2, 1));
  EXPECT_EQ(two.text, "\xef\xbf\xbd") << "the first can never be finished, the second may";
  EXPECT_EQ(two.last.unfinished_bytes(), 1u);
}

TEST(Case12, EchoAndRoundTrip) {
  TestServer server(demo_model());
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const std::string text = "Ünï 漢字 👩‍👩‍👧‍👦 \t two  spaces\n";
  Ids ids;
  for (const v1::TokenPiece& token : client.tokenize(text)) ids.push_back(token.id());
  EXPECT_EQ(client.detokenize(ids), text);
  for (const uint32_t chunk : {1u, 1024u}) {
    v1::GenerateRequest request = greedy({}, 12);
    request.set_prompt(text);
    request.mutable_output()->set_echo(true);
    request.mutable_output()->set_stream_chunk_tokens(chunk);
    const Answer answer = client.generate(request);
    EXPECT_TRUE(answer.text.starts_with(text)) << answer.text;
    EXPECT_TRUE(is_utf8(answer.text));
  }
}

class Case13 : public ::testing::Test {
 protected:
  Case13() : server_(demo_model()), client_(server_) {
    request_.set_prompt("And it came to pass, that the king");
    request_.mutable_sampling()->set_temperature(0);
    request_.mutable_stop()->set_max_tokens(60);
    request_.mutable_stop()->set_ignore_eos(true);
    whole_ = client_.generate(request_).text;
  }
  void SetUp() override {
    ASSERT_TRUE(server_.serving()) << server_.output();
    ASSERT_GT(whole_.size(), 80u) << whole_;
  }

  // Streamed and in one message: they must agree.
  Answer stopped_by(const std::vector<std::string>& stops, bool include = false) {
    v1::GenerateRequest request = request_;
    for (const std::string& stop : stops) request.mutable_stop()->add_strings(stop);
    request.mutable_stop()->set_include_stop(include);
    const Answer streamed = client_.generate(request);
    request.mutable_output()->set_stream_chunk_tokens(1024);
    const Answer at_once = client_.generate(request);
    EXPECT_EQ(streamed.text, at_once.text);
    EXPECT_EQ(streamed.reason(), at_once.reason());
    EXPECT_EQ(streamed.last.matched_stop(), at_once.last.matched_stop());
    EXPECT_TRUE(streamed.status.ok()) << streamed.status.error_message();
    return streamed;
  }

  TestServer server_;
  Client client_;
  v1::GenerateRequest request_;
  std::string whole_;  // the answer with no stop string
};

// Wherever it begins, and over however many tokens it goes, nothing of it reaches the client.
TEST_F(Case13, StopStringAnywhere) {
  for (size_t at = 3; at + 12 < 80; at += 5) {
    const std::string stop = whole_.substr(at, 9);
    if (!is_utf8(stop)) continue;
    const Answer answer = stopped_by({stop});
    EXPECT_EQ(answer.reason(), v1::FINISH_REASON_STOP_STRING) << stop;
    EXPECT_EQ(answer.text, whole_.substr(0, whole_.find(stop))) << stop;
    EXPECT_EQ(answer.last.matched_stop(), stop);
  }
}

TEST_F(Case13, OneStopBeginsAnother) {
  const std::string longer = whole_.substr(30, 11), shorter = longer.substr(0, 5);
  for (const auto& stops : {std::vector{longer, shorter}, std::vector{shorter, longer}}) {
    const Answer answer = stopped_by(stops);
    EXPECT_EQ(answer.last.matched_stop(), shorter);
    EXPECT_EQ(answer.text, whole_.substr(0, whole_.find(shorter)));
  }
}

TEST_F(Case13, NearMissArrivesWhole) {
  std::vector<std::string> misses;
  for (size_t at = 5; at < 70; at += 6) misses.push_back(whole_.substr(at, 8) + "\x01");
  const Answer answer = stopped_by(misses);
  EXPECT_EQ(answer.text, whole_);
  EXPECT_EQ(answer.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(answer.last.matched_stop(), "");
}

// What is held back because it may become a stop is given out when generation ends.
TEST_F(Case13, HeldBackTailIsFlushed) {
  const Answer answer = stopped_by({whole_.substr(whole_.size() - 10) + "\x01"});
  EXPECT_EQ(answer.text, whole_);
  EXPECT_EQ(answer.reason(), v1::FINISH_REASON_LENGTH);
}

TEST_F(Case13, StopAtTheVeryEnd) {
  const std::string stop = whole_.substr(whole_.size() - 8);
  if (whole_.find(stop) != whole_.size() - 8) GTEST_SKIP() << "the answer repeats its end";
  const Answer answer = stopped_by({stop});
  EXPECT_EQ(answer.text, whole_.substr(0, whole_.size() - 8));
  EXPECT_EQ(answer.reason(), v1::FINISH_REASON_STOP_STRING);
}

TEST_F(Case13, IncludeStop) {
  const std::string stop = whole_.substr(40, 7);
  const Answer answer = stopped_by({stop}, true);
  EXPECT_EQ(answer.text, whole_.substr(0, whole_.find(stop) + stop.size()));
  EXPECT_EQ(answer.last.matched_stop(), stop);
}

}  // namespace
}  // namespace weir::testing
