#include "clients/convert/torch_archive.h"

#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace weir {
namespace {

// The first bytes of what torch.save wrote before version 1.6: a pickle of a magic number.
constexpr uint8_t kOldMagic[] = {0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20};

absl::Status refuse(const std::string& path, const std::string& what, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what, ": ", why));
}

bool is_row_major(const TensorReference& tensor) {
  int64_t stride = 1;
  for (size_t i = tensor.shape.size(); i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.stride[i] != stride) return false;
    stride *= tensor.shape[i];
  }
  return true;
}

}  // namespace

bool count_elements(const std::vector<int64_t>& shape, int64_t& count) {
  count = 1;
  bool fits = true;
  for (const int64_t size : shape) {
    if (size == 0) {
      count = 0;
      return true;
    }
    fits = fits && !__builtin_mul_overflow(count, size, &count);
  }
  return fits;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<TorchArchive> TorchArchive::open(std::span<const std::byte> bytes,
                                                const std::string& path) {
  if (bytes.size() >= sizeof kOldMagic &&
      std::memcmp(bytes.data(), kOldMagic, sizeof kOldMagic) == 0) {
    return absl::InvalidArgumentError(
        path + ": expected a zip archive, found the format that torch.save wrote before 1.6");
  }
  absl::StatusOr<ZipEntries> entries = read_zip(bytes, path);
  if (!entries.ok()) return entries.status();
  TorchArchive archive;
  archive.path_ = path;
  archive.entries_ = *std::move(entries);
  const ZipEntry* pickle = nullptr;
  for (const auto& [name, entry] : archive.entries_) {
    const size_t slash = name.find('/');
    if (slash == std::string::npos || name.substr(slash) != "/data.pkl") continue;
    if (pickle != nullptr) return refuse(path, "data.pkl", "is there twice");
    pickle = &entry;
    archive.root_name_ = name.substr(0, slash);
  }
  if (pickle == nullptr) return refuse(path, "data.pkl", "is missing: not written by torch.save");
  const auto order = archive.entries_.find(archive.root_name_ + "/byteorder");
  if (order != archive.entries_.end()) {
    const std::span<const std::byte> data = order->second.data;
    const std::string text(reinterpret_cast<const char*>(data.data()), data.size());
    if (text != "little") {
      return refuse(path, "byteorder", "expected little, found " + absl::CHexEscape(text));
    }
  }
  const absl::Status whole = check_crc(archive.root_name_ + "/data.pkl", *pickle, path);
  if (!whole.ok()) return whole;
  absl::StatusOr<Pickle> read = read_pickle(pickle->data, path);
  if (!read.ok()) return read.status();
  archive.pickle_ = *std::move(read);
  return archive;
}

absl::StatusOr<StoredTensor> TorchArchive::tensor(const TensorReference& reference,
                                                  const std::string& name) {
  const std::string what = absl::StrCat("tensor ", absl::Utf8SafeCHexEscape(name));
  const StorageReference& storage = *reference.storage;
  int64_t count = 0;
  if (!count_elements(reference.shape, count)) {
    return refuse(path_, what, "its shape " + shape_text(reference.shape) + " is too large");
  }
  if (count > 0 && !is_row_major(reference)) {
    return refuse(path_, what, absl::StrCat("expected row-major order, found shape ",
                                            shape_text(reference.shape), " with strides ",
                                            shape_text(reference.stride)));
  }
  const std::string entry_name =
      absl::StrCat(root_name_, "/data/", std::string(storage.key));
  const auto at = entries_.find(entry_name);
  if (at == entries_.end()) {
    return refuse(path_, what, "its storage " + absl::CHexEscape(entry_name) + " is missing");
  }
  const ZipEntry& entry = at->second;
  const size_t width = size_of(storage.type);
  const uint64_t held = entry.data.size() / width;
  if (entry.data.size() % width != 0 || held != uint64_t(storage.elements)) {
    return refuse(path_, what, absl::StrCat("its storage: expected ", storage.elements,
                                            " elements of ", width, " bytes, found ",
                                            entry.data.size(), " bytes"));
  }
  if (uint64_t(reference.offset) > held || uint64_t(count) > held - uint64_t(reference.offset)) {
    return refuse(path_, what, absl::StrCat("expected a storage of at least ", count,
                                            " elements after ", reference.offset, ", found ",
                                            held, " in all"));
  }
  if (!checked_.contains(storage.key)) {
    const absl::Status whole = check_crc(entry_name, entry, path_);
    if (!whole.ok()) return whole;
    checked_.insert(storage.key);
  }
  return StoredTensor{.type = storage.type,
                      .shape = reference.shape,
                      .data = entry.data.subspan(size_t(reference.offset) * width,
                                                 size_t(count) * width)};
}

}  // namespace weir
