#include "engine/model.h"

#include <utility>

#include "engine/read_spec.h"

namespace weir {

absl::StatusOr<Model> load_model(const std::string& folder, Backend& backend) {
  absl::StatusOr<ModelSpec> spec = read_spec_folder(folder);
  if (!spec.ok()) return spec.status();
  absl::StatusOr<Safetensors> files = Safetensors::open_folder(folder);
  if (!files.ok()) return files.status();
  absl::StatusOr<ModelWeights> weights = read_weights(*spec, *files, backend);
  if (!weights.ok()) return weights.status();
  return Model{*std::move(spec), *std::move(files), *std::move(weights)};
}

}  // namespace weir
