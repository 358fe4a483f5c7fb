// Converts a Megatron-LM checkpoint into a folder that weir-server serves.
#include "clients/convert/convert.h"

#include <charconv>
#include <cstdio>
#include <cstring>
#include <string>

namespace weir {
namespace {

constexpr char kUsage[] =
    "usage: weir-convert CHECKPOINT OUT [--tokenizer FILE] [--eos ID]\n"
    "                    [--ignore_argument NAME]...\n"
    "\n"
    "Converts a Megatron-LM checkpoint of the \"Linear Attention Architectures\" family into the\n"
    "folder OUT: config.json (model_type weir), model.safetensors and tokenizer.model.\n"
    "\n"
    "CHECKPOINT is the folder with latest_checkpointed_iteration.txt, or that of one iteration.\n"
    "Two formats are read: torch (mp_rank_00/model_optim_rng.pt, one rank) and torch_dist\n"
    "(.metadata, common.pt, *.distcp, any number of ranks). Pickles are read as data: nothing in\n"
    "them is imported or called. The optimizer and Transformer Engine's _extra_state are left\n"
    "out. An unknown opcode, class, dtype, argument or tensor is refused, by name.\n"
    "\n"
    "OUT must not exist, or be empty. It is written under the name OUT.partial-PID and renamed at\n"
    "the end; a conversion that fails leaves nothing behind.\n"
    "\n"
    "  --tokenizer FILE        the sentencepiece model the checkpoint was trained with, copied to\n"
    "                          tokenizer.model. Checkpoints hold only a path to it.\n"
    "  --eos ID                the id that ends an answer; default 2, </s> of Llama 2's tokenizer\n"
    "  --ignore_argument NAME  lets an argument of Megatron pass that weir-convert does not know\n"
    "                          (cler_*, attn_res_*, linear_*, kda_*); may be repeated. Only for\n"
    "                          one that does not change what the model computes.\n"
    "  --help                  this text\n"
    "\n"
    "Exit code 0: converted, 1: refused or failed, 2: wrong usage.\n";

bool parse_id(const std::string& text, int64_t& id) {
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, id);
  return read.ec == std::errc() && read.ptr == end && id >= 0 && id <= INT32_MAX;
}

// The first thing that is wrong with the command line, or "".
std::string parse(int argc, char** argv, ConvertOptions& options) {
  std::string* places[] = {&options.checkpoint, &options.out};
  size_t given = 0;
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i], value;
    if (!flag.starts_with("--")) {
      if (given == 2) return "expected two folders, found also \"" + flag + "\"";
      *places[given++] = flag;
      continue;
    }
    const size_t equals = flag.find('=');
    const std::string name = flag.substr(0, equals);
    if (name != "--tokenizer" && name != "--eos" && name != "--ignore_argument") {
      return name + ": unknown flag";
    }
    if (equals == std::string::npos && i + 1 == argc) return name + ": expected a value";
    value = equals == std::string::npos ? argv[++i] : flag.substr(equals + 1);
    if (value.empty()) return name + ": expected a value";
    if (name == "--tokenizer") options.tokenizer = value;
    if (name == "--ignore_argument") options.ignored_arguments.insert(value);
    if (name == "--eos" && !parse_id(value, options.eos)) {
      return "--eos: expected a token id, found \"" + value + "\"";
    }
  }
  if (given != 2 || options.checkpoint.empty() || options.out.empty()) {
    return "expected a checkpoint and a folder to make; see --help";
  }
  return "";
}

int run(const ConvertOptions& options) {
  const absl::StatusOr<ConvertReport> report = convert(options);
  if (!report.ok()) {
    std::fprintf(stderr, "weir-convert: %s\n", std::string(report.status().message()).c_str());
    return 1;
  }
  for (const auto& [name, count] : report->skipped) {
    std::printf("left out: %s (%zu)\n", name.c_str(), count);
  }
  std::printf("%s -> %s: %zu tensors, %.1f MB\n", report->source.c_str(), options.out.c_str(),
              report->tensors, double(report->bytes) / 1e6);
  if (options.tokenizer.empty()) {
    std::printf("no --tokenizer: weir-server needs a tokenizer.model in %s\n",
                options.out.c_str());
  }
  return 0;
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") != 0) continue;
    std::fputs(weir::kUsage, stdout);
    return 0;
  }
  weir::ConvertOptions options;
  const std::string wrong = weir::parse(argc, argv, options);
  if (!wrong.empty()) {
    std::fprintf(stderr, "weir-convert: %s\n", wrong.c_str());
    return 2;
  }
  return weir::run(options);
}
