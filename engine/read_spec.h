#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/spec.h"

namespace weir {

// A config.json to a ModelSpec. Refuses, naming the key, what was found and what is served:
// an unknown model_type, a value of the wrong kind or out of range, and any key that would change
// the mathematics in a way that is not served. Keys that never change inference are ignored.
// `unread`, when given, gets the keys that nobody asked for: see unread_keys.h.
// `json` may hold the bare words Infinity and NaN, as Python writes them. `path` is for messages.
absl::StatusOr<ModelSpec> read_spec(std::string_view json, const std::string& path,
                                    std::vector<std::string>* unread = nullptr);

// FOLDER/config.json.
absl::StatusOr<ModelSpec> read_spec_folder(const std::string& folder,
                                           std::vector<std::string>* unread = nullptr);

}  // namespace weir
