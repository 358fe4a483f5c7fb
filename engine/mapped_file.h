#pragma once
#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weir {

// A regular file mapped read-only for the object's life. Moving it leaves the bytes where they are.
// What a writer does to the file meanwhile shows; truncating it is the writer's fault.
class MappedFile {
 public:
  // NotFound when there is no such file, so that a caller may try another name.
  static absl::StatusOr<MappedFile> open(const std::string& path);
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }  // empty for an empty file

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace weir
