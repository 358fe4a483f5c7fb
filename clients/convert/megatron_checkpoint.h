#pragma once
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/convert/source_tensor.h"
#include "clients/convert/torch_archive.h"
#include "engine/mapped_file.h"

namespace weir {

// A checkpoint of Megatron-LM, opened: its arguments and the model's tensors. Holds the mappings
// that the tensors are views into.
struct MegatronCheckpoint {
  std::string folder;                       // of the iteration
  std::string arguments_file;               // for messages about `arguments`
  const Value* arguments = nullptr;         // an argparse.Namespace
  std::map<std::string, SourceTensor> tensors;
  std::vector<std::string> skipped;         // what is not of the model, by name

  std::deque<MappedFile> files;
  std::deque<TorchArchive> archives;
};

// `path` is the folder with latest_checkpointed_iteration.txt or that of one iteration, in either
// format: `torch` (mp_rank_00/model_optim_rng.pt) or `torch_dist` (.metadata, common.pt, *.distcp).
// The optimizer and Transformer Engine's _extra_state are skipped. Checkpoints of more than one
// tensor- or pipeline-parallel rank in the `torch` format are refused.
absl::StatusOr<MegatronCheckpoint> open_megatron(const std::string& path);

}  // namespace weir
