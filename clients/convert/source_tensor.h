#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "clients/convert/torch_archive.h"

namespace weir {

// A tensor of a checkpoint, in one piece or in shards that tile it.
struct SourceTensor {
  struct Piece {
    std::vector<int64_t> first;             // where its first element is, in each dimension
    StoredTensor stored;                    // shape: how far it goes in each dimension
  };
  TensorType type = TensorType::F32;
  std::vector<int64_t> shape;
  std::vector<Piece> pieces;
  std::string file;                         // for messages
};

SourceTensor whole_tensor(const StoredTensor& stored, const std::string& file);

// Whether the pieces have the tensor's type and cover it, each element once.
absl::Status check_pieces(const SourceTensor& tensor, const std::string& name);

// Elements first .. first + count - 1 in row-major order, whatever the pieces. `tensor` has passed
// check_pieces and has as many elements.
void copy_elements(const SourceTensor& tensor, int64_t first, int64_t count, std::byte* out);

}  // namespace weir
