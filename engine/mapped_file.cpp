#include "engine/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weir {
namespace {

absl::Status system_error(const std::string& path, const char* verb) {
  const bool missing = errno == ENOENT;
  const std::string message =
      absl::StrCat(path, ": cannot ", verb, ": ", std::generic_category().message(errno));
  return missing ? absl::NotFoundError(message) : absl::UnavailableError(message);
}

absl::StatusOr<std::span<const std::byte>> map_descriptor(int descriptor,
                                                          const std::string& path) {
  struct stat info;
  if (fstat(descriptor, &info) != 0) return system_error(path, "stat");
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(path + ": expected a regular file");
  }
  // There is no mapping of nothing; whoever parses the bytes says that they are too few.
  if (info.st_size == 0) return std::span<const std::byte>();
  const size_t size = size_t(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (data == MAP_FAILED) return system_error(path, "map");
  return std::span(static_cast<const std::byte*>(data), size);
}

}  // namespace

absl::StatusOr<MappedFile> MappedFile::open(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return system_error(path, "open");
  const absl::StatusOr<std::span<const std::byte>> bytes = map_descriptor(descriptor, path);
  close(descriptor);
  if (!bytes.ok()) return bytes.status();
  MappedFile file;
  file.bytes_ = *bytes;
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace weir
