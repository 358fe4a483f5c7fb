// weir-ask and weir-load as a user starts them.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "clients/load_plan.h"
#include "clients/load_report.h"
#include "clients/text_file.h"
#include "clients/utf8.h"
#include "tests/serve/client.h"
#include "tests/unit/temporary_folder.h"

namespace weir::testing {
namespace {

const std::string kAsk = WEIR_BINARY_DIR "/bin/weir-ask", kLoad = WEIR_BINARY_DIR "/bin/weir-load";

struct Ran {
  int code = -1;
  std::string output;
};
Ran run(std::vector<std::string> command) {
  Process process(command);
  const int code = process.wait_exit().value_or(-1);
  return {.code = code, .output = process.output()};
}
Ran shell(const std::string& line) { return run({"/bin/bash", "-c", line}); }

bool contains(const Ran& ran, const std::string& text) {
  return ran.output.find(text) != std::string::npos;
}

TEST(Ask, AnswersLikeTheService) {
  TestServer server(vectors("gated-deltanet"));
  ASSERT_TRUE(server.serving()) << server.output();
  const std::string at = "--server=" + server.address();
  v1::GenerateRequest request;
  request.set_prompt("In the beginning");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(20);
  request.mutable_stop()->set_ignore_eos(true);
  const std::string expected = Client(server).generate(request).text;

  const std::string flags = " --temperature=0 --max_tokens 20 --ignore-eos " + at;
  EXPECT_EQ(run({kAsk, "In the beginning", "--temperature=0", "--max_tokens", "20", "--ignore-eos",
                 at}).output, expected);
  EXPECT_EQ(shell("echo 'In the beginning' | " + kAsk + flags).output, expected) << "from stdin";
  EXPECT_EQ(shell("printf 'In the beginning' >/tmp/weir-ask-$$; " + kAsk + flags +
                  " --file /tmp/weir-ask-$$; rm /tmp/weir-ask-$$").output, expected);
  EXPECT_EQ(shell(kAsk + " --echo 'In the beginning'" + flags).output,
            "In the beginning" + expected);
  const std::string one = expected.substr(4, 3), other = expected.substr(9, 4);
  const size_t end = std::min(expected.find(one), expected.find(other));
  EXPECT_EQ(run({kAsk, "In the beginning", "--temperature=0", "--max_tokens=20", at, "--stop", one,
                 "--stop", other}).output, expected.substr(0, end));

  const Ran all =
      shell(kAsk + " 'In the beginning' --stats --token_ids --logprobs --seed=9" + flags);
  EXPECT_EQ(all.code, 0) << all.output;
  for (const char* part : {"finish: LENGTH", "generated 20", "seed: 9", "token ids: ", "logprob"}) {
    EXPECT_TRUE(contains(all, part)) << part << ": " << all.output;
  }
}

TEST(Ask, MistakesAreOneLine) {
  const auto wrong = [](const std::vector<std::string>& arguments, int code, const char* part) {
    std::vector<std::string> command = {kAsk};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const Ran ran = run(command);
    EXPECT_EQ(ran.code, code) << ran.output;
    EXPECT_TRUE(contains(ran, part)) << ran.output;
    EXPECT_EQ(std::count(ran.output.begin(), ran.output.end(), '\n'), 1) << ran.output;
  };
  wrong({"--bogus", "x"}, 2, "--bogus");
  wrong({"--top_k=-1", "x"}, 2, "--top_k");
  wrong({"x", "--seed"}, 2, "--seed");
  wrong({"two", "prompts"}, 2, "one PROMPT");
  wrong({"--timeout_s=0", "x"}, 2, "--timeout_s");
  wrong({"--server=127.0.0.1:1", "x"}, 1, "UNAVAILABLE");
  wrong({"--file=/nowhere", "x"}, 2, "--file");
  wrong({"--file=/nowhere"}, 1, "/nowhere");
  wrong({"\xff"}, 1, "UTF-8");

  TestServer server(vectors("gated-deltanet"));
  ASSERT_TRUE(server.serving()) << server.output();
  wrong({"--temperature=-1", "x", "--server", server.address()}, 1,
        "INVALID_ARGUMENT: sampling.temperature");
}

// After a deadline there is no last message, but much to say of what came before.
TEST(Ask, StatsAfterADeadline) {
  TestServer server(vectors("gated-deltanet"), {"--max_new_tokens=1000000"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Ran ran = run({kAsk, "x", "--ignore_eos", "--max_tokens=1000000", "--stats", "--seed=9",
                       "--timeout_s=3", "--server=" + server.address()});
  EXPECT_EQ(ran.code, 1) << ran.output;
  for (const char* part : {"finish: none, DEADLINE_EXCEEDED", "tokens: received ", "seed: 9"}) {
    EXPECT_TRUE(contains(ran, part)) << part << ": " << ran.output;
  }
  EXPECT_FALSE(contains(ran, "received 0\n")) << ran.output;
}

TEST(Ask, CtrlCCancelsAndAClosedPipeToo) {
  TestServer server(vectors("gated-deltanet"), {"--slots=1", "--max_new_tokens=1000000"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const std::string endless = " x --ignore_eos --max_tokens=1000000 --server=" + server.address();
  const auto used = [&] { return client.metric("weir_state_slots", {"kind=\"used\""}); };

  Process interrupted({kAsk, "x", "--ignore_eos", "--max_tokens=1000000",
                       "--server=" + server.address()});
  EXPECT_TRUE(eventually([&] { return !interrupted.output().empty(); }));
  interrupted.signal(SIGINT);
  EXPECT_EQ(interrupted.wait_exit(), 130) << interrupted.output();
  EXPECT_TRUE(eventually([&] { return used() == 0; }));

  const Ran piped = shell(kAsk + endless + " | head -c 20 >/dev/null; exit ${PIPESTATUS[0]}");
  EXPECT_EQ(piped.code, 141) << piped.output;
  EXPECT_TRUE(eventually([&] { return used() == 0; }));
  EXPECT_EQ(client.metric("weir_requests_total", {"outcome=\"cancelled\""}), 2);
}

nlohmann::json load_report(const TestServer& server, std::vector<std::string> flags) {
  const test::TemporaryFolder folder;
  const std::string path = folder.file("report.json");
  flags.insert(flags.begin(), {kLoad, "--server", server.address(), "--json", path});
  const Ran ran = run(flags);
  EXPECT_EQ(ran.code, 0) << ran.output;
  std::string error;
  const std::string text = read_text(path, &error).value_or("");
  return nlohmann::json::parse(text, nullptr, false);
}

// What the client counted is what the server counted.
TEST(Load, ReportsWhatHappened) {
  TestServer server(vectors("gated-deltanet"), {"--slots=4"});
  ASSERT_TRUE(server.serving()) << server.output();
  const Client client(server);
  const double before = client.metric("weir_generated_tokens_total");
  const nlohmann::json closed = load_report(
      server, {"--requests=40", "--concurrency=8", "--prompt_tokens=uniform:4:30",
               "--answer_tokens=lognormal:10:0.5", "--channels=2"});
  EXPECT_EQ(closed["requests"]["started"], 40);
  EXPECT_EQ(closed["requests"]["ok"], 40);
  EXPECT_TRUE(closed["errors"].empty());
  EXPECT_EQ(closed["latency_seconds"]["time_to_first_token"]["count"], 40);
  EXPECT_EQ(closed["latency_seconds"]["end_to_end"]["count"], 40);
  EXPECT_EQ(closed["tokens"]["generated"], client.metric("weir_generated_tokens_total") - before);

  const nlohmann::json open = load_report(
      server, {"--rate=100", "--requests=30", "--prompt_kind=ids", "--prompt_tokens=8",
               "--answer_tokens=8", "--stream_chunk_tokens=4"});
  EXPECT_EQ(open["requests"]["ok"], 30);
  EXPECT_EQ(open["tokens"]["prompt"], 240);
  EXPECT_EQ(open["tokens"]["generated"], 240);
}

TEST(Load, ErrorsAreCountedByCode) {
  TestServer server(vectors("gated-deltanet"), {"--slots=1", "--queue=0"});
  ASSERT_TRUE(server.serving()) << server.output();
  const nlohmann::json report =
      load_report(server, {"--requests=30", "--concurrency=10", "--answer_tokens=200"});
  EXPECT_GT(report["errors"]["RESOURCE_EXHAUSTED"]["count"], 0);
  EXPECT_EQ(report["requests"]["ok"].get<int>() +
                report["errors"]["RESOURCE_EXHAUSTED"]["count"].get<int>(), 30);
}

// Before any call, not after the load was put on for nothing.
TEST(Load, SaysWhatItCannotDoFirst) {
  const Ran unwritable = run({kLoad, "--server=127.0.0.1:1", "--json=/nowhere/report.json"});
  EXPECT_EQ(unwritable.code, 1) << unwritable.output;
  EXPECT_TRUE(contains(unwritable, "--json: cannot write /nowhere/report.json"))
      << unwritable.output;

  TestServer server(vectors("gated-deltanet"), {"--max_prompt_tokens=100", "--max_new_tokens=50"});
  ASSERT_TRUE(server.serving()) << server.output();
  const auto load = [&](const std::string& flag) {
    return run({kLoad, "--server", server.address(), "--requests=2", flag});
  };
  const Ran prompt = load("--prompt_tokens=101");
  EXPECT_EQ(prompt.code, 2) << prompt.output;
  EXPECT_TRUE(contains(prompt, "flag --prompt_tokens: expected at most 84, what this server takes, "
                               "found '101'")) << prompt.output;
  const Ran answer = load("--answer_tokens=uniform:1:51");
  EXPECT_EQ(answer.code, 2) << answer.output;
  EXPECT_TRUE(contains(answer, "flag --answer_tokens: expected at most 50")) << answer.output;
  const Ran tail = load("--answer_tokens=lognormal:20:0.5");
  EXPECT_EQ(tail.code, 0) << tail.output;
  EXPECT_TRUE(contains(tail, "--answer_tokens: longer ones are cut to 50 tokens")) << tail.output;
}

TEST(LoadPlan, Lengths) {
  std::mt19937_64 random(1);
  const auto draw = [&](const char* text) {
    return draw_length(*parse_length(text), 1000, random);
  };
  EXPECT_EQ(draw("64"), 64);
  EXPECT_EQ(draw("fixed:2000"), 1000) << "cut to the limit";
  EXPECT_EQ(longest_length(*parse_length("64")), 64);
  EXPECT_EQ(longest_length(*parse_length("uniform:3:5")), 5);
  EXPECT_EQ(longest_length(*parse_length("lognormal:100:0.5")), 2008);  // 100·e^3
  EXPECT_EQ(longest_length(*parse_length("lognormal:100:9")), 1'000'000'000'000);
  for (int i = 0; i < 100; ++i) {
    const int64_t length = draw("uniform:3:5");
    EXPECT_TRUE(length >= 3 && length <= 5) << length;
    EXPECT_GE(draw("lognormal:1:3"), 1);
  }
  for (const char* wrong : {"", "0", "-3", "x", "fixed", "uniform:5:3", "uniform:0:3", "uniform:1",
                            "lognormal:0:1", "lognormal:5:nan", "5:6", "fixed:1:2"}) {
    EXPECT_FALSE(parse_length(wrong).has_value()) << wrong;
  }
}

TEST(LatencyHistogram, QuantilesWithinOnePercent) {
  LatencyHistogram histogram;
  EXPECT_EQ(histogram.quantile(0.5), 0);
  for (int i = 1; i <= 1000; ++i) histogram.add(i * 1e-3);
  EXPECT_NEAR(histogram.quantile(0.5), 0.5, 0.005);
  EXPECT_NEAR(histogram.quantile(0.99), 0.99, 0.01);
  EXPECT_DOUBLE_EQ(histogram.max(), 1.0);
  EXPECT_DOUBLE_EQ(histogram.quantile(1), 1.0);
  EXPECT_NEAR(histogram.mean(), 0.5005, 1e-9);
}

TEST(Utf8, FirstWrongByte) {
  EXPECT_EQ(valid_utf8_prefix("plain ü 漢 👩"), std::string("plain ü 漢 👩").size());
  for (const char* wrong : {"ab\x80", "ab\xc0\x80", "ab\xed\xa0\x80", "ab\xf4\x90\x80\x80",
                            "ab\xe4\xbd", "ab\xf0\x9f\x98"}) {
    EXPECT_EQ(valid_utf8_prefix(wrong), 2u) << wrong;
  }
}

}  // namespace
}  // namespace weir::testing
