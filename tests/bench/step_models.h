#pragma once
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "engine/model.h"
#include "kernels/backend.h"
#include "tests/bench/bench_util.h"

// Models of random weights in memory, for benchmarks: no checkpoint, no files.
namespace weir {

struct ModelShape {
  const char* name;
  int32_t layers = 24, dim = 2048, hidden = 5632, vocab = 32000;
  Mixer mixer;
};

inline DeltaMixer mixer_of(DecayGate decay, OutputGate gate, Strength strength, int32_t heads) {
  return {.key_heads = heads, .value_heads = heads, .key_dim = 128, .value_dim = 128,
          .decay = decay, .strength = strength, .output_gate = gate};
}

// Weights at changing places of one random block, so that no two tensors are the same.
class RandomWeights {
 public:
  RandomWeights(Backend& backend, int64_t largest)
      : backend_(backend), block_(random_bf16(size_t(largest) + (size_t(1) << 20))),
        floats_(random_floats(size_t(1) << 20, 0.5f)) {}

  Matrix matrix(int32_t rows, int32_t cols) {
    Matrix m{.rows = rows, .cols = cols, .dtype = DType::BF16};
    at_ = (at_ + 64 * 1031) % ((size_t(1) << 20) - 64);
    m.data = backend_.adopt(block_.data() + at_, m.bytes());
    bytes += m.bytes();
    return m;
  }
  const float* vector(int64_t size) {
    float_at_ = (float_at_ + 1600) % (floats_.size() / 2);
    return static_cast<const float*>(
        backend_.adopt(floats_.data() + float_at_, size_t(size) * sizeof(float)));
  }
  size_t bytes = 0;

 private:
  Backend& backend_;
  std::vector<uint16_t> block_;
  std::vector<float> floats_;
  size_t at_ = 0, float_at_ = 0;
};

inline DeltaWeights random_mixer(const DeltaMixer& m, int32_t dim, RandomWeights& random) {
  const int32_t keys = m.key_heads * m.key_dim, values = m.value_heads * m.value_dim;
  DeltaWeights w{.q = random.matrix(keys, dim), .k = random.matrix(keys, dim),
                 .v = random.matrix(values, dim), .conv_q = random.vector(4 * keys),
                 .conv_k = random.vector(4 * keys), .conv_v = random.vector(4 * values)};
  if (m.decay == DecayGate::PerHead) w.a = random.matrix(m.value_heads, dim);
  if (m.decay == DecayGate::PerChannel) {
    w.f0 = random.matrix(m.value_dim, dim);
    w.f1 = random.matrix(keys, m.value_dim);
  }
  w.b = random.matrix(m.value_heads, dim);
  w.decay_a = random.vector(m.value_heads);
  w.dt_bias = random.vector(keys);
  if (m.output_gate == OutputGate::Silu) w.g = random.matrix(values, dim);
  if (m.output_gate == OutputGate::LowRankSigmoid) {
    w.g0 = random.matrix(m.value_dim, dim);
    w.g1 = random.matrix(values, m.value_dim);
    w.g1_bias = random.vector(values);
  }
  w.norm = random.vector(m.value_dim);
  w.o = random.matrix(dim, values);
  return w;
}

// Four mixtures of 64x64 a head: the state of as many heads of 128x128.
inline SwilaMixer swila_of(bool gated, bool temporal, int32_t heads) {
  return {.heads = heads, .mixtures = 4, .head_dim = 64, .router_rank = 64, .beta_rank = 64,
          .gate_rank = 64, .temporal = temporal, .gated = gated, .conv = {.width = 4}};
}

inline SwilaWeights random_mixer(const SwilaMixer& m, int32_t dim, RandomWeights& random) {
  const int32_t channels = m.heads * m.head_dim, mixed = channels * m.mixtures;
  const auto low_rank = [&](int32_t rank) {
    return LowRank{random.matrix(rank, dim), random.matrix(mixed, rank)};
  };
  SwilaWeights w{.q = random.matrix(channels, dim), .k = random.matrix(channels, dim),
                 .v = random.matrix(channels, dim), .conv_q = random.vector(4 * channels),
                 .conv_k = random.vector(4 * channels), .conv_v = random.vector(4 * channels)};
  if (m.temporal) {
    w.key_mix = random.matrix(channels, dim);
    w.query_mix = random.matrix(channels, dim);
    w.key_mix_bias = random.vector(channels);
    w.query_mix_bias = random.vector(channels);
  }
  w.key_router = low_rank(m.router_rank);
  w.query_router = low_rank(m.router_rank);
  w.beta = low_rank(m.beta_rank);
  if (m.gated) {
    w.decay = low_rank(m.gate_rank);
    w.decay_a = random.vector(m.heads * m.mixtures);
    w.dt_bias = random.vector(mixed);
  }
  w.norm = random.vector(m.head_dim);
  w.o = random.matrix(dim, channels);
  return w;
}

inline MixerWeights random_mixer(const Mixer& mixer, int32_t dim, RandomWeights& random) {
  if (const auto* swila = std::get_if<SwilaMixer>(&mixer)) return random_mixer(*swila, dim, random);
  return random_mixer(std::get<DeltaMixer>(mixer), dim, random);
}

// A Model owns a checkpoint's files; this one has a single number in them.
inline Safetensors no_files() {
  const std::string path = std::filesystem::temp_directory_path() / "weir_step_bench.safetensors";
  const std::string header = R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  )";
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length) << header;
  file.write("\0\0\0\0", 4);
  file.close();
  absl::StatusOr<Safetensors> files = Safetensors::open_file(path);
  std::filesystem::remove(path);
  return std::move(files).value();
}

inline Model random_model(const ModelShape& shape, RandomWeights& random) {
  Model model{.files = no_files()};
  model.spec = {.model_type = shape.name, .dim = shape.dim, .vocab = shape.vocab};
  model.weights.embedding = random.matrix(shape.vocab, shape.dim);
  for (int32_t i = 0; i < shape.layers; ++i) {
    model.spec.layers.push_back({shape.mixer, Mlp{shape.hidden}});
    LayerWeights layer{.mixer_norm = random.vector(shape.dim)};
    layer.mixer = random_mixer(shape.mixer, shape.dim, random);
    layer.mlp_norm = random.vector(shape.dim);
    layer.gate = random.matrix(shape.hidden, shape.dim);
    layer.up = random.matrix(shape.hidden, shape.dim);
    layer.down = random.matrix(shape.dim, shape.hidden);
    model.weights.layers.push_back(std::move(layer));
  }
  model.weights.norm = random.vector(shape.dim);
  model.weights.head = random.matrix(shape.vocab, shape.dim);
  return model;
}

}  // namespace weir
