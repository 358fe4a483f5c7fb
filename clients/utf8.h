#pragma once
#include <cstddef>
#include <string_view>

namespace weir {

// Where the first byte stands that does not belong to valid UTF-8; text.size() when all does.
// protobuf would send such text with a complaint on stderr, and the server would refuse it.
size_t valid_utf8_prefix(std::string_view text);

}  // namespace weir
