#include "clients/convert/convert.h"

#include <unistd.h>

#include <cctype>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "clients/convert/megatron_arguments.h"
#include "clients/convert/megatron_checkpoint.h"
#include "clients/convert/safetensors_writer.h"
#include "clients/convert/served_model.h"
#include "engine/json.h"
#include "engine/read_spec.h"

namespace weir {
namespace {

namespace fs = std::filesystem;

constexpr size_t kTokenizerBytesMax = 256 << 20;

absl::Status system_error(const std::string& path, const char* verb, const std::error_code& code) {
  return absl::UnavailableError(absl::StrCat(path, ": cannot ", verb, ": ", code.message()));
}

// A folder that is removed again unless it is renamed.
class PartialFolder {
 public:
  explicit PartialFolder(const std::string& out)
      : out_(out), path_(absl::StrCat(out, ".partial-", getpid())) {}
  PartialFolder(const PartialFolder&) = delete;
  ~PartialFolder() {
    std::error_code ignored;
    if (created_) fs::remove_all(path_, ignored);
  }

  absl::Status create() {
    std::error_code code;
    if (fs::exists(out_, code) && !fs::is_empty(out_, code)) {
      return absl::AlreadyExistsError(out_ + ": expected no such folder, or an empty one");
    }
    created_ = fs::create_directory(path_, code);
    return created_ ? absl::OkStatus() : system_error(path_, "create", code);
  }
  absl::Status keep() {
    std::error_code code;
    fs::rename(path_, out_, code);
    if (code) return system_error(out_, "rename the finished folder to it", code);
    created_ = false;
    return absl::OkStatus();
  }
  std::string file(const char* name) const { return absl::StrCat(path_, "/", name); }

 private:
  std::string out_, path_;
  bool created_ = false;
};

// "decoder.layers.12.mlp.x" to "decoder.layers.*.mlp.x".
std::string without_numbers(const std::string& name) {
  std::string out;
  for (const char c : name) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) {
      out += c;
    } else if (out.empty() || out.back() != '*') {
      out += '*';
    }
  }
  return out;
}

std::string folder_without_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

}  // namespace

absl::StatusOr<ConvertReport> convert(const ConvertOptions& options) {
  // Everything is read and checked, checksums too, before the first byte is written.
  std::string tokenizer;
  if (!options.tokenizer.empty()) {
    absl::StatusOr<std::string> text = read_text_file(options.tokenizer, kTokenizerBytesMax);
    if (!text.ok()) return text.status();
    tokenizer = *std::move(text);
  }
  const absl::StatusOr<MegatronCheckpoint> checkpoint = open_megatron(options.checkpoint);
  if (!checkpoint.ok()) return checkpoint.status();
  const absl::StatusOr<MegatronArguments> arguments = read_arguments(
      checkpoint->arguments, checkpoint->arguments_file, options.ignored_arguments);
  if (!arguments.ok()) return arguments.status();
  absl::StatusOr<ServedModel> model = plan_served_model(*checkpoint, *arguments, options.eos);
  if (!model.ok()) return model.status();
  model->config["converted_from"] =
      "Megatron-LM, " + fs::path(folder_without_slashes(checkpoint->folder)).filename().string();
  // A combination that the server would refuse is refused here, in its words.
  const std::string out = folder_without_slashes(options.out);
  const std::string config = model->config.dump(2) + "\n";
  absl::Status status = read_spec(config, out + "/config.json").status();
  if (!status.ok()) return status;

  PartialFolder folder(out);
  status = folder.create();
  if (!status.ok()) return status;
  status = write_new_file(folder.file("config.json"), config);
  if (!status.ok()) return status;
  if (!options.tokenizer.empty()) {
    status = write_new_file(folder.file("tokenizer.model"), tokenizer);
    if (!status.ok()) return status;
  }
  const std::string weights = folder.file("model.safetensors");
  status = write_safetensors(weights, model->tensors);
  if (!status.ok()) return status;
  std::error_code ignored;
  ConvertReport report{.source = checkpoint->folder,
                       .tensors = model->tensors.size(),
                       .bytes = fs::file_size(weights, ignored)};
  for (const std::string& name : checkpoint->skipped) ++report.skipped[without_numbers(name)];
  status = folder.keep();
  if (!status.ok()) return status;
  return report;
}

}  // namespace weir
