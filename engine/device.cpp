#include "engine/device.h"

#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace weir {
namespace {

// N of cuda:N, -1 of cpu.
std::optional<int> gpu_of(const std::string& name) {
  if (name == "cpu") return -1;
  if (name == "cuda") return 0;
  absl::string_view number = name;
  int gpu = 0;
  const bool valid = absl::ConsumePrefix(&number, "cuda:") && absl::SimpleAtoi(number, &gpu) &&
                     gpu >= 0 && number == absl::StrCat(gpu);
  if (!valid) return std::nullopt;
  return gpu;
}

}  // namespace

absl::Status check_device(const std::string& name) {
  if (gpu_of(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("device: expected cpu, cuda or cuda:N, found \"", name, "\""));
}

absl::Status check_vectors(const std::string& vectors, const std::string& device) {
  if (vectors == "split") return absl::OkStatus();
  if (vectors != "bf16") {
    return absl::InvalidArgumentError(
        absl::StrCat("vectors: expected split or bf16, found \"", vectors, "\""));
  }
  if (gpu_of(device).value_or(-1) >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("vectors: expected split on the device ", device, ", found bf16"));
}

absl::StatusOr<std::unique_ptr<Backend>> open_device(const std::string& name,
                                                     const CpuOptions& cpu,
                                                     const std::string& vectors,
                                                     bool defer_writes) {
  if (absl::Status status = check_device(name); !status.ok()) return status;
  if (absl::Status status = check_vectors(vectors, name); !status.ok()) return status;
  const int gpu = *gpu_of(name);
  if (gpu < 0) return make_cpu_backend(cpu);
  std::string error;
  std::unique_ptr<Backend> backend = make_cuda_backend(
      gpu, &error, {.bf16_vectors = vectors == "bf16", .defer_writes = defer_writes});
  if (backend == nullptr) return absl::UnavailableError(absl::StrCat(name, ": ", error));
  return backend;
}

}  // namespace weir
