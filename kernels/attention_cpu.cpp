#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attention_memory.h"
#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

// The norm of a head: all heads share one, or there is one for each.
const float* norm_of(const Attention& op, const float* norm, int64_t head) {
  return norm != nullptr && op.norm_per_head ? norm + head * op.head_dim : norm;
}

// rope(norm(x)) of one head.
std::vector<double> plain_rotate(const Attention& op, const float* x, const float* norm,
                                 int32_t position) {
  const int32_t d = op.head_dim;
  std::vector<double> normed(x, x + d);
  if (norm != nullptr) {
    double squares = 0;
    for (const double one : normed) squares += one * one;
    const double scale = rms_scale(squares, d, double(op.norm_eps));
    for (int32_t i = 0; i < d; ++i) normed[size_t(i)] *= scale * double(norm[i]);
  }
  if (op.rope_theta <= 0) return normed;
  std::vector<double> rotated(normed.size());
  for (int32_t i = 0; i < d / 2; ++i) {
    const double angle = position * std::pow(double(op.rope_theta), -2.0 * i / d);
    const double a = normed[size_t(i)], b = normed[size_t(i + d / 2)];
    rotated[size_t(i)] = a * std::cos(angle) - b * std::sin(angle);
    rotated[size_t(i + d / 2)] = b * std::cos(angle) + a * std::sin(angle);
  }
  return rotated;
}

void plain_append(const Attention& op, const AttentionMemory& memory, int32_t token,
                  int32_t position) {
  const int64_t offset = memory.kv_head * op.head_dim;
  float* const key = memory.key(position);
  const auto rotated = plain_rotate(op, op.k.at(token) + offset,
                                    norm_of(op, op.k_norm, memory.kv_head), position);
  for (int32_t i = 0; i < op.head_dim; ++i) key[i] = float(rotated[size_t(i)]);
  std::copy_n(op.v.at(token) + offset, op.head_dim, key + memory.values_after());
}

void plain_attend(const Attention& op, const AttentionMemory& memory, int64_t head, int32_t token,
                  int32_t position) {
  const int32_t begin = memory.first_seen(position), d = op.head_dim;
  const auto q = plain_rotate(op, op.q.at(token) + head * d, norm_of(op, op.q_norm, head),
                              position);
  const auto sum_at = [&](int32_t p) {
    const int64_t in_group = head % (op.heads / op.kv_heads);
    const float* const sum = memory.gate_sum(p) + in_group * memory.block_tokens();
    return double(sum[0]) + double(sum[memory.sum_rest()]);
  };
  std::vector<double> weights;
  for (int32_t p = begin; p <= position; ++p) {
    double dot = 0;
    for (int32_t i = 0; i < d; ++i) dot += q[size_t(i)] * double(memory.key(p)[i]);
    weights.push_back(dot / std::sqrt(double(d)));
    if (op.forgets) weights.back() += sum_at(position) - sum_at(p);
  }
  const double most = *std::max_element(weights.begin(), weights.end());
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - most);
  for (int32_t i = 0; i < d; ++i) {
    double out = 0;
    for (int32_t p = begin; p <= position; ++p) {
      out += weights[size_t(p - begin)] / sum * double(memory.key(p)[memory.values_after() + i]);
    }
    op.out.at(token)[head * d + i] = float(out);
  }
}

void run_plain(const Attention& op) {
  const int64_t group = op.heads / op.kv_heads;
  for (int32_t r = 0; r < op.rows.count; ++r) {
    const RowRun row(op.rows, r);
    if (row.empty()) continue;
    for (int64_t kv_head = 0; kv_head < op.kv_heads; ++kv_head) {
      const AttentionMemory memory{op, r, row.slot, kv_head};
      for (int32_t t = 0; t < row.count; ++t) {
        plain_append(op, memory, row.begin + t, row.first + t);
        if (op.forgets) add_gates(memory, row.begin + t, row.first + t);
        for (int64_t i = 0; i < group; ++i) {
          plain_attend(op, memory, kv_head * group + i, row.begin + t, row.first + t);
        }
      }
    }
  }
}

}  // namespace

void add_gates(const AttentionMemory& memory, int32_t token, int32_t position) {
  const Attention& op = memory.op;
  const int64_t group = op.heads / op.kv_heads, rest = memory.sum_rest();
  for (int64_t i = 0; i < group; ++i) {
    double total = log_sigmoid(double(op.forget.at(token)[memory.kv_head * group + i]));
    if (position > 0) {
      const float* const before = memory.gate_sum(position - 1) + i * memory.block_tokens();
      total += double(before[0]) + double(before[rest]);
    }
    float* const sum = memory.gate_sum(position) + i * memory.block_tokens();
    sum[0] = float(total);
    sum[rest] = float(total - double(sum[0]));
  }
}

void run(const Attention& op, const Context& context) {
  WEIR_CHECK(op.kv_heads > 0 && op.heads % op.kv_heads == 0);
  WEIR_CHECK(op.rope_theta <= 0 || op.head_dim % 2 == 0);
  WEIR_CHECK(op.forgets == bool(op.forget));
  context.plain ? run_plain(op) : run_fast(op, context);
}

}  // namespace weir::cpu
