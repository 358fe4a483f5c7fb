#pragma once
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/safetensors.h"

namespace weir {

// 32 hexadecimal digits of the text of config.json and of every tensor's name, dtype, shape and
// data: equal for equal models, however the weights are cut into files. Reads all weights once.
// Tells models apart that were mixed up by mistake; it is no defence against a forger.
std::string fingerprint(std::string_view config, const Safetensors& files);

// With FOLDER/config.json.
absl::StatusOr<std::string> fingerprint_folder(const std::string& folder,
                                               const Safetensors& files);

}  // namespace weir
