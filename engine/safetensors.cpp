#include "engine/safetensors.h"

#include <deque>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/json.h"
#include "engine/mapped_file.h"

namespace weir {
namespace {

using Tensors = std::map<std::string, TensorView>;

constexpr size_t kIndexBytesMax = 64 << 20;

// A file and the tensors in it. Stays where it is: the views borrow `path`.
struct TensorFile {
  std::string path;
  MappedFile mapping;
  Tensors tensors;

  explicit TensorFile(std::string file_path) : path(std::move(file_path)) {}
  TensorFile(const TensorFile&) = delete;
};

absl::Status open_tensor_file(TensorFile& file) {
  absl::StatusOr<MappedFile> mapping = MappedFile::open(file.path);
  if (!mapping.ok()) return mapping.status();
  file.mapping = *std::move(mapping);
  absl::StatusOr<Tensors> tensors = parse_safetensors(file.mapping.bytes(), file.path);
  if (!tensors.ok()) return tensors.status();
  file.tensors = *std::move(tensors);
  return absl::OkStatus();
}

// Tensor name to shard name, from the text of an index.
absl::StatusOr<std::map<std::string, std::string>> read_index(const std::string& text,
                                                              const std::string& path) {
  const absl::StatusOr<nlohmann::json> index = parse_json(text, path);
  if (!index.ok()) return index.status();
  const auto map = index->is_object() ? index->find("weight_map") : index->end();
  if (map == index->end() || !map->is_object()) {
    return absl::InvalidArgumentError(path + ": weight_map: expected an object");
  }
  std::map<std::string, std::string> shards;
  for (const auto& [name, shard] : map->items()) {
    if (!shard.is_string()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": tensor ", name, ": expected a file name, found ", describe(shard)));
    }
    const std::string& file = shard.get_ref<const std::string&>();
    if (file.empty() || file == "." || file == ".." ||
        file.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": tensor ", name, ": expected a file of this folder, found ", describe(shard)));
    }
    shards[name] = file;
  }
  if (shards.empty()) return absl::InvalidArgumentError(path + ": weight_map names no tensor");
  return shards;
}

}  // namespace

struct Safetensors::Impl {
  std::string path;
  std::deque<TensorFile> files;  // never moved, as the views borrow from them
  Tensors tensors;

  // Adds a file's tensors. With an index (tensor to shard), they must be where it says.
  absl::Status add(const std::string& file_path, const std::string& shard,
                   const std::map<std::string, std::string>* index) {
    TensorFile& file = files.emplace_back(file_path);
    const absl::Status status = open_tensor_file(file);
    if (!status.ok()) return status;
    for (const auto& [name, view] : file.tensors) {
      const auto other = tensors.find(name);
      if (other != tensors.end()) {
        return absl::InvalidArgumentError(absl::StrCat(file_path, ": tensor ", name,
                                                       " is in two files, also in ",
                                                       *other->second.file));
      }
      const auto entry = index ? index->find(name) : decltype(index->find(name)){};
      if (index && (entry == index->end() || entry->second != shard)) {
        return absl::InvalidArgumentError(absl::StrCat(
            file_path, ": tensor ", name, ": expected where the index says, ",
            entry == index->end() ? "which does not name it" : "in " + entry->second,
            "; found here"));
      }
      tensors.emplace(name, view);
    }
    return absl::OkStatus();
  }

  absl::Status add_index(const std::string& folder, const std::string& text) {
    const auto index = read_index(text, path);
    if (!index.ok()) return index.status();
    std::set<std::string> shards;
    for (const auto& [name, shard] : *index) shards.insert(shard);
    for (const std::string& shard : shards) {
      const absl::Status status = add(absl::StrCat(folder, "/", shard), shard, &*index);
      if (!status.ok()) {
        return absl::IsNotFound(status)
                   ? absl::NotFoundError(absl::StrCat(std::string(status.message()), "; ", path,
                                                      " names it"))
                   : status;
      }
    }
    for (const auto& [name, shard] : *index) {
      if (tensors.contains(name)) continue;
      return absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", name, ": expected in ",
                                                     shard, ", which does not have it"));
    }
    return absl::OkStatus();
  }
};

absl::StatusOr<Safetensors> Safetensors::open_file(const std::string& path) {
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  const absl::Status status = impl->add(path, "", nullptr);
  if (!status.ok()) return status;
  return Safetensors(std::move(impl));
}

absl::StatusOr<Safetensors> Safetensors::open_folder(const std::string& folder) {
  absl::StatusOr<Safetensors> single = open_file(folder + "/model.safetensors");
  if (single.ok() || !absl::IsNotFound(single.status())) return single;
  const std::string path = folder + "/model.safetensors.index.json";
  const absl::StatusOr<std::string> text = read_text_file(path, kIndexBytesMax);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrCat(
        folder, ": expected model.safetensors or model.safetensors.index.json, found neither"));
  }
  if (!text.ok()) return text.status();
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  const absl::Status status = impl->add_index(folder, *text);
  if (!status.ok()) return status;
  return Safetensors(std::move(impl));
}

Safetensors::Safetensors(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Safetensors::Safetensors(Safetensors&&) noexcept = default;
Safetensors& Safetensors::operator=(Safetensors&&) noexcept = default;
Safetensors::~Safetensors() = default;

const Tensors& Safetensors::tensors() const { return impl_->tensors; }

const TensorView* Safetensors::find(const std::string& name) const {
  const auto at = impl_->tensors.find(name);
  return at == impl_->tensors.end() ? nullptr : &at->second;
}

const std::string& Safetensors::path() const { return impl_->path; }

size_t Safetensors::bytes() const {
  size_t sum = 0;
  for (const TensorFile& file : impl_->files) sum += file.mapping.bytes().size();
  return sum;
}

}  // namespace weir
