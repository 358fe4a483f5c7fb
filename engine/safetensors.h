#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weir {

enum class TensorType : uint8_t { F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL };
const char* name(TensorType type);       // "BF16"
size_t size_of(TensorType type);         // bytes an element

// One tensor of a file: a view into the mapping, valid as long as the Safetensors object. Its
// offset in the file is a multiple of its element size; files where it is not are refused.
struct TensorView {
  TensorType type = TensorType::F32;
  std::vector<int64_t> shape;            // product fits int64_t
  std::span<const std::byte> data;
  const std::string* file = nullptr;     // the path, for messages

  int64_t elements() const;
};

// The header of one file image, checked: lengths, JSON, dtypes, shapes (no overflow), offsets
// (inside the file, contiguous without overlap or hole, equal to shape * dtype size).
// Trusts nothing. Errors are InvalidArgument and name the file (as `path`) and the tensor. The
// views borrow both `file` and `path`.
absl::StatusOr<std::map<std::string, TensorView>> parse_safetensors(
    std::span<const std::byte> file, const std::string& path);

// The tensors of a checkpoint folder: model.safetensors, or the shards that
// model.safetensors.index.json names. Files are mapped read-only for the object's life.
class Safetensors {
 public:
  static absl::StatusOr<Safetensors> open_folder(const std::string& folder);
  static absl::StatusOr<Safetensors> open_file(const std::string& path);
  Safetensors(Safetensors&&) noexcept;
  Safetensors& operator=(Safetensors&&) noexcept;
  ~Safetensors();

  const std::map<std::string, TensorView>& tensors() const;
  const TensorView* find(const std::string& name) const;  // null: absent
  size_t bytes() const;                                   // of all mapped files
  const std::string& path() const;                        // the file, or the index of the shards

 private:
  struct Impl;
  explicit Safetensors(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir
