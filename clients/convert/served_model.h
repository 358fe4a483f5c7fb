#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/convert/megatron_arguments.h"
#include "clients/convert/megatron_checkpoint.h"
#include "nlohmann/json.hpp"

namespace weir {

// A run of a source tensor's elements, in row-major order.
struct Extent {
  const SourceTensor* source = nullptr;
  int64_t first = 0, count = 0;
};

// A tensor to write: runs one after the other, in the sources' type unless one is added.
struct ServedTensor {
  std::string name;
  TensorType type = TensorType::BF16;       // F32 with plus_one
  std::vector<int64_t> shape;
  std::vector<Extent> parts;
  bool plus_one = false;                    // each element gets 1 added
};

// A folder of Weir's own layout (engine/weir_layout.md), before it is written.
struct ServedModel {
  nlohmann::json config;
  std::vector<ServedTensor> tensors;        // borrow from the checkpoint
};

// Refuses a tensor that is missing, has another shape or a type that is not served, and one that
// the model has no place for.
absl::StatusOr<ServedModel> plan_served_model(const MegatronCheckpoint& checkpoint,
                                              const MegatronArguments& arguments, int64_t eos);

}  // namespace weir
