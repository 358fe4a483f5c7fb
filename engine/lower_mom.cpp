// Mixture-of-Memories: its tensors and its ops.
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/lower.h"
#include "engine/projection.h"

namespace weir {
namespace {

// What one memory reads of a token, side by side; the order of a MomWeights::Memory.
struct MemoryColumns {
  int64_t k = 0, v = 0, b = 0, a = 0, width = 0;

  explicit MemoryColumns(const MomMixer& m)
      : v(int64_t(m.heads) * m.key_dim),
        b(v + int64_t(m.heads) * m.value_dim),
        a(b + m.heads),
        width(a + m.heads) {}
};

// Whole numbers in the workspace: what a route writes.
int32_t* take_numbers(LayerContext& layer, int64_t count) {
  return reinterpret_cast<int32_t*>(layer.workspace.take(1, count).data);
}

MemoryRoute lower_route(const MomMixer& m, Acts logits, SlotState seen, LayerContext& layer) {
  const int64_t rows = layer.rows.count, tokens = layer.rows.tokens;
  MemoryRoute route{.rows = layer.rows,
                    .memories = m.memories,
                    .chosen = m.chosen,
                    .logits = logits,
                    .seen = seen};
  route.token = take_numbers(layer, tokens * m.chosen);
  route.memory_begin = take_numbers(layer, m.memories + 1);
  route.row_begin = take_numbers(layer, m.memories * (rows + 1));
  route.row_first = take_numbers(layer, m.memories * rows);
  route.pair = take_numbers(layer, tokens * m.chosen);
  route.weight = layer.workspace.take(tokens, m.chosen);
  layer.program.push_back(route);
  return route;
}

// The vectors of every pair's token, in the order of the pairs.
Acts lower_gather(const MemoryRoute& route, int64_t dim, Acts in, LayerContext& layer) {
  const int32_t pairs = route.rows.tokens * route.chosen;
  const Acts out = layer.workspace.take(pairs, dim);
  layer.program.push_back(
      Gather{.count = pairs, .dim = int32_t(dim), .index = route.token, .in = in, .out = out});
  return out;
}

// What each pair's memory reads: a product with the memory's own matrices, of its own pairs alone,
// or what all memories share.
Acts lower_columns(const MomMixer& m, const MomWeights& w, const MemoryRoute& route, Acts shared,
                   LayerContext& layer) {
  const int64_t width = MemoryColumns(m).width;
  if (m.single_projection) return lower_gather(route, width, shared, layer);
  const Acts x = lower_gather(route, layer.spec.dim, layer.in, layer);
  const int32_t pairs = route.rows.tokens * m.chosen;
  const Acts columns = layer.workspace.take(pairs, width);
  for (int32_t e = 0; e < m.memories; ++e) {
    const MomWeights::Memory& memory = w.memories[size_t(e)];
    layer.program.push_back(Linear{
        .tokens = pairs,
        .in = layer.spec.dim,
        .parts = 4,
        .part = {memory.k, memory.v, memory.b, memory.a},
        .range = route.memory_begin == nullptr ? nullptr : route.memory_begin + e,
        .x = x,
        .y = columns});
  }
  return columns;
}

// The gated delta rule on one memory. Its answers are neither normed nor gated yet.
void lower_memory(const MomMixer& m, const MomWeights& w, Rows rows, int32_t memory, Acts q,
                  Acts columns, Acts out, LayerContext& layer) {
  const MemoryColumns at(m);
  const int64_t states = m.states(), state = int64_t(m.heads) * m.key_dim * m.value_dim;
  const int64_t history = int64_t(m.conv_channels()) * (m.conv.width - 1);
  layer.program.push_back(
      DeltaMix{.rows = rows,
               .key_heads = m.heads,
               .value_heads = m.heads,
               .key_dim = m.key_dim,
               .value_dim = m.value_dim,
               .q = q,
               .k = columns.from(at.k),
               .v = columns.from(at.v),
               .conv_width = m.conv.width,
               .conv_q = w.conv_q.taps,
               .conv_k = w.conv_k.taps,
               .conv_v = w.conv_v.taps,
               .conv_q_bias = w.conv_q.bias,
               .conv_k_bias = w.conv_k.bias,
               .conv_v_bias = w.conv_v.bias,
               .decay = Decay::PerHead,
               .decay_heads = m.heads,
               .decay_in = columns.from(at.a),
               .decay_a = w.decay_a,
               .dt_bias = w.dt_bias,
               .beta = columns.from(at.b),
               .norm_output = false,
               .out = out,
               .state = layer.state.from(memory * state),
               .history = layer.state.from(states * state + m.memories + memory * history)});
}

}  // namespace

MomWeights bind_weights(const MomMixer& m, int32_t dim, const std::string& prefix,
                        WeightReader& reader) {
  const int32_t keys = m.heads * m.key_dim, values = m.heads * m.value_dim;
  const auto memory = [&](const std::string& k, const std::string& v, const std::string& b,
                          const std::string& a) {
    return MomWeights::Memory{.k = reader.matrix(prefix + k + ".weight", keys, dim),
                              .v = reader.matrix(prefix + v + ".weight", values, dim),
                              .b = reader.matrix(prefix + b + ".weight", m.heads, dim),
                              .a = reader.matrix(prefix + a + ".weight", m.heads, dim)};
  };
  MomWeights w;
  w.q = reader.matrix(prefix + "q_proj.weight", keys, dim);
  w.router = reader.matrix(prefix + "gate.weight", m.memories, dim);
  for (int32_t e = 0; e < m.memories && !m.single_projection; ++e) {
    const auto name = [&](const char* of) { return absl::StrCat(of, "_proj.", e); };
    w.memories.push_back(memory(name("k"), name("v"), name("b"), name("a")));
  }
  if (m.shared || m.single_projection) {
    w.shared = memory("shared_k", "shared_v", "shared_b", "shared_a");
  }
  w.conv_q = reader.convolution(prefix + "q_conv1d", keys, m.conv.width);
  w.conv_k = reader.convolution(prefix + "k_conv1d", keys, m.conv.width);
  w.conv_v = reader.convolution(prefix + "v_conv1d", values, m.conv.width);
  w.decay_a = reader.vector_exp(prefix + "A_log", m.heads);
  w.dt_bias = reader.vector(prefix + "dt_bias", m.heads);
  reader.ignore(prefix + "D");  // in files of 2024-12 to 2025-03; nothing reads it
  if (m.output_gate) w.g = reader.matrix(prefix + "g_proj.weight", values, dim);
  w.norm = reader.vector(prefix + "o_norm.weight", m.value_dim);
  w.o = reader.matrix(prefix + "o_proj.weight", dim, values);
  return w;
}

void lower(const MomMixer& m, const MomWeights& w, LayerContext& layer) {
  Projection in(layer.spec.dim);
  const Projection::Part q = in.add(w.q), router = in.add(w.router), g = in.add(w.g),
                         shared = in.add(w.shared.k);
  in.add(w.shared.v);
  in.add(w.shared.b);
  in.add(w.shared.a);
  const Acts projected = in.lower(layer, layer.in);
  const int32_t tokens = layer.rows.tokens, values = m.heads * m.value_dim;
  const int64_t states = m.states() * int64_t(m.heads) * m.key_dim * m.value_dim;

  const MemoryRoute route =
      lower_route(m, router.of(projected), layer.state.from(states), layer);
  const Acts pair_q =
      lower_gather(route, int64_t(m.heads) * m.key_dim, q.of(projected), layer);
  const Acts columns = lower_columns(m, w, route, shared.of(projected), layer);
  const int32_t pairs = tokens * m.chosen;
  const Acts answers = layer.workspace.take(pairs, values);
  for (int32_t e = 0; e < m.memories; ++e) {
    Rows rows{.count = layer.rows.count,
              .tokens = pairs,
              .slot = layer.rows.slot,
              .computed = true};
    if (route.row_first != nullptr) {
      rows.first = route.row_first + int64_t(e) * rows.count;
      rows.begin = route.row_begin + int64_t(e) * (rows.count + 1);
    }
    lower_memory(m, w, rows, e, pair_q, columns, answers, layer);
  }
  MemoryMerge merge{.tokens = tokens,
                    .dim = values,
                    .chosen = m.chosen,
                    .pair = route.pair,
                    .weight = route.weight,
                    .answers = answers};
  if (m.shared) {
    merge.shared = layer.workspace.take(tokens, values);
    lower_memory(m, w, layer.rows, m.memories, q.of(projected), shared.of(projected),
                 merge.shared, layer);
  }
  merge.out = layer.workspace.take(tokens, values);
  layer.program.push_back(merge);
  layer.program.push_back(HeadNorm{.tokens = tokens,
                                   .groups = m.heads,
                                   .dim = m.value_dim,
                                   .eps = layer.spec.norm_eps,
                                   .weight = w.norm,
                                   .gate = g.of(projected),
                                   .in = merge.out,
                                   .out = merge.out});
  lower_residual(layer, w.o, merge.out);
}

}  // namespace weir
