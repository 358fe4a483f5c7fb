#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/convert/pickle.h"

namespace weir {

// Where the shards of a distributed checkpoint lie: what the .metadata pickle of
// torch.distributed.checkpoint says, checked for sense but not yet against the files.
struct DistShard {
  std::vector<int64_t> first, sizes;        // its place in the tensor; as long as its shape
  std::string file;                         // of the checkpoint's folder
  uint64_t offset = 0, bytes = 0;           // of the archive of this shard in that file
};
struct DistTensor {
  TensorType type = TensorType::F32;
  std::vector<int64_t> shape;
  std::vector<DistShard> shards;
};
struct DistMetadata {
  std::map<std::string, DistTensor> tensors;
  std::vector<std::string> objects;         // pickled bytes that are not tensors, by name
  std::vector<std::string> skipped;         // tensors that `skips` names
};

// `skips`: whether nobody will ask for a tensor of this name; then it is only listed.
absl::StatusOr<DistMetadata> read_dist_metadata(const Value* root, const std::string& path,
                                                bool (*skips)(const std::string& name));

}  // namespace weir
