#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "clients/convert/served_model.h"

namespace weir {

// Writes the tensors into a new safetensors file, those of four bytes an element first so that all
// are aligned, and sees it onto the disk. Holds some MiB of them in memory at a time.
absl::Status write_safetensors(const std::string& path, const std::vector<ServedTensor>& tensors);

// Writes a new file and sees it onto the disk.
absl::Status write_new_file(const std::string& path, const std::string& text);

}  // namespace weir
