#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/model.h"
#include "engine/read_spec.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"
#include "tests/unit/checkpoint_writer.h"

namespace weir::test {

// Checkpoints of any size with random numbers: nothing sensible to say, but every byte is read and
// every product computed as in a trained one.
struct RandomModel {
  std::string model_type = "gated_deltanet";
  int32_t layers = 2, dim = 128, heads = 4, head_dim = 32, mlp_hidden = 256, vocab = 512;
  bool tied_embeddings = false;
  std::vector<int32_t> attention_layers;  // softmax attention instead, of the same heads
  TensorType type = TensorType::BF16;
  nlohmann::json more = {};  // further keys of the configuration, over the others
};

// 24 layers, hidden 2048, 16 heads of 128x128: 1.4 billion weights.
inline RandomModel model_1_3b() {
  return {.layers = 24, .dim = 2048, .heads = 16, .head_dim = 128, .mlp_hidden = 5632,
          .vocab = 32000};
}

inline nlohmann::json config_of(const RandomModel& model) {
  nlohmann::json config = {{"model_type", model.model_type},
                           {"hidden_size", model.dim},
                           {"num_hidden_layers", model.layers},
                           {"num_heads", model.heads},
                           {"intermediate_size", model.mlp_hidden},
                           {"vocab_size", model.vocab},
                           {"norm_eps", 1e-6},
                           {"tie_word_embeddings", model.tied_embeddings},
                           {"bos_token_id", 1},
                           {"eos_token_id", 2}};
  if (model.model_type == "delta_net") {
    const double expand = double(model.heads) * model.head_dim / model.dim;
    config.update({{"expand_k", expand}, {"expand_v", expand}});
  } else if (model.model_type != "transformer") {
    config.update({{"head_dim", model.head_dim}, {"expand_v", 1.0}, {"conv_size", 4}});
  }
  if (!model.attention_layers.empty()) {
    config["attn"] = {{"layers", model.attention_layers}, {"num_heads", model.heads}};
  }
  if (!model.more.is_null()) config.update(model.more);
  return config;
}

inline ModelSpec spec_of(const RandomModel& model) {
  absl::StatusOr<ModelSpec> spec = read_spec(config_of(model).dump(), "config.json");
  WEIR_CHECK(spec.ok());
  return *std::move(spec);
}

// A file that is written from its start to its end.
class FileWriter {
 public:
  explicit FileWriter(int file) : file_(file) { WEIR_CHECK(file >= 0); }
  FileWriter(const FileWriter&) = delete;
  ~FileWriter() { flush(); }

  void add(const std::string& bytes) {
    buffer_ += bytes;
    if (buffer_.size() > kBufferBytes) flush();
  }

 private:
  static constexpr size_t kBufferBytes = size_t{1} << 20;

  void flush() {
    for (size_t done = 0; done < buffer_.size();) {
      const ssize_t bytes = ::write(file_, buffer_.data() + done, buffer_.size() - done);
      WEIR_CHECK(bytes > 0);
      done += size_t(bytes);
    }
    buffer_.clear();
  }

  int file_;
  std::string buffer_;
};

// Uniform in [-1, 1): fast, as there may be billions, and the same everywhere.
class FastRandom {
 public:
  explicit FastRandom(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) {}
  float value() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return float(int32_t(state_ >> 32)) * 0x1p-31f;
  }

 private:
  uint64_t state_;
};

// Matrices keep a vector's length, norms are near 1.
template <typename Stored, typename Narrow>
void write_random_values(int64_t count, float offset, float size, const Narrow& narrow,
                         FastRandom& random, FileWriter& file) {
  constexpr int64_t kAtOnce = 1 << 16;
  std::vector<Stored> values;
  for (int64_t done = 0; done < count; done += int64_t(values.size())) {
    values.resize(size_t(std::min(kAtOnce, count - done)));
    for (Stored& value : values) value = narrow(offset + size * random.value());
    file.add({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Stored)});
  }
}

inline void write_random_tensor(const std::string& name, const TestTensor& tensor,
                                FastRandom& random, FileWriter& file) {
  const float offset = name.find("norm") != std::string::npos ? 1.0f : 0.0f;
  const float size =
      tensor.shape.size() == 2 ? std::sqrt(3.0f / float(tensor.shape[1])) : 0.3f;
  const int64_t count = elements(tensor.shape);
  const auto bf16 = [](float value) { return uint16_t(std::bit_cast<uint32_t>(value) >> 16); };
  const auto same = [](float value) { return value; };
  switch (tensor.type) {
    case TensorType::BF16:
      return write_random_values<uint16_t>(count, offset, size, bf16, random, file);
    case TensorType::F16:
      return write_random_values<uint16_t>(count, offset, size, to_half, random, file);
    default: return write_random_values<float>(count, offset, size, same, random, file);
  }
}

inline void write_random_safetensors(int file, const RandomModel& model, uint64_t seed) {
  WEIR_CHECK(model.type == TensorType::BF16 || model.type == TensorType::F16 ||
             model.type == TensorType::F32);
  const TestTensors tensors = empty_tensors(spec_of(model), model.type);
  FileWriter writer(file);
  writer.add(safetensors_image(safetensors_header(tensors), ""));
  FastRandom random(seed);
  for (const auto& [name, tensor] : tensors) write_random_tensor(name, tensor, random, writer);
}

// FOLDER/config.json and FOLDER/model.safetensors; the tokenizer is the caller's to add.
inline void write_random_checkpoint(const std::string& folder, const RandomModel& model,
                                    uint64_t seed) {
  write_file(folder + "/config.json", config_of(model).dump(1));
  const int file = ::open((folder + "/model.safetensors").c_str(),
                          O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  write_random_safetensors(file, model, seed);
  ::close(file);
}

// The same as a loaded model whose file lies in memory alone.
inline Model random_model(const RandomModel& model, uint64_t seed, Backend& backend) {
  const int file = memfd_create("random_model", MFD_CLOEXEC);
  write_random_safetensors(file, model, seed);
  absl::StatusOr<Safetensors> files =
      Safetensors::open_file("/proc/self/fd/" + std::to_string(file));
  ::close(file);  // the mapping keeps it
  WEIR_CHECK(files.ok());
  ModelSpec spec = spec_of(model);
  absl::StatusOr<ModelWeights> weights = read_weights(spec, *files, backend);
  WEIR_CHECK(weights.ok());
  return {std::move(spec), *std::move(files), *std::move(weights)};
}

}  // namespace weir::test
