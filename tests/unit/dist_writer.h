#pragma once
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/unit/torch_writer.h"

namespace weir::test {

// Writes what torch.distributed.checkpoint writes: .metadata and two files of shards.
class DistWriter {
 public:
  using Shape = std::vector<int64_t>;
  struct Shard {
    Shape first;
    TestTensor tensor;
  };
  void add_tensor(const std::string& name, TensorType type, const Shape& shape,
                  const std::vector<Shard>& shards) {
    using namespace pickled;
    std::vector<std::string> chunks;
    for (const Shard& shard : shards) {
      chunks.push_back(object(kModule, "ChunkStorageMetadata",
                              dict({{"offsets", torch_size(shard.first)},
                                    {"sizes", torch_size(shard.tensor.shape)}})));
      TorchWriter writer;
      const std::string root = writer.tensor(shard.tensor);
      store(name, torch_size(shard.first), writer.bytes(root));
    }
    const std::string properties = object(
        kModule, "TensorProperties",
        tuple({global("torch", dtype(type)),
               call("torch.serialization", "_get_layout", {text("torch.strided")}),
               boolean(false),
               call(kModule, "_MEM_FORMAT_ENCODING", {integer(0)}), boolean(false)}));
    entries_.emplace_back(name, object(kModule, "TensorStorageMetadata",
                                       dict({{"properties", properties},
                                             {"size", torch_size(shape)},
                                             {"chunks", list(chunks)}})));
  }
  void add_object(const std::string& name) {
    entries_.emplace_back(name, pickled::object(kModule, "BytesStorageMetadata",
                                                pickled::dict({})));
    store(name, pickled::none(), TorchWriter().bytes(pickled::none()));
  }
  void add_halves(const std::string& name, const TestTensor& tensor, size_t axis) {
    if (tensor.shape.size() <= axis || tensor.shape[axis] % 2 != 0) {
      return add_tensor(name, tensor.type, tensor.shape,
                        {{Shape(tensor.shape.size(), 0), tensor}});
    }
    Shard low{Shape(tensor.shape.size(), 0), {tensor.type, tensor.shape, {}}};
    low.tensor.shape[axis] /= 2;
    Shard high = low;
    high.first[axis] = low.tensor.shape[axis];
    const int64_t inner = elements(Shape(tensor.shape.begin() + ptrdiff_t(axis) + 1,
                                         tensor.shape.end()));
    for (size_t i = 0; i < tensor.values.size(); ++i) {
      const bool upper = int64_t(i) / inner % tensor.shape[axis] >= high.first[axis];
      (upper ? high : low).tensor.values.push_back(tensor.values[i]);
    }
    add_tensor(name, tensor.type, tensor.shape, {low, high});
  }
  void write(const std::string& folder) const {
    using namespace pickled;
    const std::string metadata = object(
        kModule, "Metadata",
        dict({{"state_dict_metadata", dict(entries_)},
              {"planner_data", none()},
              {"storage_data", "}(" + joined(places_) + "u"},
              {"storage_meta", object(kModule, "StorageMeta", dict({{"save_id", none()}}))}}));
    write_file(folder + "/.metadata", file(metadata));
    write_file(folder + "/__0_0.distcp", files_[0]);
    write_file(folder + "/__1_0.distcp", files_[1]);
  }

 private:
  static constexpr char kModule[] = "torch.distributed.checkpoint.metadata";

  static std::string dtype(TensorType type) {
    return type == TensorType::BF16 ? "bfloat16" : type == TensorType::F16 ? "float16" : "float32";
  }
  void store(const std::string& name, const std::string& offset, const std::string& bytes) {
    using namespace pickled;
    const size_t rank = places_.size() / 2 % 2;
    const std::string index = object(kModule, "MetadataIndex",
                                     dict({{"fqn", text(name)},
                                           {"offset", offset},
                                           {"index", integer(0)}}));
    const std::string info = object(
        "torch.distributed.checkpoint.filesystem", "_StorageInfo",
        dict({{"relative_path", text(absl::StrCat("__", rank, "_0.distcp"))},
              {"offset", integer(int64_t(files_[rank].size()))},
              {"length", integer(int64_t(bytes.size()))}}));
    places_.push_back(index);
    places_.push_back(info);
    files_[rank] += bytes;
  }

  pickled::Pairs entries_;
  std::vector<std::string> places_;       // index, info, index, info …
  std::string files_[2];
};

}  // namespace weir::test
