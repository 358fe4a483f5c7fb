// The Python example against the real server.
#include <gtest/gtest.h>

#include "tests/serve/client.h"
#include "tests/unit/temporary_folder.h"

namespace weir::testing {
namespace {

constexpr char kPython[] = "/usr/bin/python3";  // the one that Debian's python3-grpcio belongs to

TEST(PythonClient, AskStreamsAnAnswer) {
  Process probe({"/usr/bin/env", kPython, "-c", "import grpc, google.protobuf"});
  if (probe.wait_exit() != 0) GTEST_SKIP() << "python3-grpcio or python3-protobuf is missing";

  const test::TemporaryFolder folder;
  Process generate({WEIR_SOURCE_DIR "/clients/python/generate.sh", folder.path()});
  ASSERT_EQ(generate.wait_exit(), 0) << generate.output();

  TestServer server(vectors("gated-deltanet"));
  ASSERT_TRUE(server.serving()) << server.output();
  const std::string path = "PYTHONPATH=" + folder.path();
  const auto ask = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> command = {"/usr/bin/env", path, kPython,
                                        WEIR_SOURCE_DIR "/clients/python/ask.py",
                                        "--server", server.address()};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return std::make_unique<Process>(command);
  };

  const auto good = ask({"In the beginning", "--max-tokens", "12", "--temperature", "0"});
  EXPECT_EQ(good->wait_exit(), 0) << good->output();
  v1::GenerateRequest request;
  request.set_prompt("In the beginning");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(12);
  const std::string expected = Client(server).generate(request).text;
  EXPECT_NE(good->output().find(expected), std::string::npos) << good->output();

  const auto refused = ask({"In the beginning", "--temperature", "-1"});
  EXPECT_EQ(refused->wait_exit(), 1);
  EXPECT_NE(refused->output().find("INVALID_ARGUMENT: "), std::string::npos) << refused->output();
  EXPECT_EQ(refused->output().find("Traceback"), std::string::npos) << refused->output();

  const std::vector<std::vector<std::string>> mistakes = {
      {"--max-tokens", "-1"}, {"--max-tokens", "5000000000"}, {"--max-tokens", "many"},
      {"--seed", "-1"},       {"--seed", "1e3"},              {"--temperature", "nan"},
      {"--temperature", "1e99"}, {"--timeout", "nan"},        {"--timeout", "-1"},
      {"--stop", "\xff"}};
  for (std::vector<std::string> arguments : mistakes) {
    arguments.insert(arguments.begin(), "In the beginning");
    const auto wrong = ask(arguments);
    EXPECT_EQ(wrong->wait_exit(), 2) << arguments[1] << " " << arguments[2];
    EXPECT_NE(wrong->output().find("ask.py: error: "), std::string::npos) << wrong->output();
    EXPECT_EQ(wrong->output().find("Traceback"), std::string::npos) << wrong->output();
  }
}

}  // namespace
}  // namespace weir::testing
