#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu.h"

namespace weir::cpu {
namespace {

// One head of one row.
struct Head {
  const OuterStep& op;
  int32_t row = 0, head = 0;
  float* state = nullptr;  // [value_dim, key_dim]
  float* sums = nullptr;   // [key_dim], or null

  int32_t key_head() const { return head * op.key_heads / op.heads; }
  int32_t value_head() const { return head * op.value_heads / op.heads; }
  const float* value(int64_t token) const {
    return op.v.at(token) + int64_t(value_head()) * op.value_dim;
  }
};

// Multipliers of S for this token: `rows` one a value, `columns` one a key channel.
void decays(const Head& at, int64_t token, float* rows, float* columns) {
  const OuterStep& op = at.op;
  float whole = 1;
  if (op.decay == OuterStep::Decay::Constant) whole = std::exp(op.constant[at.head]);
  if (op.decay == OuterStep::Decay::PerHead) whole = std::exp(op.log_decay.at(token)[at.head]);
  std::fill_n(rows, op.value_dim, whole);
  std::fill_n(columns, op.key_dim, 1.0f);
  if (op.decay == OuterStep::Decay::PerKey) {
    const float* g = op.log_decay.at(token) + int64_t(at.key_head()) * op.key_dim;
    for (int32_t i = 0; i < op.key_dim; ++i) columns[i] = std::exp(g[i]);
  } else if (op.decay == OuterStep::Decay::PerValue) {
    const float* g = op.log_decay.at(token) + int64_t(at.value_head()) * op.value_dim;
    for (int32_t i = 0; i < op.value_dim; ++i) rows[i] = std::exp(g[i]);
  }
}

void update(const Head& at, int64_t token, const float* rows, const float* columns) {
  const OuterStep& op = at.op;
  const float* k = op.k.at(token) + int64_t(at.key_head()) * op.key_dim;
  const float* v = at.value(token);
  const float scale = op.v_scale ? op.v_scale.at(token)[at.head] : 1;
  for (int32_t j = 0; j < op.value_dim; ++j) {
    float* s = at.state + int64_t(j) * op.key_dim;
    const float written = scale * v[j];
    for (int32_t i = 0; i < op.key_dim; ++i) s[i] = s[i] * (rows[j] * columns[i]) + written * k[i];
  }
  if (!at.sums) return;
  for (int32_t i = 0; i < op.key_dim; ++i) at.sums[i] += k[i];
}

// The answer to one query that reads this state.
void answer(const Head& at, int64_t token, const float* q, float* out) {
  const OuterStep& op = at.op;
  float divisor = 1;
  if (at.sums) {
    divisor = 0;
    for (int32_t i = 0; i < op.key_dim; ++i) divisor += at.sums[i] * q[i];
    divisor = divisor * op.scale + 1e-10f;
  }
  for (int32_t j = 0; j < op.value_dim; ++j) {
    const float* s = at.state + int64_t(j) * op.key_dim;
    float sum = 0;
    for (int32_t i = 0; i < op.key_dim; ++i) sum += s[i] * q[i];
    out[j] = sum * op.scale / divisor;
    if (op.skip) out[j] += op.skip[int64_t(at.head) * op.value_dim + j] * at.value(token)[j];
  }
}

void run_head(const Head& at, float* rows, float* columns) {
  const OuterStep& op = at.op;
  const int32_t begin = op.rows.begin[at.row], end = op.rows.begin[at.row + 1];
  if (begin == end) return;
  if (op.rows.first[at.row] == 0) {
    std::fill_n(at.state, int64_t(op.value_dim) * op.key_dim, 0.0f);
    if (at.sums) std::fill_n(at.sums, op.key_dim, 0.0f);
  }
  const int32_t group = std::max(1, op.query_heads / op.heads);  // queries that read this head
  for (int32_t t = begin; t < end; ++t) {
    decays(at, t, rows, columns);
    update(at, t, rows, columns);
    for (int32_t j = at.head * group; j < (at.head + 1) * group; ++j) {
      const int32_t query = op.query_heads >= op.heads ? j : j * op.query_heads / op.heads;
      answer(at, t, op.q.at(t) + int64_t(query) * op.key_dim,
             op.out.at(t) + int64_t(j) * op.value_dim);
    }
  }
}

}  // namespace

void run(const OuterStep& op, const Context& context) {
  const auto work = [&](int64_t begin, int64_t end) {
    std::vector<float> rows(op.value_dim), columns(op.key_dim);
    for (int64_t i = begin; i < end; ++i) {
      const auto row = int32_t(i / op.heads), head = int32_t(i % op.heads);
      const Slot slot = op.rows.slot[row];
      if (slot == kPadding) continue;
      const int64_t matrix = int64_t(op.value_dim) * op.key_dim;
      float* sums = op.normalise ? op.sums.at(slot) + int64_t(head) * op.key_dim : nullptr;
      run_head({op, row, head, op.state.at(slot) + head * matrix, sums}, rows.data(),
               columns.data());
    }
  };
  const int64_t items = int64_t(op.rows.count) * op.heads;
  context.plain ? work(0, items) : context.pool.parallel_for(items, work, 1);
}

}  // namespace weir::cpu
