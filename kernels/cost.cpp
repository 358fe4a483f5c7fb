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

// The state of each row is read and written once, however many tokens the row has; decaying it,
// recalling, correcting and answering are a multiply and an add each.
Cost cost_of(const DeltaMix& op) {
  const size_t state = size_t(op.value_heads) * size_t(op.value_dim) * size_t(op.key_dim);
  const size_t channels = 2 * size_t(op.key_heads) * size_t(op.key_dim) +
                          size_t(op.value_heads) * size_t(op.value_dim);
  const size_t width = size_t(op.conv_width);
  const size_t history = width > 0 ? (width - 1) * channels : 0;
  Cost cost;
  cost.bytes = 2 * size_t(op.rows.count) * (state + history) * sizeof(float);
  cost.bytes += width * channels * sizeof(float);
  cost.flops = size_t(op.rows.tokens) * (8 * state + 2 * width * channels);
  return cost;
}

// How far each row has come is known on the device alone: only the keys and values that this step
// appends, and their products with each other's queries, are counted.
Cost cost_of(const Attention& op) {
  const auto tokens = size_t(op.rows.tokens);
  return {.bytes = 2 * tokens * size_t(op.kv_heads) * size_t(op.head_dim) * sizeof(float),
          .flops = 4 * tokens * size_t(op.heads) * size_t(op.head_dim)};
}

Cost cost_of(const Swiglu& op) {
  return {.flops = 6 * size_t(op.tokens) * size_t(op.dim)};
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
const char* name_of(const Attention&) { return "attention"; }
const char* name_of(const Swiglu&) { return "swiglu"; }
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
