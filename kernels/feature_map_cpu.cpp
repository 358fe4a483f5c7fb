#include <algorithm>
#include <cmath>

#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

float row_times(const float* weight, const float* bias, const float* x, int32_t dim, int32_t row) {
  float sum = bias ? bias[row] : 0;
  for (int32_t i = 0; i < dim; ++i) sum += weight[int64_t(row) * dim + i] * x[i];
  return sum;
}

void softmax(float* x, int32_t count) {
  const float largest = *std::max_element(x, x + count);
  float sum = 0;
  for (int32_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i] - largest);
  for (int32_t i = 0; i < count; ++i) x[i] /= sum;
}

void softmax_pair(const FeatureMap& op, const float* x, float* out) {
  for (int32_t i = 0; i < op.dim; ++i) {
    const float y = row_times(op.weight, op.bias, x, op.dim, i);
    out[i] = 2 * y;
    out[op.dim + i] = -2 * y;
  }
  softmax(out, 2 * op.dim);
}

void dpfp(const FeatureMap& op, const float* x, float* out) {
  const int32_t twice = 2 * op.dim;
  const auto y = [&](int32_t i) {
    return i < op.dim ? std::max(x[i], 0.0f) : -std::max(x[i - op.dim], 0.0f);
  };
  for (int32_t roll = 1; roll <= 4; ++roll) {
    for (int32_t i = 0; i < twice; ++i) *out++ = y(i) * y((i - roll + twice) % twice);
  }
}

void map_head(const FeatureMap& op, const float* x, float* out) {
  const int32_t size = op.dim * FeatureMap::expansion(op.kind);
  switch (op.kind) {
    case FeatureMap::Kind::Copy: std::copy_n(x, op.dim, out); break;
    case FeatureMap::Kind::Softmax:
      std::copy_n(x, op.dim, out);
      softmax(out, op.dim);
      break;
    case FeatureMap::Kind::SoftmaxPair: softmax_pair(op, x, out); break;
    case FeatureMap::Kind::Dpfp: dpfp(op, x, out); break;
    case FeatureMap::Kind::RowLinear:
      for (int32_t i = 0; i < op.dim; ++i) out[i] = row_times(op.weight, op.bias, x, op.dim, i);
      break;
    case FeatureMap::Kind::RowProduct:
      for (int32_t i = 0; i < op.dim; ++i) {
        out[i] = row_times(op.weight, op.bias, x, op.dim, i) *
                 row_times(op.weight2, op.bias2, x, op.dim, i);
      }
      break;
  }
  for (int32_t i = 0; i < size; ++i) out[i] = float(activate(op.activation, out[i]));
  if (!op.normalise) return;
  float sum = 1e-4f;
  for (int32_t i = 0; i < size; ++i) sum += out[i];
  for (int32_t i = 0; i < size; ++i) out[i] /= sum;
}

}  // namespace

void run(const FeatureMap& op, const Context& context) {
  const int32_t size = op.dim * FeatureMap::expansion(op.kind);
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int32_t head = 0; head < op.heads; ++head) {
        map_head(op, op.in.at(t) + int64_t(head) * op.dim, op.out.at(t) + int64_t(head) * size);
      }
    }
  };
  context.plain ? work(0, op.tokens) : context.pool.parallel_for(op.tokens, work, 1);
}

}  // namespace weir::cpu
