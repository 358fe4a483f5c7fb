#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/mixer_math.h"
#include "kernels/scratch.h"

namespace weir::cpu {
namespace {

constexpr size_t kScratchFloats = 4 * 1024;  // what usual sizes need
constexpr int64_t kClaimValues = 16 * 1024;

const float* source_of(const DepthAttention& op, int64_t token, int64_t group, int32_t s) {
  return op.sources.at(token) + s * op.source_stride + group * op.dim;
}

float bias_of(const DepthAttention& op, int64_t token, int64_t group, int32_t s) {
  return op.last_bias && s + 1 == op.count ? op.last_bias.at(token)[group] : 0.0f;
}

void mix_plain(const DepthAttention& op, int64_t token, int64_t group) {
  const float* const query = op.query + group * op.dim;
  std::vector<double> weights;
  for (int32_t s = 0; s < op.count; ++s) {
    const float* const x = source_of(op, token, group, s);
    double squares = 0, dot = 0;
    for (int32_t i = 0; i < op.dim; ++i) {
      squares += double(x[i]) * double(x[i]);
      dot += double(query[i]) * double(x[i]);
    }
    weights.push_back(dot * rms_scale(squares, op.dim, double(op.eps)) +
                      double(bias_of(op, token, group, s)));
  }
  const double most = *std::max_element(weights.begin(), weights.end());
  double total = 0;
  for (double& weight : weights) total += weight = std::exp(weight - most);
  for (int32_t i = 0; i < op.dim; ++i) {
    double sum = 0;
    for (int32_t s = 0; s < op.count; ++s) {
      sum += weights[size_t(s)] / total * double(source_of(op, token, group, s)[i]);
    }
    op.out.at(token)[group * op.dim + i] = float(sum);
  }
}

void mix_fast(const DepthAttention& op, const MixerSimd& simd, int64_t token, int64_t group) {
  Scratch<kScratchFloats> scratch(size_t(op.dim) + kScratchAlign);
  float* const sum = scratch.take(size_t(op.dim));
  std::fill_n(sum, op.dim, 0.0f);
  float most = -std::numeric_limits<float>::infinity(), total = 0;
  std::array<const float*, AttentionBlock::kCount> sources;
  std::array<float, AttentionBlock::kCount> scale, bias;
  for (int32_t s = 0; s < op.count;) {
    int32_t n = 0;
    for (; n < AttentionBlock::kCount && s < op.count; ++n, ++s) {
      const float* const x = source_of(op, token, group, s);
      sources[size_t(n)] = x;
      scale[size_t(n)] = 1.0f / std::sqrt(simd.squares(x, op.dim) / float(op.dim) + op.eps);
      bias[size_t(n)] = bias_of(op, token, group, s);
    }
    simd.attention({.dim = op.dim,
                    .queries = 1,
                    .count = n,
                    .keys = sources.data(),
                    .values_after = 0,
                    .scale = 1.0f,
                    .key_scale = scale.data(),
                    .bias = bias.data(),
                    .q = op.query + group * op.dim,
                    .most = &most,
                    .total = &total,
                    .out = sum});
  }
  simd.scale(sum, 1.0f / total, op.dim);
  std::copy_n(sum, op.dim, op.out.at(token) + group * op.dim);
}

}  // namespace

void run(const DepthAttention& op, const Context& context) {
  WEIR_CHECK(op.count > 0);
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = i / op.groups, group = i % op.groups;
      if (op.count == 1) {
        const float* const x = source_of(op, token, group, 0);
        std::copy_n(x, op.dim, op.out.at(token) + group * op.dim);
      } else if (context.plain) {
        mix_plain(op, token, group);
      } else {
        mix_fast(op, *context.simd.mixers, token, group);
      }
    }
  };
  const int64_t pieces = int64_t(op.tokens) * op.groups;
  if (context.plain) return work(0, pieces);
  context.pool.parallel_for(pieces, work, kClaimValues / (int64_t(op.count) * op.dim + 1) + 1);
}

}  // namespace weir::cpu
