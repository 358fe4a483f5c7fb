#include "clients/text_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace weir {

std::optional<std::string> read_text(const std::string& path, std::string* error) {
  const bool standard_input = path == "-";
  std::FILE* file = standard_input ? stdin : std::fopen(path.c_str(), "rb");
  if (file == nullptr) {
    *error = "cannot open " + path + ": " + std::strerror(errno);
    return std::nullopt;
  }
  std::string text;
  char buffer[1 << 16];
  size_t count = 0;
  while ((count = std::fread(buffer, 1, sizeof buffer, file)) > 0) text.append(buffer, count);
  const bool failed = std::ferror(file) != 0;
  if (failed) {
    *error = "cannot read " + (standard_input ? "standard input" : path) + ": " +
             std::strerror(errno);
  }
  if (!standard_input) std::fclose(file);
  if (failed) return std::nullopt;
  return text;
}

}  // namespace weir
