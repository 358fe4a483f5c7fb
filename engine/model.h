#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "engine/safetensors.h"
#include "engine/spec.h"
#include "engine/weights.h"
#include "kernels/backend.h"

namespace weir {

// A checkpoint folder, loaded: spec, weights, and the files they lie in. Constant. Outlives the
// runner; outlived by the backend that holds its device copies.
struct Model {
  ModelSpec spec;
  Safetensors files;
  ModelWeights weights;
};

absl::StatusOr<Model> load_model(const std::string& folder, Backend& backend);

}  // namespace weir
