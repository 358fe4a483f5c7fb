#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "absl/status/statusor.h"

namespace weir {

struct ConvertOptions {
  std::string checkpoint;                   // a Megatron checkpoint's folder
  std::string out;                          // the folder to make; must not exist, or be empty
  std::string tokenizer;                    // a sentencepiece model to copy; "": none
  int64_t eos = 2;
  std::set<std::string> ignored_arguments;
};

struct ConvertReport {
  std::string source;                       // the iteration's folder
  size_t tensors = 0;
  uint64_t bytes = 0;                       // of model.safetensors
  // What was left out: names with layer numbers replaced by *, and how many each.
  std::map<std::string, size_t> skipped;
};

// Converts a Megatron checkpoint into a folder that weir-server serves. Writes beside `out`, under
// a name that ends in .partial-PID, and renames it when all is there: an error leaves nothing.
absl::StatusOr<ConvertReport> convert(const ConvertOptions& options);

}  // namespace weir
