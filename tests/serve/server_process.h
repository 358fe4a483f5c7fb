#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

// A weir-server of its own: started by a test, on free loopback ports, ended by its process id.
//
//   ServerProcess server({WEIR_SOURCE_DIR "/models/demo", "--slots=4"});
//   ASSERT_TRUE(server.wait_ready()) << server.errors();
//   auto channel = grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials());
class ServerProcess {
 public:
  // Adds --port=0 and --metrics_port=0, which later arguments may override.
  explicit ServerProcess(const std::vector<std::string>& arguments) {
    int out[2];
    if (pipe2(out, O_CLOEXEC) != 0) std::abort();
    char path[] = "/tmp/weir-server-stderr-XXXXXX";
    const int errors = mkostemp(path, O_CLOEXEC);
    if (errors < 0) std::abort();
    errors_path_ = path;
    std::vector<std::string> words = {WEIR_BINARY_DIR "/bin/weir-server", "--port=0",
                                      "--metrics_port=0"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(out[1], STDOUT_FILENO);
      dup2(errors, STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(out[1]);
    close(errors);
    out_ = out[0];
  }

  ~ServerProcess() {
    if (pid_ > 0 && !exit_code_) {
      kill(pid_, SIGKILL);
      wait_exit(std::chrono::seconds(10));
    }
    close(out_);
    unlink(errors_path_.c_str());
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // Reads the line that says it serves. False when the process ended, or on time-out.
  bool wait_ready(std::chrono::seconds at_most = std::chrono::seconds(120)) {
    fcntl(out_, F_SETFL, O_NONBLOCK);
    const auto until = std::chrono::steady_clock::now() + at_most;
    while (line_.find('\n') == std::string::npos) {
      char text[256];
      const ssize_t count = read(out_, text, sizeof text);
      if (count == 0 || std::chrono::steady_clock::now() > until) return false;
      if (count > 0) {
        line_.append(text, size_t(count));
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    const std::string metrics = ", metrics on ", on = " on ";
    const size_t end = line_.find('\n'), comma = line_.rfind(metrics, end);
    const size_t at = line_.rfind(on, comma - 1);
    if (comma == std::string::npos || at == std::string::npos) return false;
    address_ = line_.substr(at + on.size(), comma - at - on.size());
    metrics_address_ = line_.substr(comma + metrics.size(), end - comma - metrics.size());
    return !address_.empty() && !metrics_address_.empty();
  }

  const std::string& address() const { return address_; }                  // HOST:PORT
  const std::string& metrics_address() const { return metrics_address_; }  // HOST:PORT
  // `weir-server: serving MODEL on HOST:PORT, metrics on HOST:PORT`, and what else is on stdout.
  const std::string& output() const { return line_; }
  pid_t pid() const { return pid_; }

  // All that it wrote to stderr so far.
  std::string errors() const {
    std::string text;
    if (FILE* file = std::fopen(errors_path_.c_str(), "re")) {
      char part[4096];
      for (size_t count; (count = std::fread(part, 1, sizeof part, file)) > 0;) {
        text.append(part, count);
      }
      std::fclose(file);
    }
    return text;
  }

  void signal(int number) const { kill(pid_, number); }
  // The exit code; 128 + the signal that ended it; nothing when it still runs after `at_most`.
  std::optional<int> wait_exit(std::chrono::milliseconds at_most = std::chrono::seconds(60)) {
    const auto until = std::chrono::steady_clock::now() + at_most;
    while (!exit_code_) {
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      } else if (std::chrono::steady_clock::now() > until) {
        return std::nullopt;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    return exit_code_;
  }
  // SIGTERM, then the exit code.
  std::optional<int> stop() {
    signal(SIGTERM);
    return wait_exit();
  }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
  std::string errors_path_;
  std::string line_, address_, metrics_address_;
  std::optional<int> exit_code_;
};
