#pragma once
#include <optional>
#include <string>

namespace weir {

// All of a file, or of standard input for "-". Empty when it cannot be read: `error` then says why.
std::optional<std::string> read_text(const std::string& path, std::string* error);

}  // namespace weir
