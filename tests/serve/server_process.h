#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "clients/health.h"

namespace weir::testing {

// Asks again and again until it holds; false when it does not within `at_most_s`.
inline bool eventually(const std::function<bool()>& holds, double at_most_s = 120) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(at_most_s);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// A program with its stdout and stderr, as one text, captured while it runs. Killed, by its
// process id, if it still runs at the end.
class Process {
 public:
  explicit Process(std::vector<std::string> command) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    std::vector<char*> argv;
    for (std::string& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      const int nothing = open("/dev/null", O_RDONLY);
      dup2(nothing, STDIN_FILENO);
      dup2(ends[1], STDOUT_FILENO);
      dup2(ends[1], STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(ends[1]);
    reader_ = std::thread([this, from = ends[0]] { read_all(from); });
  }
  ~Process() {
    if (!exited()) {
      kill(pid_, SIGKILL);
      wait_exit();
    }
    reader_.join();
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void signal(int number) const { kill(pid_, number); }
  bool exited() { return wait_exit(0).has_value(); }
  // The exit code, or 128 + the signal that ended it; nothing when it still runs. All output of a
  // program that has ended is there afterwards.
  std::optional<int> wait_exit(double at_most_s = 300) {
    if (code_) return code_;
    const auto ended = [this] {
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      return true;
    };
    if (eventually(ended, at_most_s)) eventually([this] { return closed(); }, 5);
    return code_;
  }
  std::string output() const {
    const std::lock_guard lock(mutex_);
    return output_;
  }

 private:
  void read_all(int from) {
    char part[4096];
    for (ssize_t count; (count = read(from, part, sizeof part)) > 0;) {
      const std::lock_guard lock(mutex_);
      output_.append(part, static_cast<size_t>(count));
    }
    close(from);
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  bool closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
  }

  pid_t pid_ = -1;
  std::optional<int> code_;
  mutable std::mutex mutex_;
  std::string output_;   // guarded, as is closed_
  bool closed_ = false;
  std::thread reader_;
};

inline std::string vectors(const std::string& name) {
  return std::string(WEIR_SOURCE_DIR "/tests/vectors/") + name;
}
inline std::string demo_model() { return WEIR_SOURCE_DIR "/models/demo"; }

// A weir-server on free loopback ports. The constructor waits until it serves or has ended:
//
//   ServerProcess server(vectors("kda"), {"--slots=4"});
//   ASSERT_TRUE(server.serving()) << server.output();
class ServerProcess {
 public:
  explicit ServerProcess(const std::string& model, const std::vector<std::string>& flags = {})
      : process_(command(model, flags)) {
    eventually([this] { return find_addresses() || process_.exited(); });
  }

  bool serving() const { return !address_.empty(); }
  const std::string& address() const { return address_; }                  // HOST:PORT
  const std::string& metrics_address() const { return metrics_address_; }  // HOST:PORT
  std::string output() const { return process_.output(); }
  Process& process() { return process_; }

 private:
  static std::vector<std::string> command(const std::string& model,
                                          const std::vector<std::string>& flags) {
    std::vector<std::string> words = {WEIR_BINARY_DIR "/bin/weir-server", model, "--port=0",
                                      "--metrics_port=0"};
    words.insert(words.end(), flags.begin(), flags.end());
    return words;
  }

  // Reads `weir-server: serving MODEL on HOST:PORT, metrics on HOST:PORT`.
  bool find_addresses() {
    const std::string text = process_.output(), metrics = ", metrics on ", on = " on ";
    const size_t begin = text.find("weir-server: serving ");
    if (begin == std::string::npos) return false;
    const size_t end = text.find('\n', begin), comma = text.find(metrics, begin);
    if (end == std::string::npos || comma == std::string::npos) return false;
    const size_t at = text.rfind(on, comma - 1) + on.size();
    const size_t metrics_at = comma + metrics.size();
    address_ = text.substr(at, comma - at);
    metrics_address_ = text.substr(metrics_at, end - metrics_at);
    return true;
  }

  Process process_;
  std::string address_, metrics_address_;
};

}  // namespace weir::testing
