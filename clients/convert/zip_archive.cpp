#include "clients/convert/zip_archive.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace weir {
namespace {

// APPNOTE.TXT's section beside each: the signature, and the bytes of the record's fixed part.
constexpr uint32_t kLocalHeader = 0x04034b50;       // 4.3.7
constexpr uint32_t kDirectoryHeader = 0x02014b50;   // 4.3.12
constexpr uint32_t kEndOfDirectory = 0x06054b50;    // 4.3.16
constexpr uint32_t kEndOfDirectory64 = 0x06064b50;  // 4.3.14
constexpr uint32_t kLocator64 = 0x07064b50;         // 4.3.15
constexpr size_t kLocalBytes = 30, kDirectoryBytes = 46, kEndBytes = 22, kEnd64Bytes = 56,
                 kLocator64Bytes = 20;
constexpr uint16_t kZip64Field = 1;  // 4.5.3
constexpr uint16_t kEncrypted = 1 | 1 << 6 | 1 << 13;
constexpr uint64_t kEntriesMax = 1 << 20;

using Bytes = std::span<const std::byte>;

// A little-endian number; the caller has checked that it is there.
template <class T>
T number(Bytes bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

bool holds(Bytes bytes, uint64_t at, uint64_t count) {
  return at <= bytes.size() && count <= bytes.size() - at;
}

bool signed_by(Bytes bytes, uint64_t at, uint32_t signature) {
  return holds(bytes, at, 4) && number<uint32_t>(bytes, size_t(at)) == signature;
}

struct Directory {
  uint64_t entries = 0, offset = 0, bytes = 0;
};

class ZipReader {
 public:
  ZipReader(Bytes archive, const std::string& path) : archive_(archive), path_(path) {}

  absl::StatusOr<ZipEntries> read() {
    absl::StatusOr<Directory> directory = find_directory();
    if (!directory.ok()) return directory.status();
    if (!holds(archive_, directory->offset, directory->bytes)) {
      return refuse("the directory", absl::StrCat("expected within the file's ", archive_.size(),
                                                  " bytes, found ", directory->bytes,
                                                  " bytes at ", directory->offset));
    }
    if (directory->entries > kEntriesMax) {
      return refuse("the directory", absl::StrCat("expected at most ", kEntriesMax,
                                                  " entries, found ", directory->entries));
    }
    ZipEntries entries;
    uint64_t at = directory->offset;
    const uint64_t end = at + directory->bytes;
    for (uint64_t i = 0; i < directory->entries; ++i) {
      const absl::Status status = read_entry(at, end, entries);
      if (!status.ok()) return status;
    }
    if (at != end) return refuse("the directory", "expected to end with its last entry");
    return entries;
  }

 private:
  absl::Status refuse(const std::string& what, const std::string& why) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": zip archive: ", what, ": ", why));
  }

  // The end record is the last thing of the file, but for a comment of at most 65,535 bytes.
  absl::StatusOr<Directory> find_directory() const {
    if (archive_.size() < kEndBytes) {
      return refuse("the end record", absl::StrCat("expected at least ", kEndBytes,
                                                   " bytes, found ", archive_.size()));
    }
    const size_t last = archive_.size() - kEndBytes, first = last - std::min(last, size_t(65535));
    for (size_t at = last + 1; at-- > first;) {
      if (!signed_by(archive_, at, kEndOfDirectory)) continue;
      if (number<uint16_t>(archive_, at + 20) != last - at) continue;  // not its comment's length
      return read_end(at);
    }
    return refuse("the end record",
                  "expected near the end of the file, found none: not a zip archive, or cut short");
  }

  absl::StatusOr<Directory> read_end(size_t at) const {
    const bool whole = number<uint16_t>(archive_, at + 4) == number<uint16_t>(archive_, at + 6) &&
                       number<uint16_t>(archive_, at + 8) == number<uint16_t>(archive_, at + 10);
    if (!whole) return refuse("the end record", "expected an archive in one part");
    Directory directory{.entries = number<uint16_t>(archive_, at + 10),
                        .offset = number<uint32_t>(archive_, at + 16),
                        .bytes = number<uint32_t>(archive_, at + 12)};
    if (at < kLocator64Bytes || !signed_by(archive_, at - kLocator64Bytes, kLocator64)) {
      return directory;
    }
    const auto end64 = number<uint64_t>(archive_, at - kLocator64Bytes + 8);
    if (!holds(archive_, end64, kEnd64Bytes) || !signed_by(archive_, end64, kEndOfDirectory64)) {
      return refuse("the zip64 end record", absl::StrCat("expected at ", end64));
    }
    return Directory{.entries = number<uint64_t>(archive_, size_t(end64) + 32),
                     .offset = number<uint64_t>(archive_, size_t(end64) + 48),
                     .bytes = number<uint64_t>(archive_, size_t(end64) + 40)};
  }

  absl::Status read_entry(uint64_t& at, uint64_t end, ZipEntries& entries) const {
    const Bytes bytes = archive_.first(size_t(end));
    if (!holds(bytes, at, kDirectoryBytes) || !signed_by(bytes, at, kDirectoryHeader)) {
      return refuse(absl::StrCat("entry ", entries.size()), "its header is cut short or damaged");
    }
    const size_t head = size_t(at);
    const size_t name_bytes = number<uint16_t>(bytes, head + 28);
    const size_t extra_bytes = number<uint16_t>(bytes, head + 30);
    at += kDirectoryBytes + name_bytes + extra_bytes + number<uint16_t>(bytes, head + 32);
    if (at > end) return refuse(absl::StrCat("entry ", entries.size()), "its header is cut short");
    const std::string name(reinterpret_cast<const char*>(bytes.data() + head + kDirectoryBytes),
                           name_bytes);
    const std::string quoted = absl::StrCat("entry ", absl::Utf8SafeCHexEscape(name));
    const auto flags = number<uint16_t>(bytes, head + 8);
    const auto method = number<uint16_t>(bytes, head + 10);
    if (flags & kEncrypted) return refuse(quoted, "encrypted");
    if (method != 0) {
      return refuse(quoted, absl::StrCat("expected to be stored, method 0; found method ", method));
    }
    uint64_t stored = number<uint32_t>(bytes, head + 20), size = number<uint32_t>(bytes, head + 24),
             offset = number<uint32_t>(bytes, head + 42);
    const Bytes extra = bytes.subspan(head + kDirectoryBytes + name_bytes, extra_bytes);
    if (!read_zip64(extra, size, stored, offset)) {
      return refuse(quoted, "its zip64 field is missing or cut short");
    }
    if (stored != size) {
      return refuse(quoted, absl::StrCat("expected ", size, " stored bytes, found ", stored));
    }
    const absl::StatusOr<Bytes> data = find_data(name, quoted, offset, size);
    if (!data.ok()) return data.status();
    const ZipEntry entry{.data = *data, .crc = number<uint32_t>(bytes, head + 16)};
    if (!entries.emplace(name, entry).second) return refuse(quoted, "is there twice");
    return absl::OkStatus();
  }

  // Replaces each of the three that is all ones by the zip64 field's, which has only those.
  static bool read_zip64(Bytes extra, uint64_t& size, uint64_t& stored, uint64_t& offset) {
    Bytes field;
    while (extra.size() >= 4) {
      const size_t bytes = number<uint16_t>(extra, 2);
      if (bytes > extra.size() - 4) return false;
      if (number<uint16_t>(extra, 0) == kZip64Field) field = extra.subspan(4, bytes);
      extra = extra.subspan(4 + bytes);
    }
    for (uint64_t* value : {&size, &stored, &offset}) {
      if (*value != UINT32_MAX) continue;
      if (field.size() < 8) return false;
      *value = number<uint64_t>(field, 0);
      field = field.subspan(8);
    }
    return true;
  }

  // The local header gives only the place of the data: torch writes its sizes as zero.
  absl::StatusOr<Bytes> find_data(const std::string& name, const std::string& quoted,
                                  uint64_t offset, uint64_t size) const {
    if (!holds(archive_, offset, kLocalBytes) || !signed_by(archive_, offset, kLocalHeader)) {
      return refuse(quoted, absl::StrCat("expected its local header at ", offset));
    }
    const size_t head = size_t(offset);
    const size_t name_bytes = number<uint16_t>(archive_, head + 26);
    const uint64_t data = head + kLocalBytes + name_bytes + number<uint16_t>(archive_, head + 28);
    if (!holds(archive_, data, size)) {
      return refuse(quoted, absl::StrCat("expected within the file's ", archive_.size(),
                                         " bytes, found ", size, " bytes at ", data));
    }
    if (name_bytes != name.size() ||
        std::memcmp(archive_.data() + head + kLocalBytes, name.data(), name.size()) != 0) {
      return refuse(quoted, "its local header has another name");
    }
    return archive_.subspan(size_t(data), size_t(size));
  }

  Bytes archive_;
  const std::string& path_;
};

}  // namespace

absl::StatusOr<ZipEntries> read_zip(Bytes archive, const std::string& path) {
  return ZipReader(archive, path).read();
}

absl::Status check_crc(const std::string& name, const ZipEntry& entry, const std::string& path) {
  const auto* data = reinterpret_cast<const Bytef*>(entry.data.data());
  const auto crc = uint32_t(crc32_z(0, data, entry.data.size()));
  if (crc == entry.crc) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      path, ": zip archive: entry ", absl::Utf8SafeCHexEscape(name), ": expected CRC-32 ",
      absl::Hex(entry.crc, absl::kZeroPad8), ", found ", absl::Hex(crc, absl::kZeroPad8)));
}

}  // namespace weir
