// Flags about the device as a user meets them: a value that is wrong, or means nothing beside the
// others, must end the start with a line that names it, and not serve something else.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/backend.h"
#include "tests/serve/server_process.h"

namespace weir::testing {
namespace {

struct Refusal {
  int code = -1;
  std::string output;
};

Refusal run(std::vector<std::string> command) {
  Process process(std::move(command));
  const int code = process.wait_exit().value_or(-1);
  return {.code = code, .output = process.output()};
}

Refusal serve(const std::vector<std::string>& flags) {
  std::vector<std::string> command = {WEIR_BINARY_DIR "/bin/weir-server",
                                      vectors("gated-deltanet"), "--port=0", "--metrics_port=0"};
  command.insert(command.end(), flags.begin(), flags.end());
  return run(command);
}

Refusal verify(const std::vector<std::string>& flags) {
  std::vector<std::string> command = {WEIR_BINARY_DIR "/bin/weir-verify",
                                      vectors("gated-deltanet")};
  command.insert(command.end(), flags.begin(), flags.end());
  return run(command);
}

TEST(DeviceFlags, WrongValuesAreOneLine) {
  const auto wrong = [](const std::vector<std::string>& flags, const std::string& line) {
    const Refusal found = serve(flags);
    EXPECT_EQ(found.code, 2) << found.output;
    EXPECT_EQ(found.output, "weir-server: " + line + "\n");
  };
  wrong({"--vectors=fp8"}, "--vectors: expected split or bf16, found \"fp8\"");
  wrong({"--vectors", ""}, "--vectors: expected split or bf16, found \"\"");
  wrong({"--vectors=bf16"}, "--vectors: expected split on the device cpu, found bf16");
  wrong({"--vectors=bf16", "--device=cpu"},
        "--vectors: expected split on the device cpu, found bf16");
  wrong({"--vectors"}, "--vectors: no value");
  wrong({"--device=gpu"}, "--device: expected cpu, cuda or cuda:N, found \"gpu\"");
}

TEST(DeviceFlags, WhatTheCpuHasIsServed) {
  ServerProcess server(vectors("gated-deltanet"), {"--vectors=split", "--device=cpu"});
  EXPECT_TRUE(server.serving()) << server.output();
}

TEST(DeviceFlags, AMissingDeviceEndsTheStart) {
  const std::string name = "cuda:" + std::to_string(cuda_device_count());
  const Refusal found = serve({"--device=" + name, "--vectors=bf16"});
  EXPECT_EQ(found.code, 1) << found.output;
  EXPECT_EQ(found.output.rfind("weir-server: " + name + ": ", 0), 0u) << found.output;
  EXPECT_EQ(std::count(found.output.begin(), found.output.end(), '\n'), 1) << found.output;
}

TEST(DeviceFlags, VerifyRefusesTheSame) {
  for (const auto& [flags, line] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--vectors", "fp8"}, "vectors: expected split or bf16, found \"fp8\""},
           {{"--vectors", "bf16"}, "vectors: expected split on the device cpu, found bf16"},
           {{"--device", "gpu"}, "device: expected cpu, cuda or cuda:N, found \"gpu\""}}) {
    const Refusal found = verify(flags);
    EXPECT_EQ(found.code, 1) << found.output;
    EXPECT_EQ(found.output, "weir-verify: " + line + "\n");
  }
  EXPECT_EQ(verify({"--vectors"}).code, 2);
}

}  // namespace
}  // namespace weir::testing
