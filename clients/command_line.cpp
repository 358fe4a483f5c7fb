#include "clients/command_line.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "absl/flags/reflection.h"

namespace weir {

namespace {

std::vector<absl::CommandLineFlag*> own_flags() {
  std::vector<absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    // Libraries may define flags too; a user of this program cares for ours.
    if (flag->Filename().find("clients/") != std::string::npos) flags.push_back(flag);
  }
  std::sort(flags.begin(), flags.end(),
            [](const auto* a, const auto* b) { return a->Name() < b->Name(); });
  return flags;
}

absl::CommandLineFlag* find_flag(const std::string& name) {
  for (absl::CommandLineFlag* flag : own_flags()) {
    if (flag->Name() == name) return flag;
  }
  return nullptr;
}

[[noreturn]] void print_help(const std::string& usage) {
  std::printf("%s\nFlags:\n", usage.c_str());
  for (const absl::CommandLineFlag* flag : own_flags()) {
    std::printf("  --%-20s %s", std::string(flag->Name()).c_str(), flag->Help().c_str());
    const std::string standard = flag->DefaultValue();
    if (!standard.empty()) std::printf(" (default: %s)", standard.c_str());
    std::printf("\n");
  }
  std::exit(0);
}

struct NamedValue {
  std::string name;
  absl::CommandLineFlag* flag = nullptr;
  bool has_value = false;
  std::string value;
};

// "--name", "--name=value" or "--noname", with one dash or two.
NamedValue split_flag(const std::string& argument) {
  NamedValue out;
  const size_t begin = argument.starts_with("--") ? 2 : 1;
  const size_t equals = argument.find('=');
  out.has_value = equals != std::string::npos;
  out.name = argument.substr(begin, out.has_value ? equals - begin : std::string::npos);
  if (out.has_value) out.value = argument.substr(equals + 1);
  std::replace(out.name.begin(), out.name.end(), '-', '_');
  out.flag = find_flag(out.name);
  if (out.flag == nullptr && out.name.starts_with("no") && !out.has_value) {
    absl::CommandLineFlag* negated = find_flag(out.name.substr(2));
    if (negated != nullptr && negated->IsOfType<bool>()) {
      return {.name = out.name.substr(2), .flag = negated, .has_value = true, .value = "false"};
    }
  }
  return out;
}

}  // namespace

void exit_usage(const std::string& message) {
  std::fprintf(stderr, "%s: %s (--help lists the flags)\n", program_invocation_short_name,
               message.c_str());
  std::exit(2);
}

CommandLine parse_command_line(int argc, char** argv, const std::string& usage) {
  CommandLine out;
  bool flags_over = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (flags_over || argument == "-" || !argument.starts_with("-")) {
      out.positional.push_back(argument);
      continue;
    }
    if (argument == "--") {
      flags_over = true;
      continue;
    }
    if (argument == "--help" || argument == "-help" || argument == "-h") print_help(usage);
    NamedValue given = split_flag(argument);
    if (given.flag == nullptr) exit_usage("there is no flag --" + given.name);
    if (!given.has_value && given.flag->IsOfType<bool>()) {
      given.value = "true";
    } else if (!given.has_value) {
      if (i + 1 == argc) exit_usage("flag --" + given.name + " needs a value");
      given.value = argv[++i];
    }
    std::string error;
    if (!given.flag->ParseFrom(given.value, &error)) {
      exit_usage("flag --" + given.name + ": '" + given.value +
                 "' does not fit: " + given.flag->Help());
    }
    out.values[given.name].push_back(given.value);
  }
  return out;
}

}  // namespace weir
