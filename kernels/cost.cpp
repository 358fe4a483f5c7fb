#include <algorithm>

#include "kernels/op.h"

namespace weir {
namespace {

Cost cost_of(const Embed& op) {
  return {.bytes = size_t(op.tokens) * size_t(op.table.cols) * size_of(op.table.dtype)};
}

Cost cost_of(const RmsNorm& op) {
  const auto values = size_t(op.tokens) * size_t(op.dim);
  return {.bytes = size_t(op.dim) * sizeof(float), .flops = 4 * values};
}

Cost cost_of(const Linear& op) {
  Cost cost;
  for (int32_t i = 0; i < op.parts; ++i) {
    const Matrix& part = op.part[size_t(i)];
    cost.bytes += part.bytes();
    if (op.bias[size_t(i)] != nullptr) cost.bytes += size_t(part.rows) * sizeof(float);
    cost.flops += 2 * size_t(op.tokens) * size_t(op.in) * size_t(part.rows);
  }
  return cost;
}

// How many inputs of each channel the rows read of their history, and write: those of their tokens
// (ring.h).
size_t history_inputs(const Rows& rows, int32_t width) {
  if (width <= 1) return 0;
  const size_t kept = size_t(rows.count) * size_t(width - 1);
  return kept + std::min(kept, size_t(rows.tokens));
}

Cost cost_of(const Conv1d& op) {
  const auto channels = size_t(op.channels), width = size_t(op.width);
  const size_t history = history_inputs(op.rows, op.width) * channels;
  return {.bytes = (history + width * channels) * sizeof(float),
          .flops = 2 * size_t(op.rows.tokens) * width * channels};
}

Cost cost_of(const TokenShift& op) {
  const auto dim = size_t(op.dim), mixes = size_t(op.mixes);
  return {.bytes = (2 * size_t(op.rows.count) + mixes) * dim * sizeof(float),
          .flops = 3 * size_t(op.rows.tokens) * mixes * dim};
}

Cost cost_of(const Rotary& op) {
  return {.flops = 3 * size_t(op.rows.tokens) * size_t(op.heads) * size_t(op.dim)};
}

Cost cost_of(const Elementwise& op) {
  return {.flops = size_t(op.tokens) * size_t(op.dim)};
}

Cost cost_of(const FeatureMap& op) {
  const auto dim = size_t(op.dim), vectors = size_t(op.tokens) * size_t(op.heads);
  const size_t maps = (op.weight ? 1 : 0) + (op.weight2 ? 1 : 0);
  return {.bytes = maps * dim * dim * sizeof(float),
          .flops = vectors * (2 * maps * dim * dim + dim)};
}

Cost cost_of(const HeadDot& op) {
  return {.flops = 2 * size_t(op.tokens) * size_t(op.heads) * size_t(op.dim)};
}

Cost cost_of(const HeadNorm& op) {
  return {.flops = 6 * size_t(op.tokens) * size_t(op.groups) * size_t(op.dim)};
}

// As below, without what erases.
Cost cost_of(const OuterStep& op) {
  const size_t sums = op.normalise ? size_t(op.heads) * size_t(op.key_dim) : 0;
  const size_t state = size_t(op.heads) * size_t(op.value_dim) * size_t(op.key_dim) + sums;
  return {.bytes = 2 * size_t(op.rows.count) * state * sizeof(float),
          .flops = size_t(op.rows.tokens) * 5 * state};
}

// What a state and what waits beside it move in a step of one token a row, in floats: on average
// over turns, each in turn with 0 to kPendingMost updates waiting (pending.h). The state is always
// read and written in one turn; decay and keys change in all others, where an update joins: also
// counted where nothing decays.
size_t deferring_floats(size_t state, const PendingLayout& layout) {
  constexpr size_t kTurns = kPendingMost + 1, kAll = kPendingMost * kTurns / 2;
  constexpr size_t kKept = kAll - kPendingMost;  // updates that are decayed and left waiting
  const auto keys = size_t(layout.keys()), values = size_t(layout.values);
  const size_t read = kPendingMost * keys + kAll * (keys + values);
  const size_t written = kPendingMost * (2 * keys + values) + kKept * keys;
  return state + (state + read + written) / kTurns;
}

// What all rows move of their states, of which a head's is so many floats. Of how many rows have
// several tokens only this may be known: that each of these takes two at least.
template <typename Mix>
size_t state_floats(const Mix& op, size_t head) {
  const auto rows = size_t(op.rows.count), heads = size_t(pending_heads(op));
  const size_t more = size_t(op.rows.tokens) - std::min(rows, size_t(op.rows.tokens));
  size_t longer = std::min(rows, op.rows.longer >= 0 ? size_t(op.rows.longer) : more);
  if (op.pending.data == nullptr) longer = rows;
  return heads * (longer * 2 * head +
                  (rows - longer) * deferring_floats(head, pending_layout(op)));
}

// The state of each row is read once and, where writes are not deferred, written once, however many
// tokens the row has; decaying it, recalling, correcting and answering are a multiply and an add
// each.
Cost cost_of(const DeltaMix& op) {
  const size_t state = size_t(op.value_heads) * size_t(op.value_dim) * size_t(op.key_dim);
  const size_t channels = 2 * size_t(op.key_heads) * size_t(op.key_dim) +
                          size_t(op.value_heads) * size_t(op.value_dim);
  const size_t width = size_t(op.conv_width);
  const size_t history = history_inputs(op.rows, op.conv_width) * channels;
  const size_t head = size_t(op.value_dim) * size_t(op.key_dim);
  Cost cost;
  cost.bytes = (state_floats(op, head) + history) * sizeof(float);
  cost.bytes += width * channels * sizeof(float);
  cost.flops = size_t(op.rows.tokens) * (8 * state + 2 * width * channels);
  return cost;
}

// As DeltaMix, once for each update; what is read along p is taken out along e.
Cost cost_of(const EraseStep& op) {
  const size_t state = size_t(op.heads) * size_t(op.value_dim) * size_t(op.key_dim);
  const size_t passes = size_t(op.updates) * (op.e ? 7 : 5) + 2;
  return {.bytes = 2 * size_t(op.rows.count) * state * sizeof(float),
          .flops = size_t(op.rows.tokens) * passes * state};
}

// As DeltaMix, for every mixture, and the temporal layers' two distributions.
Cost cost_of(const SwilaMix& op) {
  const size_t channels = size_t(op.heads) * size_t(op.dim);
  const size_t mixed = channels * size_t(op.mixtures), state = mixed * size_t(op.dim);
  const size_t history = history_inputs(op.rows, op.conv_width) * 3 * channels;
  const size_t head = size_t(op.mixtures) * size_t(op.dim) * size_t(op.dim);
  const size_t priors = op.key_mix ? 4 * mixed * size_t(op.rows.count) : 0;
  return {.bytes = (state_floats(op, head) + priors + history) * sizeof(float),
          .flops = size_t(op.rows.tokens) * 8 * state};
}

// How far each row has come is known on the device alone: only the keys and values that this step
// appends, and their products with each other's queries, are counted.
Cost cost_of(const Attention& op) {
  const auto tokens = size_t(op.rows.tokens);
  return {.bytes = 2 * tokens * size_t(op.kv_heads) * size_t(op.head_dim) * sizeof(float),
          .flops = 4 * tokens * size_t(op.heads) * size_t(op.head_dim)};
}

// A few numbers a token.
Cost cost_of(const MemoryRoute&) { return {}; }

Cost cost_of(const MemoryMerge& op) {
  return {.flops = 2 * size_t(op.tokens) * size_t(op.chosen) * size_t(op.dim)};
}

// Each source is normed, multiplied with the query, and added.
Cost cost_of(const DepthAttention& op) {
  const size_t channels = size_t(op.groups) * size_t(op.dim);
  return {.bytes = channels * sizeof(float),
          .flops = 6 * size_t(op.tokens) * size_t(op.count) * channels};
}

Cost cost_of(const Swiglu& op) {
  return {.flops = 6 * size_t(op.tokens) * size_t(op.dim)};
}

Cost cost_of(const ValueRoute& op) {
  return {.flops = size_t(op.tokens) * size_t(op.heads) * size_t(op.dim) * (size_t(op.count) + 4)};
}

Cost cost_of(const RouteSignal& op) {
  return {.flops = 5 * size_t(op.tokens) * size_t(op.heads) * size_t(op.dim)};
}

// At most, as all heads had something waiting.
Cost cost_of(const FlushPending& op) {
  const size_t state = size_t(op.heads) * size_t(op.layout.values) * size_t(op.layout.key_dim);
  const size_t waits = size_t(op.heads) * size_t(op.layout.floats());
  return {.bytes = size_t(op.rows.count) * (2 * state + waits) * sizeof(float),
          .flops = size_t(op.rows.count) * (1 + 2 * kPendingMost) * state};
}

Cost cost_of(const Gather&) { return {}; }

Cost cost_of(const Sample& op) {
  const auto logits = size_t(op.count) * size_t(op.vocab);
  return {.bytes = logits * sizeof(float), .flops = 4 * logits};
}

const char* name_of(const Embed&) { return "embed"; }
const char* name_of(const RmsNorm&) { return "rms_norm"; }
const char* name_of(const Linear&) { return "linear"; }
const char* name_of(const DeltaMix&) { return "delta_mix"; }
const char* name_of(const Conv1d&) { return "conv1d"; }
const char* name_of(const TokenShift&) { return "token_shift"; }
const char* name_of(const Rotary&) { return "rotary"; }
const char* name_of(const Elementwise&) { return "elementwise"; }
const char* name_of(const EraseStep&) { return "erase_step"; }
const char* name_of(const FeatureMap&) { return "feature_map"; }
const char* name_of(const HeadDot&) { return "head_dot"; }
const char* name_of(const HeadNorm&) { return "head_norm"; }
const char* name_of(const OuterStep&) { return "outer_step"; }
const char* name_of(const SwilaMix&) { return "swila_mix"; }
const char* name_of(const Attention&) { return "attention"; }
const char* name_of(const DepthAttention&) { return "depth_attention"; }
const char* name_of(const MemoryRoute&) { return "memory_route"; }
const char* name_of(const MemoryMerge&) { return "memory_merge"; }
const char* name_of(const Swiglu&) { return "swiglu"; }
const char* name_of(const ValueRoute&) { return "value_route"; }
const char* name_of(const RouteSignal&) { return "route_signal"; }
const char* name_of(const FlushPending&) { return "flush_pending"; }
const char* name_of(const Gather&) { return "gather"; }
const char* name_of(const Sample&) { return "sample"; }

}  // namespace

Cost cost(const Op& op) {
  return std::visit([](const auto& one) { return cost_of(one); }, op);
}

Cost cost(const Program& program) {
  Cost sum;
  for (const Op& op : program) sum += cost(op);
  return sum;
}

const char* name(const Op& op) {
  return std::visit([](const auto& one) { return name_of(one); }, op);
}

}  // namespace weir
