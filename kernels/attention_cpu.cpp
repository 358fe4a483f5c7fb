#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attention_memory.h"
#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

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
  const auto rotated = plain_rotate(op, op.k.at(token) + offset, op.k_norm, position);
  for (int32_t i = 0; i < op.head_dim; ++i) key[i] = float(rotated[size_t(i)]);
  std::copy_n(op.v.at(token) + offset, op.head_dim, key + memory.values_after());
}

void plain_attend(const Attention& op, const AttentionMemory& memory, int64_t head, int32_t token,
                  int32_t position) {
  const int32_t begin = memory.first_seen(position), d = op.head_dim;
  const auto q = plain_rotate(op, op.q.at(token) + head * d, op.q_norm, position);
  std::vector<double> weights;
  for (int32_t p = begin; p <= position; ++p) {
    double dot = 0;
    for (int32_t i = 0; i < d; ++i) dot += q[size_t(i)] * double(memory.key(p)[i]);
    weights.push_back(dot / std::sqrt(double(d)));
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
        for (int64_t i = 0; i < group; ++i) {
          plain_attend(op, memory, kv_head * group + i, row.begin + t, row.first + t);
        }
      }
    }
  }
}

}  // namespace

void run(const Attention& op, const Context& context) {
  WEIR_CHECK(op.kv_heads > 0 && op.heads % op.kv_heads == 0);
  WEIR_CHECK(op.rope_theta <= 0 || op.head_dim % 2 == 0);
  context.plain ? run_plain(op) : run_fast(op, context);
}

}  // namespace weir::cpu
