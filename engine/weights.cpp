#include "engine/weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/lower.h"

namespace weir {
namespace {

using Shape = std::vector<int64_t>;

std::string text_of(const Shape& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

bool is_float(TensorType type) {
  return type == TensorType::F32 || type == TensorType::F16 || type == TensorType::BF16;
}

DType dtype_of(TensorType type) {
  if (type == TensorType::BF16) return DType::BF16;
  return type == TensorType::F16 ? DType::F16 : DType::F32;
}

float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float sign = half & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(float(mantissa), -24);
  return sign * std::ldexp(float(mantissa + 1024), exponent - 25);
}

float element(const TensorView& tensor, size_t index) {
  const std::byte* at = tensor.data.data() + index * size_of(tensor.type);
  if (tensor.type == TensorType::F32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  if (tensor.type == TensorType::F16) return from_half(bits);
  return std::bit_cast<float>(uint32_t(bits) << 16);
}

// The first commit of KDA called A_log "A", and kept dt_bias as the bias of f_proj.1. Each name is
// taken for the other only where both are there.
std::string legacy_name(const std::string& name, const Safetensors& files) {
  if (name == "model.embeddings.weight") return "model.embed_tokens.weight";
  const size_t dot = name.rfind('.');
  if (dot == std::string::npos) return "";
  const std::string prefix = name.substr(0, dot + 1), last = name.substr(dot + 1);
  if (last != "A_log" && last != "dt_bias") return "";
  const std::string a = prefix + "A", bias = prefix + "f_proj.1.bias";
  if (!files.find(a) || !files.find(bias)) return "";
  return last == "A_log" ? a : bias;
}

}  // namespace

WeightReader::WeightReader(const Safetensors& files, Backend* backend)
    : files_(&files), backend_(backend) {}

const TensorView* WeightReader::find(const std::string& name) const {
  if (!files_) return nullptr;
  const TensorView* tensor = files_->find(name);
  return tensor ? tensor : files_->find(legacy_name(name, *files_));
}

bool WeightReader::has(const std::string& name) const { return find(name) != nullptr; }

int64_t WeightReader::stored_rows(const std::string& name) const {
  const TensorView* tensor = find(name);
  return tensor && !tensor->shape.empty() ? tensor->shape.front() : 0;
}

void WeightReader::ignore(const std::string& name) { asked_.insert(find(name)); }

void WeightReader::refuse(const std::string& message) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(message);
}

// The tensor, counted as used; null after a refusal. A shape matches when it is the same but for
// dimensions of 1 at the ends of a vector.
const TensorView* WeightReader::take(const std::string& name, const Shape& shape) {
  const TensorView* tensor = find(name);
  if (!tensor) {
    if (!files_) return nullptr;
    refuse(absl::StrCat(files_->path(), ": tensor ", name, ": expected ", text_of(shape),
                        ", found none"));
    return nullptr;
  }
  const bool fresh = asked_.insert(tensor).second;
  Shape found = tensor->shape;
  if (shape.size() == 1) std::erase(found, 1);
  if (shape.size() == 1 && found.empty()) found = {1};
  if (found != shape) {
    refuse(absl::StrCat(*tensor->file, ": tensor ", name, ": expected ", text_of(shape),
                        ", found ", text_of(tensor->shape)));
    return nullptr;
  }
  if (!is_float(tensor->type)) {
    refuse(absl::StrCat(*tensor->file, ": tensor ", name, ": expected BF16, F16 or F32, found ",
                        weir::name(tensor->type)));
    return nullptr;
  }
  if (fresh) {
    bytes_ += shape.size() == 2 ? tensor->data.size() : size_t(tensor->elements()) * sizeof(float);
  }
  return tensor;
}

Matrix WeightReader::matrix(const std::string& name, int32_t rows, int32_t cols) {
  return rows_of(name, rows, 0, rows, cols);
}

Matrix WeightReader::rows_of(const std::string& name, int32_t stored_rows, int32_t first,
                             int32_t rows, int32_t cols) {
  const TensorView* tensor = take(name, {stored_rows, cols});
  if (!tensor) return {.data = nullptr, .rows = rows, .cols = cols};
  Matrix matrix{.data = nullptr, .rows = rows, .cols = cols, .dtype = dtype_of(tensor->type)};
  const size_t offset = size_t(first) * size_t(cols) * size_of(matrix.dtype);
  matrix.data = tensor->data.data() + offset;
  if (backend_) matrix.data = backend_->adopt(matrix.data, matrix.bytes());
  return matrix;
}

const float* WeightReader::vector(const std::string& name, int64_t size) {
  return keep(numbers(name, {size}));
}

const float* WeightReader::vector_exp(const std::string& name, int64_t size) {
  std::vector<float> values = numbers(name, {size});
  for (size_t i = 0; i < values.size(); ++i) {
    const float stored = values[i];
    values[i] = std::exp(stored);
    if (std::isfinite(values[i])) continue;
    refuse(absl::StrCat(*find(name)->file, ": tensor ", name, ": expected a finite number with a "
                        "finite exponential, found ", stored, " at element ", i));
    return nullptr;
  }
  return keep(std::move(values));
}

const float* WeightReader::conv(const std::string& name, int32_t channels, int32_t width) {
  return keep(numbers(name, {channels, 1, width}));
}

Convolution WeightReader::convolution(const std::string& name, int32_t channels, int32_t width) {
  Convolution conv{channels, width, this->conv(name + ".weight", channels, width)};
  if (has(name + ".bias")) conv.bias = vector(name + ".bias", channels);
  return conv;
}

const float* WeightReader::table(const std::string& name, int32_t rows, int32_t cols) {
  return keep(numbers(name, {rows, cols}));
}

const float* WeightReader::keep(std::vector<float> values) {
  if (values.empty()) return nullptr;
  converted_.push_back(std::move(values));
  const std::vector<float>& kept = converted_.back();
  if (!backend_) return kept.data();
  return static_cast<const float*>(backend_->adopt(kept.data(), kept.size() * sizeof(float)));
}

std::vector<float> WeightReader::numbers(const std::string& name, const Shape& shape) {
  const TensorView* tensor = take(name, shape);
  if (!tensor) return {};
  std::vector<float> values(size_t(tensor->elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = element(*tensor, i);
    if (std::isfinite(values[i])) continue;
    refuse(absl::StrCat(*tensor->file, ": tensor ", name, ": expected a finite number, found ",
                        values[i], " at element ", i));
    return {};
  }
  return values;
}

absl::Status WeightReader::finish() {
  if (!status_.ok()) return status_;
  const TensorView* extra = nullptr;
  const std::string* extra_name = nullptr;
  size_t others = 0;
  for (const auto& [name, tensor] : files_->tensors()) {
    if (asked_.contains(&tensor)) continue;
    if (extra) {
      ++others;
    } else {
      extra = &tensor;
      extra_name = &name;
    }
  }
  if (!extra) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      *extra->file, ": tensor ", *extra_name, ": expected none of this name, found ",
      text_of(extra->shape), others ? absl::StrCat(" (and ", others, " more unknown ones)") : ""));
}

namespace {

// Up to 2025-02 the MLP's gate and up projection were one matrix, gate first.
void bind_mlp(const Mlp& mlp, int32_t dim, const std::string& prefix, WeightReader& reader,
              LayerWeights& layer) {
  if (mlp.kind == Mlp::Kind::ShiftedSquare) {
    layer.mlp_mix = reader.vector(prefix + "x_k", dim);
    layer.up = reader.matrix(prefix + "key.weight", mlp.hidden, dim);
    layer.down = reader.matrix(prefix + "value.weight", dim, mlp.hidden);
    return;
  }
  const std::string gate = prefix + "gate_proj.weight", up = prefix + "up_proj.weight";
  if (!reader.has(up) && reader.stored_rows(gate) == 2 * mlp.hidden) {
    layer.gate = reader.rows_of(gate, 2 * mlp.hidden, 0, mlp.hidden, dim);
    layer.up = reader.rows_of(gate, 2 * mlp.hidden, mlp.hidden, mlp.hidden, dim);
  } else {
    layer.gate = reader.matrix(gate, mlp.hidden, dim);
    layer.up = reader.matrix(up, mlp.hidden, dim);
  }
  layer.down = reader.matrix(prefix + "down_proj.weight", dim, mlp.hidden);
}

// The names around a layer's mixer and MLP, and around all layers.
struct Names {
  const char *embedding, *layers, *mixer_norm, *mixer, *mlp_norm, *mlp, *norm;
};

Names names_of(TensorNames names) {
  if (names == TensorNames::Mamba) {
    return {"backbone.embeddings.weight", "backbone.layers.", "norm", "mixer.", "", "",
            "backbone.norm_f"};
  }
  const bool rwkv = names == TensorNames::Rwkv;
  return {"model.embeddings.weight", "model.layers.", "attn_norm", "attn.",
          rwkv ? "ffn_norm" : "mlp_norm", rwkv ? "ffn." : "mlp.", "model.norm"};
}

void bind_norm(const ModelSpec& spec, const std::string& name, WeightReader& reader,
               const float*& weight, const float*& bias) {
  weight = reader.vector(name + ".weight", spec.dim);
  if (spec.norm == BlockNorm::Layer) bias = reader.vector(name + ".bias", spec.dim);
}

// The query of one mix over depth. A source is normed with a gain before it meets the query, which
// is the same as a query multiplied with the gain.
const float* bind_depth(const DepthResidual& depth, const std::string& prefix, int32_t dim,
                        WeightReader& reader) {
  std::vector<float> query = reader.numbers(prefix + "_proj.weight", {dim});
  if (!depth.gains) return reader.keep(std::move(query));
  const std::vector<float> gain = reader.numbers(prefix + "_norm.weight", {dim});
  for (size_t i = 0; i < std::min(query.size(), gain.size()); ++i) query[i] *= gain[i];
  return reader.keep(std::move(query));
}

LayerWeights bind_layer(const ModelSpec& model, const LayerSpec& spec, const Names& names,
                        const std::string& prefix, WeightReader& reader) {
  LayerWeights layer;
  bind_norm(model, prefix + names.mixer_norm, reader, layer.mixer_norm, layer.mixer_norm_bias);
  layer.mixer = std::visit(
      [&](const auto& mixer) -> MixerWeights {
        return bind_weights(mixer, model.dim, prefix + names.mixer, reader);
      },
      spec.mixer);
  layer.route = bind_route(spec, model.dim, prefix, reader);
  if (!spec.mlp) return layer;
  bind_norm(model, prefix + names.mlp_norm, reader, layer.mlp_norm, layer.mlp_norm_bias);
  bind_mlp(*spec.mlp, model.dim, prefix + names.mlp, reader, layer);
  return layer;
}

// A tied model may store its head all the same, as long as it is the embedding.
void check_stored_head(const ModelSpec& spec, const Safetensors& files, WeightReader& reader) {
  const TensorView* head = files.find("lm_head.weight");
  if (!head) return;
  reader.ignore("lm_head.weight");
  const TensorView* embedding = files.find(names_of(spec.names).embedding);
  if (!embedding) embedding = files.find("model.embed_tokens.weight");
  const Shape expected = {spec.vocab, spec.dim};
  if (head->shape != expected) {
    reader.refuse(absl::StrCat(*head->file, ": tensor lm_head.weight: expected ",
                               text_of(expected), ", found ", text_of(head->shape)));
  } else if (embedding && (head->type != embedding->type ||
                           head->data.size() != embedding->data.size() ||
                           std::memcmp(head->data.data(), embedding->data.data(),
                                       head->data.size()) != 0)) {
    reader.refuse(absl::StrCat(*head->file, ": tensor lm_head.weight: expected the embedding again"
                               ", as tie_word_embeddings is true; found other numbers"));
  }
}

ModelWeights bind_model(const ModelSpec& spec, WeightReader& reader) {
  ModelWeights weights;
  const Names names = names_of(spec.names);
  const std::optional<DepthResidual>& depth = spec.depth_residual;
  weights.embedding = reader.matrix(names.embedding, spec.vocab, spec.dim);
  if (spec.embedding_norm) {
    bind_norm(spec, absl::StrCat(names.layers, "0.pre_norm"), reader, weights.embedding_norm,
              weights.embedding_norm_bias);
  }
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const std::string prefix = absl::StrCat(names.layers, i, ".");
    weights.layers.push_back(bind_layer(spec, spec.layers[i], names, prefix, reader));
    if (!depth) continue;
    LayerWeights& layer = weights.layers.back();
    if (i > 0 || depth->gains) {
      layer.mixer_depth = bind_depth(*depth, prefix + "attn_res", spec.dim, reader);
    }
    layer.mlp_depth = bind_depth(*depth, prefix + "mlp_res", spec.dim, reader);
  }
  bind_norm(spec, names.norm, reader, weights.norm, weights.norm_bias);
  if (depth) weights.depth = bind_depth(*depth, "model.res", spec.dim, reader);
  weights.head = spec.tied_embeddings ? weights.embedding
                                      : reader.matrix("lm_head.weight", spec.vocab, spec.dim);
  weights.bytes = reader.bytes();
  weights.converted = reader.take_converted();
  return weights;
}

}  // namespace

void adopt_stored_ranks(const Safetensors& files, ModelSpec& spec) {
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    auto* rwkv7 = std::get_if<Rwkv7Mixer>(&spec.layers[i].mixer);
    if (rwkv7 == nullptr) continue;
    const std::string prefix = absl::StrCat(names_of(spec.names).layers, i, ".attn.");
    for (auto [name, rank] :
         {std::pair("w_lora", &rwkv7->decay_rank), std::pair("g_lora", &rwkv7->gate_rank),
          std::pair("a_lora", &rwkv7->rate_rank), std::pair("v_lora", &rwkv7->value_rank)}) {
      const TensorView* tensor = files.find(absl::StrCat(prefix, name, ".lora.0.weight"));
      if (tensor == nullptr || tensor->shape.size() != 2) continue;  // refused when it is read
      if (tensor->shape[0] < 1 || tensor->shape[0] > INT32_MAX) continue;
      *rank = int32_t(tensor->shape[0]);
    }
  }
}

ModelWeights weight_shapes(const ModelSpec& spec) {
  WeightReader reader;
  return bind_model(spec, reader);
}

absl::StatusOr<ModelWeights> read_weights(const ModelSpec& spec, const Safetensors& files,
                                          Backend& backend) {
  WeightReader check(files, nullptr);
  bind_model(spec, check);
  if (spec.tied_embeddings) check_stored_head(spec, files, check);
  const absl::Status status = check.finish();
  if (!status.ok()) return status;
  WeightReader reader(files, &backend);
  return bind_model(spec, reader);
}

}  // namespace weir
