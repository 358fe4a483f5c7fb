// The mixers' inner loops as their formulas read: the oracle of the vectorised ones.
#include <cmath>

#include "kernels/scalar_math.h"
#include "kernels/simd_mixers.h"

namespace weir {
namespace {

float dot(const float* a, const float* b, int32_t count) {
  float sum = 0;
  for (int32_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

void delta_step(const DeltaHeadStep& step) {
  const int32_t K = step.key_dim;
  for (int32_t j = 0; j < step.value_dim; ++j) {
    float* S = step.state + int64_t(j) * K;
    const float u = step.written[j] - dot(S, step.decayed_erase, K);
    for (int32_t i = 0; i < K; ++i) S[i] = S[i] * step.decay[i] + u * step.k[i];
    step.out[j] = dot(S, step.q, K);
  }
}

void exp_all(float* x, int32_t count) {
  for (int32_t i = 0; i < count; ++i) x[i] = std::exp(x[i]);
}

void silu_all(float* x, int32_t count) {
  for (int32_t i = 0; i < count; ++i) x[i] *= sigmoid(x[i]);
}

void sigmoid_all(float* x, int32_t count) {
  for (int32_t i = 0; i < count; ++i) x[i] = sigmoid(x[i]);
}

void scores(const float* q, const float* rows, int32_t count, int32_t dim, float scale,
            float* out) {
  for (int32_t i = 0; i < count; ++i) out[i] = scale * dot(q, rows + int64_t(i) * dim, dim);
}

void weighted_sum(const float* weights, const float* rows, int32_t count, int32_t dim,
                  float* out) {
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t d = 0; d < dim; ++d) out[d] += weights[i] * rows[int64_t(i) * dim + d];
  }
}

}  // namespace

const MixerSimd& plain_mixers() {
  static constexpr MixerSimd table{.delta_step = delta_step,
                                   .dot = dot,
                                   .exp = exp_all,
                                   .silu = silu_all,
                                   .sigmoid = sigmoid_all,
                                   .scores = scores,
                                   .weighted_sum = weighted_sum};
  return table;
}

}  // namespace weir
