// Compares a checkpoint's logits with golden ones that lie beside it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "engine/device.h"
#include "engine/model.h"
#include "engine/runner.h"
#include "engine/safetensors.h"
#include "engine/state_pool.h"

namespace weir {
namespace {

constexpr char kUsage[] =
    "usage: weir-verify MODEL_DIR [--tolerance 1e-3] [--golden FILE] [--threads N]\n"
    "                   [--simd -1|0|1|2] [--plain] [--device cpu|cuda|cuda:N]\n"
    "                   [--vectors split|bf16] [--full_only]\n"
    "\n"
    "Runs the prompt of MODEL_DIR/golden.safetensors through the model: the whole prompt at\n"
    "once, token by token, and in chunks of 1, 7 and 64 tokens. Prints the largest absolute\n"
    "difference to the golden logits and to the whole-prompt run, then the greedy answer's\n"
    "agreement. Exit code 0: all within the tolerance, 1: not, 2: wrong usage.\n"
    "\n"
    "golden.safetensors: prompt [n] int32; logits_full [n, vocab] float32; optional\n"
    "logits_step [n, vocab] float32; optional greedy [m] int32. --full_only leaves logits_step\n"
    "out: fla's own RWKV-7, fed token by token, starts from memory that it never cleared.\n"
    "--vectors: how linear layers, and softmax attention over prompts, take vectors on a GPU:\n"
    "split, as high and low halves, or bf16, rounded: faster, and less exact.\n";

struct Options {
  std::string folder, golden;
  double tolerance = 1e-3;
  CpuOptions cpu;
  std::string device = "cpu", vectors = "split";
  bool full_only = false;  // compare with logits_full alone
};

struct Golden {
  std::vector<Token> prompt, greedy;
  std::vector<float> logits_full, logits_step;  // [prompt, vocab]; step may be empty
};

template <typename T>
absl::StatusOr<std::vector<T>> read_array(const Safetensors& file, const std::string& path,
                                          const char* key, TensorType type, bool required) {
  const TensorView* tensor = file.find(key);
  if (tensor == nullptr) {
    if (!required) return std::vector<T>();
    return absl::NotFoundError(path + ": tensor " + key + " is missing");
  }
  if (tensor->type != type) {
    return absl::InvalidArgumentError(path + ": tensor " + key + ": expected " + name(type) +
                                      ", found " + name(tensor->type));
  }
  std::vector<T> values(tensor->data.size() / sizeof(T));
  std::memcpy(values.data(), tensor->data.data(), tensor->data.size());
  return values;
}

absl::StatusOr<Golden> read_golden(const std::string& path, int32_t vocab) {
  absl::StatusOr<Safetensors> file = Safetensors::open_file(path);
  if (!file.ok()) return file.status();
  auto prompt = read_array<Token>(*file, path, "prompt", TensorType::I32, true);
  if (!prompt.ok()) return prompt.status();
  auto full = read_array<float>(*file, path, "logits_full", TensorType::F32, true);
  if (!full.ok()) return full.status();
  auto step = read_array<float>(*file, path, "logits_step", TensorType::F32, false);
  if (!step.ok()) return step.status();
  auto greedy = read_array<Token>(*file, path, "greedy", TensorType::I32, false);
  if (!greedy.ok()) return greedy.status();
  const size_t expected = prompt->size() * size_t(vocab);
  for (const auto* logits : {&*full, &*step}) {
    if (logits->size() == expected || (logits == &*step && logits->empty())) continue;
    return absl::InvalidArgumentError(
        path + ": logits: expected prompt * vocab = " + std::to_string(expected) +
        " numbers, found " + std::to_string(logits->size()));
  }
  const auto outside = [&](Token id) { return id < 0 || id >= vocab; };
  if (prompt->empty() || std::ranges::any_of(*prompt, outside) ||
      std::ranges::any_of(*greedy, outside)) {
    return absl::InvalidArgumentError(path + ": prompt and greedy: expected token ids below " +
                                      std::to_string(vocab) + ", at least one");
  }
  return Golden{*std::move(prompt), *std::move(greedy), *std::move(full), *std::move(step)};
}

// One sequence on a model of its own, fed by hand.
class Sequence {
 public:
  Sequence(const Model& model, const StatePool& pool, const Limits& limits, Backend& backend)
      : runner_(model, pool, limits, backend) {
    for (int32_t page = 0; page < limits.pages; ++page) pages_.push_back(page);
  }

  // Logits after each of the tokens, [tokens, vocab]. A first call, or `fresh`, starts anew.
  std::vector<float> feed(std::span<const Token> tokens, bool fresh) {
    if (fresh) position_ = 0;
    StepBatch batch;
    batch.tokens.assign(tokens.begin(), tokens.end());
    batch.rows.push_back({.first = position_, .count = int32_t(tokens.size()), .pages = pages_});
    for (int32_t i = 0; i < int32_t(tokens.size()); ++i) {
      batch.outputs.push_back({.token = i, .position = position_ + i + 1});
    }
    runner_.step(batch);
    position_ += int32_t(tokens.size());
    std::vector<float> logits;
    for (int32_t i = 0; i < int32_t(tokens.size()); ++i) {
      const std::vector<float> row = runner_.logits(i);
      logits.insert(logits.end(), row.begin(), row.end());
    }
    return logits;
  }

  // The same, cut into chunks.
  std::vector<float> feed_chunks(std::span<const Token> tokens, size_t chunk) {
    std::vector<float> logits;
    for (size_t begin = 0; begin < tokens.size(); begin += chunk) {
      const size_t count = std::min(chunk, tokens.size() - begin);
      const std::vector<float> part = feed(tokens.subspan(begin, count), begin == 0);
      logits.insert(logits.end(), part.begin(), part.end());
    }
    return logits;
  }

 private:
  Runner runner_;
  std::vector<int32_t> pages_;
  int32_t position_ = 0;
};

// The largest absolute difference; infinite when either holds a number that is not finite.
double difference(std::span<const float> a, std::span<const float> b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double gap = std::fabs(double(a[i]) - double(b[i]));
    worst = std::isfinite(gap) ? std::max(worst, gap) : HUGE_VAL;
  }
  return worst;
}

Token most_likely(std::span<const float> logits) {
  return Token(std::ranges::max_element(logits) - logits.begin());
}

// Greedy ids agree, or the first that differs is a near-tie: then the golden id's logit is close.
bool verify_greedy(Sequence& sequence, const Golden& golden, size_t vocab, double tolerance) {
  std::vector<float> logits = sequence.feed(golden.prompt, true);
  for (size_t i = 0; i < golden.greedy.size(); ++i) {
    const std::span<const float> last(logits.end() - ptrdiff_t(vocab), logits.end());
    const Token ours = most_likely(last), expected = golden.greedy[i];
    if (ours != expected) {
      const double gap = double(last[size_t(ours)]) - double(last[size_t(expected)]);
      const bool tie = gap <= 2 * tolerance;
      std::printf("greedy: token %zu of %zu: %d, golden %d, gap %.3g: %s\n", i + 1,
                  golden.greedy.size(), ours, expected, gap, tie ? "a near-tie" : "WRONG");
      return tie;
    }
    if (i + 1 < golden.greedy.size()) logits = sequence.feed({&expected, 1}, false);
  }
  std::printf("greedy: all %zu tokens agree\n", golden.greedy.size());
  return true;
}

absl::StatusOr<bool> verify(const Options& options) {
  const auto opened = open_device(options.device, options.cpu, options.vectors);
  if (!opened.ok()) return opened.status();
  Backend* const backend = opened->get();
  absl::StatusOr<Model> model = load_model(options.folder, *backend);
  if (!model.ok()) return model.status();
  const std::string path =
      options.golden.empty() ? options.folder + "/golden.safetensors" : options.golden;
  absl::StatusOr<Golden> golden = read_golden(path, model->spec.vocab);
  if (!golden.ok()) return golden.status();

  const auto total = int32_t(golden->prompt.size() + golden->greedy.size() + 1);
  Limits limits{.slots = 1,
                .step_tokens = int32_t(golden->prompt.size()),
                .chunk_tokens = int32_t(golden->prompt.size()),
                .prompt_tokens = int32_t(golden->prompt.size()),
                .new_tokens = int32_t(golden->greedy.size() + 1),
                .vocab = model->spec.vocab};
  if (state_size(model->spec).kv_per_token > 0) {
    limits.page_tokens = 16;
    limits.pages = (total + limits.page_tokens - 1) / limits.page_tokens;
  }
  const StatePool pool(model->spec, limits, *backend);
  Sequence sequence(*model, pool, limits, *backend);
  std::printf("%s: %s, %s\n", options.folder.c_str(), model->spec.model_type.c_str(),
              backend->info().name.c_str());

  bool good = true;
  const std::vector<float> whole = sequence.feed(golden->prompt, true);
  const auto report = [&](const char* what, std::span<const float> logits) {
    const double to_full = difference(logits, golden->logits_full);
    const bool stepwise = !golden->logits_step.empty() && !options.full_only;
    const double to_step = stepwise ? difference(logits, golden->logits_step) : 0;
    const double to_whole = difference(logits, whole);
    std::printf("%-12s max difference to golden %.3g, ", what, to_full);
    if (stepwise) std::printf("stepwise golden %.3g, ", to_step);
    std::printf("whole %.3g\n", to_whole);
    good = good && to_full <= options.tolerance && to_step <= options.tolerance &&
           to_whole <= options.tolerance;
  };
  report("whole", whole);
  for (const size_t chunk : {1, 7, 64}) {
    const std::string what = "chunks of " + std::to_string(chunk);
    report(what.c_str(), sequence.feed_chunks(golden->prompt, chunk));
  }
  if (!golden->greedy.empty()) {
    const auto vocab = size_t(model->spec.vocab);
    good = verify_greedy(sequence, *golden, vocab, options.tolerance) && good;
  }
  std::printf("%s (tolerance %.3g)\n", good ? "PASS" : "FAIL", options.tolerance);
  return good;
}

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--plain" || flag == "--full_only") {
      (flag == "--plain" ? options.cpu.plain : options.full_only) = true;
      continue;
    }
    if (!flag.starts_with("--")) {
      if (!options.folder.empty()) return false;
      options.folder = flag;
      continue;
    }
    if (i + 1 == argc) return false;
    const char* value = argv[++i];
    char* end = nullptr;
    std::string* const text = flag == "--golden"    ? &options.golden
                              : flag == "--device"  ? &options.device
                              : flag == "--vectors" ? &options.vectors
                                                    : nullptr;
    if (text != nullptr) {
      *text = value;
      continue;
    }
    const double number = std::strtod(value, &end);
    if (end == value || *end != '\0') return false;
    if (flag == "--tolerance") {
      options.tolerance = number;
    } else if (flag == "--threads" && number >= 1 && number <= 1024) {
      options.cpu.threads = int(number);
    } else if (flag == "--simd" && number >= -1 && number <= 2) {
      options.cpu.simd = int(number);
    } else {
      return false;
    }
  }
  return !options.folder.empty() && options.tolerance >= 0;
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) {
  weir::Options options;
  const bool help = argc == 2 && std::strcmp(argv[1], "--help") == 0;
  if (help || !weir::parse(argc, argv, options)) {
    std::fputs(weir::kUsage, help ? stdout : stderr);
    return help ? 0 : 2;
  }
  const absl::StatusOr<bool> good = weir::verify(options);
  if (!good.ok()) {
    std::fprintf(stderr, "weir-verify: %s\n", std::string(good.status().message()).c_str());
    return 1;
  }
  return *good ? 0 : 1;
}
