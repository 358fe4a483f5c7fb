#include "engine/fingerprint.h"

#define XXH_INLINE_ALL  // the header alone; nothing to link
#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "engine/json.h"

namespace weir {
namespace {

constexpr size_t kConfigBytesMax = 16 << 20;

// Parts of known length cannot be shifted into one another: each is preceded by its own.
class Hash {
 public:
  Hash() { XXH3_128bits_reset(&state_); }

  void number(uint64_t value) { XXH3_128bits_update(&state_, &value, sizeof value); }
  void bytes(const void* data, size_t size) {
    number(size);
    XXH3_128bits_update(&state_, data, size);
  }
  std::string digits() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return absl::StrCat(absl::Hex(hash.high64, absl::kZeroPad16),
                        absl::Hex(hash.low64, absl::kZeroPad16));
  }

 private:
  XXH3_state_t state_;
};

}  // namespace

std::string fingerprint(std::string_view config, const Safetensors& files) {
  Hash hash;
  hash.bytes(config.data(), config.size());
  for (const auto& [name, tensor] : files.tensors()) {
    hash.bytes(name.data(), name.size());
    hash.number(uint64_t(tensor.type));
    hash.bytes(tensor.shape.data(), tensor.shape.size() * sizeof(int64_t));
    hash.bytes(tensor.data.data(), tensor.data.size());
  }
  return hash.digits();
}

absl::StatusOr<std::string> fingerprint_folder(const std::string& folder,
                                               const Safetensors& files) {
  const absl::StatusOr<std::string> config =
      read_text_file(folder + "/config.json", kConfigBytesMax);
  if (!config.ok()) return config.status();
  return fingerprint(*config, files);
}

}  // namespace weir
