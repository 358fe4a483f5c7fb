#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/convert/pickle.h"
#include "clients/convert/zip_archive.h"
#include "engine/safetensors.h"

namespace weir {

// A tensor as it lies in a file: row-major, without gaps.
struct StoredTensor {
  TensorType type = TensorType::F32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// What torch.save wrote: a zip archive of one pickle and of the storages that its tensors are views
// of. Borrows the bytes; tensors are views into them.
class TorchArchive {
 public:
  static absl::StatusOr<TorchArchive> open(std::span<const std::byte> bytes,
                                           const std::string& path);

  const Value* root() const { return pickle_.root; }

  // The tensor's elements, after a look at their checksum. `name` is for messages. Refused: a
  // storage that is missing or too short, and strides that are not those of row-major order.
  absl::StatusOr<StoredTensor> tensor(const TensorReference& reference, const std::string& name);

 private:
  std::string path_, root_name_;            // "model_optim_rng": before each entry's name
  ZipEntries entries_;
  Pickle pickle_;
  std::set<std::string_view> checked_;      // storages whose checksum was right
};

// The product of a shape's sizes; false: it does not fit.
bool count_elements(const std::vector<int64_t>& shape, int64_t& count);
std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 3]"

}  // namespace weir
