#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace weir {

// The whole of a regular file of at most `bytes_max` bytes. Errors name the path.
absl::StatusOr<std::string> read_text_file(const std::string& path, size_t bytes_max);

// A JSON document that nobody vouches for: the errors of the grammar, a key that an object has
// twice, and nesting deeper than a configuration ever needs are refused, naming `path`. The bare
// words NaN, Infinity and -Infinity, which Python writes, become strings of that text.
absl::StatusOr<nlohmann::json> parse_json(std::string_view text, const std::string& path);

// What kind of value it is and, when short, the value itself: `the string "x"`, `null`, `3`.
std::string describe(const nlohmann::json& value);

}  // namespace weir
