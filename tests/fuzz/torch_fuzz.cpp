#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "clients/convert/dist_metadata.h"
#include "clients/convert/torch_archive.h"
#include "kernels/check.h"

namespace weir {
namespace {

bool inside(std::span<const std::byte> part, std::span<const std::byte> whole) {
  return part.empty() || (part.data() >= whole.data() &&
                          part.data() + part.size() <= whole.data() + whole.size());
}

// Every value that can be reached from the root, once; a cycle would not end otherwise.
class Walk {
 public:
  explicit Walk(const Value* root) { see(root); }

  std::vector<const TensorReference*> tensors() {
    std::vector<const TensorReference*> found;
    while (!waiting_.empty()) {
      const Value* value = waiting_.back();
      waiting_.pop_back();
      WEIR_CHECK(!describe(value).empty());
      for (const Value* item : items_of(value)) see(item);
      if (const Set* set = as<Set>(value)) {
        for (const Value* item : set->items) see(item);
      }
      if (const Dict* dict = as<Dict>(value)) see_all(*dict);
      if (const Object* object = as<Object>(value)) {
        see(object->arguments);
        see(object->state);
        see_all(object->entries);
        for (const Value* item : object->items.items) see(item);
      }
      if (const auto* tensor = as<TensorReference>(value)) found.push_back(tensor);
    }
    return found;
  }

 private:
  void see(const Value* value) {
    if (value != nullptr && seen_.insert(value).second) waiting_.push_back(value);
  }
  void see_all(const Dict& dict) {
    for (const auto& [key, value] : dict.items) {
      see(key);
      see(value);
    }
  }

  std::unordered_set<const Value*> seen_;
  std::vector<const Value*> waiting_;
};

void fuzz_pickle(std::span<const std::byte> bytes) {
  const absl::StatusOr<Pickle> pickle = read_pickle(bytes, "fuzz");
  if (!pickle.ok()) {
    WEIR_CHECK(!pickle.status().message().empty());
    return;
  }
  for (const TensorReference* tensor : Walk(pickle->root).tensors()) {
    WEIR_CHECK(tensor->storage != nullptr && tensor->offset >= 0);
    WEIR_CHECK(tensor->shape.size() == tensor->stride.size());
  }
  const auto metadata = read_dist_metadata(pickle->root, "fuzz", [](const std::string& name) {
    return name.starts_with("optimizer.");
  });
  if (!metadata.ok()) return;
  for (const auto& [name, tensor] : metadata->tensors) {
    for (const DistShard& shard : tensor.shards) {
      WEIR_CHECK(shard.first.size() == tensor.shape.size() && !shard.file.empty());
      WEIR_CHECK(shard.file.find('/') == std::string::npos);
    }
  }
}

void fuzz_archive(std::span<const std::byte> bytes) {
  const auto entries = read_zip(bytes, "fuzz");
  if (entries.ok()) {
    for (const auto& [name, entry] : *entries) WEIR_CHECK(inside(entry.data, bytes));
  }
  absl::StatusOr<TorchArchive> archive = TorchArchive::open(bytes, "fuzz");
  if (!archive.ok()) return;
  for (const TensorReference* reference : Walk(archive->root()).tensors()) {
    const absl::StatusOr<StoredTensor> tensor = archive->tensor(*reference, "t");
    if (!tensor.ok()) continue;
    int64_t count = 0;
    WEIR_CHECK(count_elements(tensor->shape, count));
    WEIR_CHECK(size_t(count) * size_of(tensor->type) == tensor->data.size());
    WEIR_CHECK(inside(tensor->data, bytes));
  }
}

}  // namespace
}  // namespace weir

// Any bytes as a torch archive when they begin as a zip archive does, and as a pickle otherwise:
// refused, or values that can be walked and tensors that lie inside the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  if (size >= 2 && data[0] == 'P' && data[1] == 'K') {
    weir::fuzz_archive(bytes);
  } else {
    weir::fuzz_pickle(bytes);
  }
  return 0;
}
