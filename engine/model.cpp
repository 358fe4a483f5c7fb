#include "engine/model.h"

#include <utility>

#include "engine/lower.h"
#include "engine/read_spec.h"

namespace weir {
namespace {

// Whether the backend has every op that a step of this model is made of.
absl::Status check_ops(const ModelSpec& spec, const std::string& folder, const Backend& backend) {
  const Limits limits{.slots = 1, .step_tokens = 1};
  Workspace measure;
  const Program program =
      lower(spec, weight_shapes(spec), nullptr, limits, {}, {1, 1, 1}, measure);
  const char* missing = backend.unserved(program);
  if (missing == nullptr) return absl::OkStatus();
  return absl::UnimplementedError(folder + "/config.json: model_type: expected a type that " +
                                  backend.info().name + " serves, found " + spec.model_type +
                                  ", which needs the op " + missing);
}

}  // namespace

absl::StatusOr<Model> load_model(const std::string& folder, Backend& backend) {
  absl::StatusOr<ModelSpec> spec = read_spec_folder(folder);
  if (!spec.ok()) return spec.status();
  const absl::Status runs = check_ops(*spec, folder, backend);
  if (!runs.ok()) return runs;
  absl::StatusOr<Safetensors> files = Safetensors::open_folder(folder);
  if (!files.ok()) return files.status();
  adopt_stored_ranks(*files, *spec);
  absl::StatusOr<ModelWeights> weights = read_weights(*spec, *files, backend);
  if (!weights.ok()) return weights.status();
  return Model{*std::move(spec), *std::move(files), *std::move(weights)};
}

}  // namespace weir
