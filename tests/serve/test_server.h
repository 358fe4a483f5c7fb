#pragma once
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/serve/server_process.h"

namespace weir::testing {

// The real weir-server, ready to serve unless it refused to start. One that crashed, that does not
// end when asked to, or that a sanitizer complained about fails the test that used it.
class TestServer {
 public:
  explicit TestServer(const std::string& model, const std::vector<std::string>& flags = {})
      : server_(model, flags) {}
  ~TestServer() {
    if (!serving()) return;
    if (running()) {
      signal(SIGTERM);
      signal(SIGINT);  // whatever still runs is of no interest
    }
    const int code = wait_exit().value_or(-1);
    const std::string text = output();
    EXPECT_TRUE(code == 0 || code == 1 || code == 128 + SIGTERM) << "exit " << code << ": " << text;
    EXPECT_EQ(text.find("Sanitizer"), std::string::npos) << text;
    EXPECT_EQ(text.find("runtime error"), std::string::npos) << text;
  }
  TestServer(const TestServer&) = delete;
  TestServer& operator=(const TestServer&) = delete;

  bool serving() const { return server_.serving(); }
  const std::string& address() const { return server_.address(); }
  const std::string& metrics_address() const { return server_.metrics_address(); }
  std::string output() const { return server_.output(); }

  void signal(int number) { server_.process().signal(number); }
  bool running() { return !server_.process().exited(); }
  std::optional<int> wait_exit() { return server_.process().wait_exit(); }

 private:
  ServerProcess server_;
};

}  // namespace weir::testing
