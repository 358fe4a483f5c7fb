#include "clients/convert/megatron_checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "clients/convert/dist_metadata.h"
#include "engine/json.h"

namespace weir {
namespace {

namespace fs = std::filesystem;

constexpr size_t kSmallFileMax = 1 << 20;

absl::Status refuse(const std::string& path, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", why));
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// Transformer Engine's metadata, in either format: "x._extra_state", "x._extra_state/shard_0_8".
bool is_extra_state(const std::string& name) {
  return name.ends_with("._extra_state") || name.find("._extra_state/") != std::string::npos;
}
bool is_not_the_models(const std::string& name) {
  return is_extra_state(name) || name.starts_with("optimizer.") || name.starts_with("chained_");
}

// --- which folder ---

absl::StatusOr<std::string> iteration_folder(const std::string& path) {
  const std::string tracker = path + "/latest_checkpointed_iteration.txt";
  const absl::StatusOr<std::string> text = read_text_file(tracker, kSmallFileMax);
  if (absl::IsNotFound(text.status())) return path;
  if (!text.ok()) return text.status();
  const std::string word = text->substr(0, text->find_last_not_of(" \n\r\t") + 1);
  if (word == "release") return path + "/release";
  const bool digits = std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; });
  if (word.empty() || word.size() > 12 || !digits) {
    return refuse(tracker, absl::StrCat("expected an iteration or \"release\", found \"",
                                        absl::Utf8SafeCHexEscape(word.substr(0, 40)), "\""));
  }
  const std::string padded = std::string(7 - std::min<size_t>(7, word.size()), '0') + word;
  return absl::StrCat(path, "/iter_", padded);
}

absl::StatusOr<TorchArchive*> open_archive(const std::string& path, MegatronCheckpoint& out) {
  absl::StatusOr<MappedFile> file = MappedFile::open(path);
  if (!file.ok()) return file.status();
  const std::span<const std::byte> bytes = out.files.emplace_back(*std::move(file)).bytes();
  absl::StatusOr<TorchArchive> archive = TorchArchive::open(bytes, path);
  if (!archive.ok()) return archive.status();
  return &out.archives.emplace_back(*std::move(archive));
}

absl::Status take_arguments(const TorchArchive& archive, const std::string& path,
                            MegatronCheckpoint& out) {
  const Object* arguments = as<Object>(find(archive.root(), "args"));
  if (arguments == nullptr || arguments->class_name != "argparse.Namespace") {
    return refuse(path, "args: expected an argparse.Namespace, found " +
                            describe(find(archive.root(), "args")));
  }
  out.arguments = find(archive.root(), "args");
  out.arguments_file = path;
  return absl::OkStatus();
}

// --- the `torch` format ---

absl::StatusOr<std::string> only_rank(const std::string& folder) {
  std::vector<std::string> ranks;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("mp_rank_")) ranks.push_back(name);
  }
  std::ranges::sort(ranks);
  if (ranks.size() == 1) return ranks[0];
  if (ranks.empty()) {
    return absl::NotFoundError(absl::StrCat(
        folder, ": expected a Megatron checkpoint: .metadata (torch_dist) or mp_rank_00 (torch), "
                "found neither"));
  }
  return refuse(folder, absl::StrCat("expected one rank, found ", absl::StrJoin(ranks, ", "),
                                     ": merging tensor- or pipeline-parallel ranks of the torch "
                                     "format is not supported"));
}

absl::Status read_legacy(MegatronCheckpoint& out) {
  const absl::StatusOr<std::string> rank = only_rank(out.folder);
  if (!rank.ok()) return rank.status();
  const std::string path = absl::StrCat(out.folder, "/", *rank, "/model_optim_rng.pt");
  const absl::StatusOr<TorchArchive*> archive = open_archive(path, out);
  if (!archive.ok()) return archive.status();
  const absl::Status status = take_arguments(**archive, path, out);
  if (!status.ok()) return status;
  for (const char* key : {"tensor_model_parallel_size", "pipeline_model_parallel_size"}) {
    const int64_t* size = as<int64_t>(find(out.arguments, key));
    if (size == nullptr || *size == 1) continue;
    return refuse(path, absl::StrCat("args.", key, ": expected 1, found ", *size));
  }
  const Dict* model = as<Dict>(find((*archive)->root(), "model"));
  if (model == nullptr) {
    return refuse(path, "model: expected a dict of tensors, found " +
                            describe(find((*archive)->root(), "model")));
  }
  for (const auto& [key, value] : model->items) {
    const Text* text = as<Text>(key);
    if (text == nullptr) return refuse(path, "model: expected a text key, found " + describe(key));
    const std::string name(text->bytes);
    if (is_extra_state(name)) {
      out.skipped.push_back(name);
      continue;
    }
    const auto* reference = as<TensorReference>(value);
    if (reference == nullptr) {
      return refuse(path, absl::StrCat("model: ", absl::Utf8SafeCHexEscape(name),
                                       ": expected a tensor, found ", describe(value)));
    }
    const absl::StatusOr<StoredTensor> stored = (*archive)->tensor(*reference, name);
    if (!stored.ok()) return stored.status();
    if (!out.tensors.emplace(name, whole_tensor(*stored, path)).second) {
      return refuse(path, absl::StrCat("tensor ", absl::Utf8SafeCHexEscape(name),
                                       ": is there twice"));
    }
  }
  return absl::OkStatus();
}

// --- the `torch_dist` format ---

absl::Status check_backend(const std::string& folder) {
  const std::string path = folder + "/metadata.json";
  const absl::StatusOr<std::string> text = read_text_file(path, kSmallFileMax);
  if (absl::IsNotFound(text.status())) return absl::OkStatus();  // torch itself writes none
  if (!text.ok()) return text.status();
  const absl::StatusOr<nlohmann::json> json = parse_json(*text, path);
  if (!json.ok()) return json.status();
  const auto backend = json->is_object() ? json->find("sharded_backend") : json->end();
  if (backend == json->end()) return refuse(path, "sharded_backend: is missing");
  if (*backend == "torch_dist") return absl::OkStatus();
  return refuse(path, "sharded_backend: expected torch_dist, found " + describe(*backend));
}

// The shapes that a shard may have in its own file: Megatron adds axes of length 1 in front.
bool same_but_for_ones(std::vector<int64_t> a, std::vector<int64_t> b) {
  std::erase(a, 1);
  std::erase(b, 1);
  return a == b;
}

class DistFiles {
 public:
  explicit DistFiles(MegatronCheckpoint& out) : out_(out) {}

  absl::StatusOr<StoredTensor> read_shard(const DistShard& shard, const std::string& name) {
    const std::string path = absl::StrCat(out_.folder, "/", shard.file);
    auto file = mapped_.find(path);
    if (file == mapped_.end()) {
      absl::StatusOr<MappedFile> opened = MappedFile::open(path);
      if (!opened.ok()) return opened.status();
      file = mapped_.emplace(path, out_.files.emplace_back(*std::move(opened)).bytes()).first;
    }
    const std::span<const std::byte> bytes = file->second;
    const auto refuse_shard = [&](const std::string& why) {
      return refuse(path, absl::StrCat("tensor ", absl::Utf8SafeCHexEscape(name), ": shard at ",
                                       shape_text(shard.first), ": ", why));
    };
    if (shard.offset > bytes.size() || shard.bytes > bytes.size() - shard.offset) {
      return refuse_shard(absl::StrCat("expected within the file's ", bytes.size(),
                                       " bytes, found ", shard.bytes, " at ", shard.offset));
    }
    absl::StatusOr<TorchArchive> archive =
        TorchArchive::open(bytes.subspan(size_t(shard.offset), size_t(shard.bytes)), path);
    if (!archive.ok()) return refuse_shard(std::string(archive.status().message()));
    const auto* reference = as<TensorReference>(archive->root());
    if (reference == nullptr) {
      return refuse_shard("expected a tensor, found " + describe(archive->root()));
    }
    absl::StatusOr<StoredTensor> stored = archive->tensor(*reference, name);
    if (!stored.ok()) return stored;
    if (!same_but_for_ones(stored->shape, shard.sizes)) {
      return refuse_shard(absl::StrCat("expected shape ", shape_text(shard.sizes), ", found ",
                                       shape_text(stored->shape)));
    }
    stored->shape = shard.sizes;
    return stored;
  }

 private:
  MegatronCheckpoint& out_;
  std::map<std::string, std::span<const std::byte>> mapped_;
};

absl::Status read_distributed(MegatronCheckpoint& out) {
  const absl::Status backend = check_backend(out.folder);
  if (!backend.ok()) return backend;
  const std::string common_path = out.folder + "/common.pt";
  const absl::StatusOr<TorchArchive*> common = open_archive(common_path, out);
  if (!common.ok()) return common.status();
  const absl::Status taken = take_arguments(**common, common_path, out);
  if (!taken.ok()) return taken;

  const std::string path = out.folder + "/.metadata";
  const absl::StatusOr<MappedFile> file = MappedFile::open(path);
  if (!file.ok()) return file.status();
  const absl::StatusOr<Pickle> pickle = read_pickle(file->bytes(), path);
  if (!pickle.ok()) return pickle.status();
  absl::StatusOr<DistMetadata> metadata =
      read_dist_metadata(pickle->root, path, is_not_the_models);
  if (!metadata.ok()) return metadata.status();
  out.skipped = std::move(metadata->objects);
  out.skipped.insert(out.skipped.end(), metadata->skipped.begin(), metadata->skipped.end());
  DistFiles files(out);
  for (const auto& [name, tensor] : metadata->tensors) {
    SourceTensor source{.type = tensor.type, .shape = tensor.shape, .file = path};
    for (const DistShard& shard : tensor.shards) {
      absl::StatusOr<StoredTensor> stored = files.read_shard(shard, name);
      if (!stored.ok()) return stored.status();
      source.pieces.push_back({.first = shard.first, .stored = *std::move(stored)});
    }
    const absl::Status whole = check_pieces(source, name);
    if (!whole.ok()) return whole;
    out.tensors.emplace(name, std::move(source));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<MegatronCheckpoint> open_megatron(const std::string& path) {
  const absl::StatusOr<std::string> folder = iteration_folder(path);
  if (!folder.ok()) return folder.status();
  if (!exists(*folder)) return absl::NotFoundError(*folder + ": no such folder");
  MegatronCheckpoint checkpoint{.folder = *folder};
  const bool distributed =
      exists(*folder + "/.metadata") || exists(*folder + "/metadata.json");
  const absl::Status status = distributed ? read_distributed(checkpoint) : read_legacy(checkpoint);
  if (!status.ok()) return status;
  return checkpoint;
}

}  // namespace weir
