#pragma once
#include <map>
#include <string>
#include <vector>

namespace weir {

// A parsed command line. The flags themselves are ABSL_FLAGs of the program; what absl's own parser
// cannot give is exit code 2 for wrong usage and flags that may be repeated.
struct CommandLine {
  std::vector<std::string> positional;
  std::map<std::string, std::vector<std::string>> values;  // every value given, by flag, in order
};

// Sets the program's flags. `--help` prints `usage` and the flags and exits with 0; anything wrong
// prints one line and exits with 2. `--` ends the flags; a lone `-` is an argument.
CommandLine parse_command_line(int argc, char** argv, const std::string& usage);

// Prints "PROGRAM: message" to stderr and exits with 2.
[[noreturn]] void exit_usage(const std::string& message);

}  // namespace weir
