#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weir {

// One file of an archive: a view into the archive's bytes.
struct ZipEntry {
  std::span<const std::byte> data;
  uint32_t crc = 0;  // CRC-32 as the directory gives it; check_crc compares
};

using ZipEntries = std::map<std::string, ZipEntry, std::less<>>;

// The entries of a zip archive as torch.save writes it: stored, neither compressed nor encrypted,
// with zip64 sizes and offsets where they are needed (PKWARE's APPNOTE.TXT, 4.3 and 4.5.3). Trusts
// nothing: every length and offset is checked against `archive`, which the entries borrow. What
// they hold is not read here. Errors are InvalidArgument and name `path` and the entry.
absl::StatusOr<ZipEntries> read_zip(std::span<const std::byte> archive, const std::string& path);

// Whether the bytes are those that were written.
absl::Status check_crc(const std::string& name, const ZipEntry& entry, const std::string& path);

}  // namespace weir
