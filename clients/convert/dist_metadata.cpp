#include "clients/convert/dist_metadata.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "clients/convert/torch_archive.h"

namespace weir {
namespace {

constexpr char kModule[] = "torch.distributed.checkpoint.metadata.";

bool is_a(const Value* value, const std::string& class_name) {
  const Object* object = as<Object>(value);
  return object != nullptr && object->class_name == class_name;
}

class DistReader {
 public:
  DistReader(const std::string& path, bool (*skips)(const std::string&))
      : path_(path), skips_(skips) {}

  absl::StatusOr<DistMetadata> read(const Value* root) {
    const Dict* tensors = as<Dict>(find(root, "state_dict_metadata"));
    const Dict* storage = as<Dict>(find(root, "storage_data"));
    if (!as<Object>(root) || tensors == nullptr || storage == nullptr) {
      return refuse(describe(root), "expected torch.distributed.checkpoint's Metadata with "
                                    "state_dict_metadata and storage_data");
    }
    for (const auto& [key, value] : tensors->items) {
      const Text* name = as<Text>(key);
      if (name == nullptr) return refuse("state_dict_metadata", "a key is not a text");
      const absl::Status status = read_entry(std::string(name->bytes), value);
      if (!status.ok()) return status;
    }
    for (const auto& [index, info] : storage->items) {
      const absl::Status status = read_storage(index, info);
      if (!status.ok()) return status;
    }
    for (const auto& [name, tensor] : metadata_.tensors) {
      for (const DistShard& shard : tensor.shards) {
        if (!shard.file.empty()) continue;
        return refuse_tensor(name, "storage_data has no place for its shard at " +
                                       shape_text(shard.first));
      }
    }
    return std::move(metadata_);
  }

 private:
  absl::Status refuse(const std::string& what, const std::string& why) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": ", what, ": ", why));
  }
  absl::Status refuse_tensor(const std::string& name, const std::string& why) const {
    return refuse("tensor " + absl::Utf8SafeCHexEscape(name), why);
  }

  absl::Status read_entry(const std::string& name, const Value* value) {
    if (is_a(value, absl::StrCat(kModule, "BytesStorageMetadata"))) {
      metadata_.objects.push_back(name);
      return absl::OkStatus();
    }
    if (!is_a(value, absl::StrCat(kModule, "TensorStorageMetadata"))) {
      return refuse_tensor(name, "expected TensorStorageMetadata, found " + describe(value));
    }
    if (skips_(name)) {
      metadata_.skipped.push_back(name);
      return absl::OkStatus();
    }
    DistTensor tensor;
    // Its pickled state is a tuple that begins with the dtype.
    const Object* properties = as<Object>(find(value, "properties"));
    const auto state = items_of(properties ? properties->state : nullptr);
    const Value* dtype = state.empty() ? find(find(value, "properties"), "dtype") : state[0];
    if (!as_dtype(dtype, tensor.type)) {
      return refuse_tensor(name, "expected a dtype of safetensors, found " + describe(dtype));
    }
    if (!as_shape(find(value, "size"), tensor.shape)) {
      return refuse_tensor(name, "expected a size, found " + describe(find(value, "size")));
    }
    for (const Value* chunk : items_of(find(value, "chunks"))) {
      DistShard shard;
      if (!as_shape(find(chunk, "offsets"), shard.first) ||
          !as_shape(find(chunk, "sizes"), shard.sizes) ||
          shard.first.size() != tensor.shape.size() || shard.sizes.size() != tensor.shape.size()) {
        return refuse_tensor(name, absl::StrCat("expected a chunk's offsets and sizes in ",
                                                tensor.shape.size(), " dimensions, found ",
                                                describe(chunk)));
      }
      places_.emplace(std::pair(name, shard.first), tensor.shards.size());
      tensor.shards.push_back(std::move(shard));
    }
    const bool added = metadata_.tensors.emplace(name, std::move(tensor)).second;
    return added ? absl::OkStatus() : refuse_tensor(name, "is there twice");
  }

  absl::Status read_storage(const Value* index, const Value* info) {
    const Text* text = as<Text>(find(index, "fqn"));
    if (text == nullptr) return refuse("storage_data", "a key is not a MetadataIndex");
    const std::string name(text->bytes);
    std::vector<int64_t> first;
    if (!as_shape(find(index, "offset"), first)) return absl::OkStatus();  // an object's
    const auto place = places_.find(std::pair(name, first));
    if (place == places_.end()) return absl::OkStatus();  // a skipped tensor's
    DistShard& shard = metadata_.tensors.at(name).shards[place->second];
    const Text* file = as<Text>(find(info, "relative_path"));
    const int64_t* offset = as<int64_t>(find(info, "offset"));
    const int64_t* bytes = as<int64_t>(find(info, "length"));
    if (file == nullptr || offset == nullptr || bytes == nullptr || *offset < 0 || *bytes < 0) {
      return refuse_tensor(name, "expected a file, an offset and a length, found " +
                                     describe(info));
    }
    if (file->bytes.empty() || file->bytes.front() == '.' ||
        file->bytes.find_first_of(std::string_view("/\\\0", 3)) != std::string_view::npos) {
      return refuse_tensor(name, "expected a file of this folder, found " +
                                     describe(find(info, "relative_path")));
    }
    const Value* transforms = find(info, "transform_descriptors");
    if (transforms != nullptr && !as<None>(transforms) && !items_of(transforms).empty()) {
      return refuse_tensor(name, "its shards are transformed, which is not supported");
    }
    shard.file = std::string(file->bytes);
    shard.offset = uint64_t(*offset);
    shard.bytes = uint64_t(*bytes);
    return absl::OkStatus();
  }

  const std::string& path_;
  bool (*skips_)(const std::string&);
  DistMetadata metadata_;
  // Shards by tensor and offset.
  std::map<std::pair<std::string, std::vector<int64_t>>, size_t> places_;
};

}  // namespace

absl::StatusOr<DistMetadata> read_dist_metadata(const Value* root, const std::string& path,
                                                bool (*skips)(const std::string& name)) {
  return DistReader(path, skips).read(root);
}

}  // namespace weir
