#include <cstdint>
#include <string>

#include "engine/safetensors.h"
#include "kernels/check.h"

// Any bytes as a safetensors file: refused, or tensors that lie inside the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = "fuzz";
  const std::span<const std::byte> file = std::as_bytes(std::span(data, size));
  const auto tensors = weir::parse_safetensors(file, path);
  if (!tensors.ok()) {
    WEIR_CHECK(!tensors.status().message().empty());
    return 0;
  }
  size_t sum = 0;
  for (const auto& [name, tensor] : *tensors) {
    WEIR_CHECK(size_t(tensor.elements()) * size_of(tensor.type) == tensor.data.size());
    if (!tensor.data.empty()) {
      WEIR_CHECK(tensor.data.data() >= file.data());
      WEIR_CHECK(tensor.data.data() + tensor.data.size() <= file.data() + file.size());
    }
    sum += tensor.data.size();
  }
  WEIR_CHECK(sum <= size);
  return 0;
}
