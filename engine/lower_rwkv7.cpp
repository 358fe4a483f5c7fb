// RWKV-7's time mixing: its tensors and its ops.
#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {
namespace {

// What the shifted inputs are for, in the order of the old files' one table.
enum Input { kQuery, kDecay, kKey, kValue, kRate, kGate, kInputs };
constexpr const char* kMixNames[kInputs] = {"x_r", "x_w", "x_k", "x_v", "x_a", "x_g"};

// The log decay is this, exp(-1/2), times a sigmoid, and negative.
constexpr float kLogDecayFloor = -0.6065306597126334f;

// A tall and a wide matrix with an activation between them, and a bias at the end.
Rwkv7Weights::Lora bind_lora(const std::string& prefix, int32_t rows, int32_t rank, int32_t dim,
                             bool bias, WeightReader& reader) {
  return {.maps = {reader.matrix(prefix + ".lora.0.weight", rank, dim),
                   reader.matrix(prefix + ".lora.2.weight", rows, rank)},
          .bias = bias ? reader.vector(prefix + ".lora.2.bias", rows) : nullptr};
}

Acts lower_lora(LayerContext& layer, const Rwkv7Weights::Lora& lora, Activation between, Acts x) {
  const Acts inner = lower_linear(layer, lora.maps.down, nullptr, x);
  lower_activation(layer, between, lora.maps.down.rows, inner);
  return lower_linear(layer, lora.maps.up, lora.bias, inner);
}

// [6, dim]: in old files one tensor, in today's six.
const float* bind_mixes(const std::string& prefix, int32_t dim, WeightReader& reader) {
  if (reader.has(prefix + "x_x")) return reader.table(prefix + "x_x", kInputs, dim);
  std::vector<float> all;
  for (const char* name : kMixNames) {
    const std::vector<float> one = reader.numbers(prefix + name, {dim});
    all.insert(all.end(), one.begin(), one.end());
  }
  return reader.keep(std::move(all));
}

// The values: layer 0's stay for the layers after it, whose own are drawn towards them.
Acts lower_values(const Rwkv7Mixer& m, const Rwkv7Weights& w, LayerContext& layer, Acts x) {
  if (m.first) {
    layer.program.push_back(Linear{.tokens = layer.rows.tokens,
                                   .in = w.v.cols,
                                   .parts = 1,
                                   .part = {w.v},
                                   .x = x,
                                   .y = layer.lanes.first_values});
    return layer.lanes.first_values;
  }
  const int32_t values = m.heads * m.value_dim;
  const Acts v = lower_linear(layer, w.v, nullptr, x);
  const Acts share = lower_lora(layer, w.value, Activation::None, x);
  lower_activation(layer, Activation::Sigmoid, values, share);
  lower_elementwise(
      layer,
      {.function = Elementwise::Function::Blend, .y = layer.lanes.first_values, .z = share},
      values, v);
  return v;
}

// The directions that the state is read and erased along, from the keys before they are changed.
struct Erase {
  Acts read, remove;
};
Erase lower_erase(const Rwkv7Mixer& m, const Rwkv7Weights& w, LayerContext& layer, Acts k,
                  Acts rate) {
  const int32_t tokens = layer.rows.tokens, keys = m.heads * m.key_dim;
  const Acts read = layer.workspace.take(tokens, keys);
  layer.program.push_back(Elementwise{.tokens = tokens,
                                      .dim = keys,
                                      .function = Elementwise::Function::Scale,
                                      .a = w.read_scale,
                                      .x = k,
                                      .out = read});
  // fuse_norm false divides by max(|x|, 1e-12), which is this but for keys shorter than 1e-9.
  layer.program.push_back(HeadNorm{.tokens = tokens,
                                   .groups = m.heads,
                                   .dim = m.key_dim,
                                   .eps = m.fused_norm ? 1e-6f : 1e-24f,
                                   .kind = HeadNorm::Kind::L2,
                                   .in = read,
                                   .out = read});
  const Acts remove = layer.workspace.take(tokens, keys);
  layer.program.push_back(Elementwise{.tokens = tokens,
                                      .dim = keys,
                                      .function = Elementwise::Function::Multiply,
                                      .x = read,
                                      .out = remove,
                                      .y = rate});
  return {read, remove};
}

}  // namespace

Rwkv7Weights bind_weights(const Rwkv7Mixer& m, int32_t dim, const std::string& prefix,
                          WeightReader& reader) {
  const int32_t keys = m.heads * m.key_dim, values = m.heads * m.value_dim;
  Rwkv7Weights w;
  w.mixes = bind_mixes(prefix, dim, reader);
  w.r = reader.matrix(prefix + "r_proj.weight", keys, dim);
  w.k = reader.matrix(prefix + "k_proj.weight", keys, dim);
  w.v = reader.matrix(prefix + "v_proj.weight", values, dim);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, values);
  w.decay = bind_lora(prefix + "w_lora", keys, m.decay_rank, dim, true, reader);
  w.rate = bind_lora(prefix + "a_lora", keys, m.rate_rank, dim, true, reader);
  w.gate = bind_lora(prefix + "g_lora", values, m.gate_rank, dim, false, reader);
  if (!m.first) w.value = bind_lora(prefix + "v_lora", values, m.value_rank, dim, true, reader);
  w.read_scale = reader.vector(prefix + "k_k", keys);
  w.key_rate = reader.vector(prefix + "k_a", keys);
  w.bonus = reader.table(prefix + "r_k", m.heads, m.key_dim);
  w.norm = reader.vector(prefix + "g_norm.weight", values);
  w.norm_bias = reader.vector(prefix + "g_norm.bias", values);
  return w;
}

void lower(const Rwkv7Mixer& m, const Rwkv7Weights& w, LayerContext& layer) {
  const int32_t tokens = layer.rows.tokens, dim = layer.spec.dim;
  const int32_t keys = m.heads * m.key_dim, values = m.heads * m.value_dim;
  const Acts shifted = layer.workspace.take(tokens, int64_t(kInputs) * dim);
  layer.program.push_back(
      TokenShift{.rows = layer.rows,
                 .dim = dim,
                 .mixes = kInputs,
                 .mix = w.mixes,
                 .in = layer.in,
                 .out = shifted,
                 .history = layer.state.from(int64_t(state_size(m).recurrent / sizeof(float)))});
  const auto input = [&](Input which) { return shifted.from(int64_t(which) * dim); };
  const Acts r = lower_linear(layer, w.r, nullptr, input(kQuery));
  const Acts k = lower_linear(layer, w.k, nullptr, input(kKey));
  const Acts v = lower_values(m, w, layer, input(kValue));
  const Acts log_decay = lower_lora(layer, w.decay, Activation::Tanh, input(kDecay));
  lower_elementwise(
      layer, {.function = Elementwise::Function::SigmoidDecay, .floor = kLogDecayFloor}, keys,
      log_decay);
  const Acts rate = lower_lora(layer, w.rate, Activation::None, input(kRate));
  lower_activation(layer, Activation::Sigmoid, keys, rate);
  const Acts gate = lower_lora(layer, w.gate, Activation::Sigmoid, input(kGate));
  const Erase erase = lower_erase(m, w, layer, k, rate);
  lower_elementwise(
      layer, {.function = Elementwise::Function::ScaleTowards, .a = w.key_rate, .y = rate}, keys,
      k);
  const Acts out = layer.workspace.take(tokens, values);
  const Acts bonus = layer.workspace.take(tokens, values);
  layer.program.push_back(EraseStep{.rows = layer.rows,
                                    .heads = m.heads,
                                    .key_dim = m.key_dim,
                                    .value_dim = m.value_dim,
                                    .decay = Decay::PerChannel,
                                    .decayed_read = false,
                                    .q = r,
                                    .k = k,
                                    .p = erase.read,
                                    .e = erase.remove,
                                    .v = v,
                                    .log_decay = log_decay,
                                    .bonus = w.bonus,
                                    .out = out,
                                    .bonus_out = bonus,
                                    .state = layer.state});
  layer.program.push_back(HeadNorm{.tokens = tokens,
                                   .groups = m.heads,
                                   .dim = m.value_dim,
                                   .eps = float(m.key_dim) * layer.spec.norm_eps,
                                   .kind = HeadNorm::Kind::Centred,
                                   .weight = w.norm,
                                   .weight_per_group = true,
                                   .bias = w.norm_bias,
                                   .add = bonus,
                                   .gate = gate,
                                   .gate_activation = Activation::None,
                                   .in = out,
                                   .out = out});
  lower_residual(layer, w.o, out);
}

}  // namespace weir
