#pragma once
#include <cstddef>
#include <string>

namespace weir {

// Bytes of FOLDER's model*.safetensors, before any is opened; 0 when there are none.
size_t weight_file_bytes(const std::string& folder);
// The last part of a folder's path, as a name.
std::string folder_name(const std::string& folder);

}  // namespace weir
