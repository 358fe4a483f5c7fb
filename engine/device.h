#pragma once
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace weir {

// Devices by the names that users give them: cpu, cuda (the first GPU) or cuda:N.
absl::Status check_device(const std::string& name);  // the name alone

// How a GPU's linear layers take their vectors: "split" (high and low bf16 halves) or "bf16".
// Refused when the device has no such choice.
absl::Status check_vectors(const std::string& vectors, const std::string& device);

// `cpu` is for a device of that name, what follows for a GPU (CudaOptions). Unavailable when the
// machine has no such device.
absl::StatusOr<std::unique_ptr<Backend>> open_device(const std::string& name,
                                                     const CpuOptions& cpu = {},
                                                     const std::string& vectors = "split",
                                                     bool defer_writes = true);

}  // namespace weir
