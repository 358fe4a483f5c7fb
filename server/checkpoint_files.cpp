#include "server/checkpoint_files.h"

#include <filesystem>
#include <system_error>

namespace weir {

namespace fs = std::filesystem;

size_t weight_file_bytes(const std::string& folder) {
  size_t sum = 0;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename();
    const bool weights = name.rfind("model", 0) == 0 && at->path().extension() == ".safetensors";
    std::error_code no_size;
    const auto bytes = weights ? at->file_size(no_size) : 0;
    if (!no_size) sum += size_t(bytes);
  }
  return sum;
}

std::string folder_name(const std::string& folder) {
  std::error_code error;
  const fs::path whole = fs::weakly_canonical(folder, error);
  return error ? folder : whole.filename().string();
}

}  // namespace weir
