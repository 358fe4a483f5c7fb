#pragma once
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/safetensors.h"
#include "engine/spec.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"
#include "tests/unit/temporary_folder.h"

namespace weir::test {

// Writes checkpoints for tests: a folder with config.json and safetensors files.

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  WEIR_CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

struct TestTensor {
  TensorType type = TensorType::F32;
  std::vector<int64_t> shape;
  std::vector<float> values;  // rounded to the type (floats by truncation: exact when they fit)
};
using TestTensors = std::map<std::string, TestTensor>;

inline int64_t elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t dimension : shape) count *= dimension;
  return count;
}

inline uint16_t to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const float size = std::abs(value);
  if (size >= 65536) return sign | 0x7c00;
  if (size < std::ldexp(1.0f, -14)) return uint16_t(sign | uint16_t(std::ldexp(size, 24)));
  const int exponent = std::ilogb(size);
  const int mantissa = int(std::ldexp(size, 10 - exponent)) - 1024;
  return uint16_t(sign | (exponent + 15) << 10 | mantissa);
}

template <class T>
void append_bytes(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

inline void append_value(std::string& bytes, TensorType type, float value) {
  switch (type) {
    case TensorType::F64: return append_bytes(bytes, double(value));
    case TensorType::F32: return append_bytes(bytes, value);
    case TensorType::F16: return append_bytes(bytes, to_half(value));
    case TensorType::BF16:
      return append_bytes(bytes, uint16_t(std::bit_cast<uint32_t>(value) >> 16));
    case TensorType::I64: return append_bytes(bytes, int64_t(value));
    case TensorType::I32: return append_bytes(bytes, int32_t(value));
    case TensorType::I16: return append_bytes(bytes, int16_t(value));
    case TensorType::I8: return append_bytes(bytes, int8_t(value));
    case TensorType::U8:
    case TensorType::BOOL: return append_bytes(bytes, uint8_t(value));
  }
}

// The length, the header padded with spaces to a multiple of 8 bytes, and the data.
inline std::string safetensors_image(std::string header, const std::string& data) {
  header.append((8 - header.size() % 8) % 8, ' ');
  std::string image;
  append_bytes(image, uint64_t(header.size()));
  return image + header + data;
}

// The header of tensors that lie end to end. Wide types come first, so that all are aligned.
inline std::string safetensors_header(const TestTensors& tensors, uint64_t* data_bytes = nullptr) {
  nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
  uint64_t begin = 0;
  for (const size_t width : {8, 4, 2, 1}) {
    for (const auto& [name, tensor] : tensors) {
      if (size_of(tensor.type) != width) continue;
      const uint64_t end = begin + uint64_t(elements(tensor.shape)) * width;
      header[name] = {{"dtype", weir::name(tensor.type)},
                      {"shape", tensor.shape},
                      {"data_offsets", {begin, end}}};
      begin = end;
    }
  }
  if (data_bytes) *data_bytes = begin;
  return header.dump();
}

inline std::string safetensors_bytes(const TestTensors& tensors) {
  std::string data;
  for (const size_t width : {8, 4, 2, 1}) {
    for (const auto& [name, tensor] : tensors) {
      if (size_of(tensor.type) != width) continue;
      for (const float value : tensor.values) append_value(data, tensor.type, value);
    }
  }
  return safetensors_image(safetensors_header(tensors), data);
}

// A file with the tensors' header and zeros that take no room on the disk: for large models.
inline void write_zero_safetensors(const std::string& path, const TestTensors& tensors) {
  uint64_t data_bytes = 0;
  const std::string head = safetensors_image(safetensors_header(tensors, &data_bytes), "");
  write_file(path, head);
  std::filesystem::resize_file(path, head.size() + data_bytes);
}

inline void write_checkpoint(const std::string& folder, const nlohmann::json& config,
                             const TestTensors& tensors) {
  write_file(folder + "/config.json", config.dump(1));
  write_file(folder + "/model.safetensors", safetensors_bytes(tensors));
}

// The tensors of a checkpoint in several files with an index.
inline void write_shards(const std::string& folder, const TestTensors& tensors, size_t shards) {
  std::vector<TestTensors> parts(shards);
  nlohmann::json map = nlohmann::json::object();
  size_t next = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t part = next++ % shards;
    parts[part][name] = tensor;
    map[name] = "model-" + std::to_string(part) + ".safetensors";
  }
  for (size_t i = 0; i < shards; ++i) {
    write_file(folder + "/model-" + std::to_string(i) + ".safetensors",
               safetensors_bytes(parts[i]));
  }
  write_file(folder + "/model.safetensors.index.json",
             nlohmann::json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
}

// --- the tensors that a model of the fla family has, written down independently of the loader ---

using Shapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

// Mixers without a table of their own are tested by the golden checkpoints.
template <typename Mixer>
void add_mixer_shapes(const Mixer&, int64_t, const std::string&, Shapes&) {
  WEIR_UNREACHABLE("no table of tensors for this mixer");
}

inline void add_mixer_shapes(const AttentionMixer& m, int64_t D, const std::string& at,
                             Shapes& out) {
  const int64_t q = int64_t(m.heads) * m.head_dim, kv = int64_t(m.kv_heads) * m.head_dim;
  out.insert(out.end(), {{at + "q_proj.weight", {q, D}},
                         {at + "k_proj.weight", {kv, D}},
                         {at + "v_proj.weight", {kv, D}},
                         {at + "o_proj.weight", {D, q}}});
  if (m.qkv_bias) {
    out.insert(out.end(),
               {{at + "q_proj.bias", {q}}, {at + "k_proj.bias", {kv}}, {at + "v_proj.bias", {kv}}});
  }
  if (m.qk_norm) {
    out.insert(out.end(),
               {{at + "q_norm.weight", {m.head_dim}}, {at + "k_norm.weight", {m.head_dim}}});
  }
}

inline void add_mixer_shapes(const DeltaMixer& m, int64_t D, const std::string& at, Shapes& out) {
  const int64_t H = m.key_heads, HV = m.value_heads, dk = m.key_dim, dv = m.value_dim;
  const int64_t decay_heads = m.decay == DecayGate::PerKeyChannel ? H : HV;
  out.insert(out.end(), {{at + "q_proj.weight", {H * dk, D}},
                         {at + "k_proj.weight", {H * dk, D}},
                         {at + "v_proj.weight", {HV * dv, D}},
                         {at + "o_norm.weight", {dv}},
                         {at + "o_proj.weight", {D, HV * dv}}});
  if (m.conv) {
    out.insert(out.end(), {{at + "q_conv1d.weight", {H * dk, 1, m.conv->width}},
                           {at + "k_conv1d.weight", {H * dk, 1, m.conv->width}},
                           {at + "v_conv1d.weight", {HV * dv, 1, m.conv->width}}});
  }
  if (m.decay == DecayGate::PerHead) {
    out.insert(out.end(),
               {{at + "a_proj.weight", {HV, D}}, {at + "A_log", {HV}}, {at + "dt_bias", {HV}}});
  } else if (m.decay != DecayGate::None) {
    out.insert(out.end(), {{at + "f_proj.0.weight", {dv, D}},
                           {at + "f_proj.1.weight", {decay_heads * dk, dv}},
                           {at + "A_log", {decay_heads}},
                           {at + "dt_bias", {decay_heads * dk}}});
  }
  if (m.strength == Strength::Beta) out.push_back({at + "b_proj.weight", {HV, D}});
  if (m.strength == Strength::EraseWrite) {
    out.insert(out.end(),
               {{at + "b_proj.weight", {H * dk, D}}, {at + "w_proj.weight", {HV * dv, D}}});
  }
  if (m.output_gate == OutputGate::Silu) out.push_back({at + "g_proj.weight", {HV * dv, D}});
  if (m.output_gate == OutputGate::LowRankSigmoid) {
    out.insert(out.end(), {{at + "g_proj.0.weight", {dv, D}},
                           {at + "g_proj.1.weight", {HV * dv, dv}},
                           {at + "g_proj.1.bias", {HV * dv}}});
  }
}

inline void add_mixer_shapes(const SwilaMixer& m, int64_t D, const std::string& at, Shapes& out) {
  const int64_t channels = int64_t(m.heads) * m.head_dim, mixed = channels * m.mixtures;
  const auto low_rank = [&](const char* name, int64_t rank) {
    out.insert(out.end(), {{at + name + ".0.weight", {rank, D}},
                           {at + name + ".1.weight", {mixed, rank}}});
  };
  for (const char* name : {"q", "k", "v"}) {
    out.insert(out.end(), {{at + name + "_proj.weight", {channels, D}},
                           {at + name + "_conv1d.weight", {channels, 1, m.conv.width}}});
  }
  out.insert(out.end(),
             {{at + "o_norm.weight", {m.head_dim}}, {at + "o_proj.weight", {D, channels}}});
  low_rank("k_router", m.router_rank);
  low_rank("q_router", m.router_rank);
  low_rank("b_proj", m.beta_rank);
  if (m.temporal) {
    out.insert(out.end(), {{at + "gk_proj.weight", {channels, D}},
                           {at + "gk_proj.bias", {channels}},
                           {at + "gq_proj.weight", {channels, D}},
                           {at + "gq_proj.bias", {channels}}});
  }
  if (!m.gated) return;
  low_rank("f_proj", m.gate_rank);
  out.insert(out.end(),
             {{at + "A_log", {int64_t(m.heads) * m.mixtures}}, {at + "dt_bias", {mixed}}});
}

inline Shapes checkpoint_shapes(const ModelSpec& spec) {
  const int64_t D = spec.dim;
  Shapes out = {{"model.embeddings.weight", {spec.vocab, D}}, {"model.norm.weight", {D}}};
  if (!spec.tied_embeddings) out.push_back({"lm_head.weight", {spec.vocab, D}});
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const LayerSpec& layer = spec.layers[i];
    const std::string at = "model.layers." + std::to_string(i) + ".";
    std::visit([&](const auto& mixer) { add_mixer_shapes(mixer, D, at + "attn.", out); },
               layer.mixer);
    out.insert(out.end(), {{at + "attn_norm.weight", {D}},
                           {at + "mlp_norm.weight", {D}},
                           {at + "mlp.gate_proj.weight", {layer.mlp->hidden, D}},
                           {at + "mlp.up_proj.weight", {layer.mlp->hidden, D}},
                           {at + "mlp.down_proj.weight", {D, layer.mlp->hidden}}});
    if (!spec.depth_residual) continue;
    out.insert(out.end(), {{at + "attn_res_proj.weight", {1, D}},
                           {at + "attn_res_norm.weight", {D}},
                           {at + "mlp_res_proj.weight", {1, D}},
                           {at + "mlp_res_norm.weight", {D}}});
  }
  if (spec.depth_residual) {
    out.insert(out.end(), {{"model.res_proj.weight", {1, D}}, {"model.res_norm.weight", {D}}});
  }
  return out;
}

// The same without numbers.
inline TestTensors empty_tensors(const ModelSpec& spec, TensorType type) {
  TestTensors tensors;
  for (const auto& [name, shape] : checkpoint_shapes(spec)) tensors[name] = {type, shape, {}};
  return tensors;
}

// Numbers of the size that training leaves: matrices keep a vector's length, norms are near 1.
inline TestTensors random_tensors(const ModelSpec& spec, TensorType type, uint32_t seed) {
  std::mt19937 random(seed);
  const auto uniform = [&] { return float(random()) / 2147483648.0f - 1.0f; };  // in [-1, 1]
  TestTensors tensors = empty_tensors(spec, type);
  for (auto& [name, tensor] : tensors) {
    const bool norm = name.find("norm") != std::string::npos;
    const float size = tensor.shape.size() == 2 ? std::sqrt(3.0f / float(tensor.shape[1])) : 0.3f;
    const int64_t count = elements(tensor.shape);
    tensor.values.reserve(size_t(count));
    for (int64_t i = 0; i < count; ++i) tensor.values.push_back((norm ? 1 : 0) + size * uniform());
  }
  return tensors;
}

}  // namespace weir::test
