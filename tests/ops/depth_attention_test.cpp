// DepthAttention: every kind of CPU against the formula, written here a second time.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "mixer_step.h"

namespace weir {
namespace {

struct Sizes {
  int32_t tokens = 5, groups = 1, dim = 24, count = 3;
  float query = 1;       // spread of the query
  bool bias = false, bias_per_token = false;

  std::string text() const {
    return std::to_string(tokens) + " tokens, " + std::to_string(groups) + " x " +
           std::to_string(dim) + ", " + std::to_string(count) + " sources, query " +
           std::to_string(query) + (bias ? bias_per_token ? ", bias a token" : ", bias" : "");
  }
};

// Sources with gaps between vectors and between sources; all that no vector fills is NaN.
struct Data {
  static constexpr int64_t kGap = 3, kSourceGap = 11;

  Sizes sizes;
  std::vector<float> query, sources, bias;
  int64_t stride, source_stride;

  explicit Data(const Sizes& sizes, uint32_t seed = 1)
      : sizes(sizes),
        stride(int64_t(sizes.groups) * sizes.dim + kGap),
        source_stride(sizes.tokens * stride + kSourceGap) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int32_t channels = sizes.groups * sizes.dim;
    for (int32_t i = 0; i < channels; ++i) query.push_back(normal(random) * sizes.query);
    sources.assign(size_t(sizes.count * source_stride), kNan);
    for (int32_t s = 0; s < sizes.count; ++s) {
      for (int32_t t = 0; t < sizes.tokens; ++t) {
        const float spread = std::ldexp(1.0f, s % 7 - 3);
        for (int32_t i = 0; i < channels; ++i) *at(s, t, i) = normal(random) * spread;
      }
    }
    for (int32_t i = 0; i < sizes.groups * sizes.tokens; ++i) bias.push_back(2 * normal(random));
  }
  float* at(int32_t s, int32_t t, int32_t i) {
    return sources.data() + s * source_stride + t * stride + i;
  }
  float last_bias(int32_t t, int32_t g) const {
    if (!sizes.bias) return 0;
    return bias[size_t(g + (sizes.bias_per_token ? t * sizes.groups : 0))];
  }
  // Tokens first .. first + count - 1.
  DepthAttention op(int32_t first, int32_t tokens, Acts out) {
    DepthAttention op{.tokens = tokens, .groups = sizes.groups, .dim = sizes.dim, .eps = 1e-3f,
                      .query = query.data(), .count = sizes.count,
                      .sources = {at(0, first, 0), stride}, .source_stride = source_stride,
                      .out = out};
    const int64_t bias_stride = sizes.bias_per_token ? sizes.groups : 0;
    if (sizes.bias) op.last_bias = {bias.data() + first * bias_stride, bias_stride};
    return op;
  }
  double expected(int32_t t, int32_t g, int32_t i) {
    std::vector<double> scores;
    for (int32_t s = 0; s < sizes.count; ++s) {
      double dot = 0, squares = 0;
      for (int32_t j = g * sizes.dim; j < (g + 1) * sizes.dim; ++j) {
        dot += double(query[size_t(j)]) * double(*at(s, t, j));
        squares += std::pow(double(*at(s, t, j)), 2);
      }
      scores.push_back(dot / std::sqrt(squares / sizes.dim + double(1e-3f)));
    }
    scores.back() += double(last_bias(t, g));
    double total = 0, sum = 0;
    const double most = *std::max_element(scores.begin(), scores.end());
    for (int32_t s = 0; s < sizes.count; ++s) {
      const double weight = std::exp(scores[size_t(s)] - most);
      total += weight;
      sum += weight * double(*at(s, t, g * sizes.dim + i));
    }
    return sum / total;
  }
};

std::vector<float> run(const CpuOptions& options, Data& data, int32_t first, int32_t tokens) {
  std::vector<float> out(size_t(tokens * data.stride), kNan);
  make_cpu_backend(options)->run({data.op(first, tokens, {out.data(), data.stride})});
  return out;
}

// A source left out or counted twice where a block of them ends, a norm without its eps, a bias at
// another source, a group that reads its neighbour's query, a write past a vector.
TEST(DepthAttention, EqualsItsFormula) {
  for (const Sizes& sizes : {Sizes{}, Sizes{.dim = 7, .count = 2}, Sizes{.dim = 96, .count = 49},
                             Sizes{.tokens = 2, .dim = 33, .count = 64},
                             Sizes{.tokens = 2, .dim = 16, .count = 65, .query = 3},
                             Sizes{.tokens = 2, .dim = 5, .count = 130},
                             Sizes{.dim = 64, .count = 9, .query = 40},
                             Sizes{.groups = 4, .dim = 10, .count = 5, .bias = true},
                             Sizes{.groups = 3, .dim = 18, .count = 70, .bias = true,
                                   .bias_per_token = true}}) {
    Data data(sizes);
    for (const CpuKind& kind : cpu_kinds()) {
      const std::vector<float> out = run(kind.options, data, 0, sizes.tokens);
      for (int32_t t = 0; t < sizes.tokens; ++t) {
        const float* const vector = out.data() + t * data.stride;
        for (int32_t i = 0; i < sizes.groups * sizes.dim; ++i) {
          const double expected = data.expected(t, i / sizes.dim, i % sizes.dim);
          ASSERT_NEAR(double(vector[i]), expected, 1e-4 * std::max(1.0, std::fabs(expected)))
              << kind.name << ", " << sizes.text() << ": token " << t << " channel " << i;
        }
        for (int64_t i = data.stride - Data::kGap; i < data.stride; ++i) {
          ASSERT_TRUE(std::isnan(vector[i])) << kind.name << ": wrote past a vector";
        }
      }
    }
  }
}

// The first sub-layer must read the embedding itself, not a product of it with almost 1.
TEST(DepthAttention, OneSourceIsCopied) {
  Data data({.count = 1});
  for (const CpuKind& kind : cpu_kinds()) {
    const std::vector<float> out = run(kind.options, data, 0, data.sizes.tokens);
    for (int32_t t = 0; t < data.sizes.tokens; ++t) {
      for (int32_t i = 0; i < data.sizes.dim; ++i) {
        ASSERT_EQ(out[size_t(t * data.stride + i)], *data.at(0, t, i)) << kind.name;
      }
    }
  }
}

// A zero query makes no difference between sources.
TEST(DepthAttention, ZeroQueryIsTheMean) {
  Data data({.dim = 40, .count = 5, .query = 0});
  for (const CpuKind& kind : cpu_kinds()) {
    const std::vector<float> out = run(kind.options, data, 0, data.sizes.tokens);
    for (int32_t t = 0; t < data.sizes.tokens; ++t) {
      for (int32_t i = 0; i < data.sizes.dim; ++i) {
        double mean = 0;
        for (int32_t s = 0; s < 5; ++s) mean += double(*data.at(s, t, i)) / 5;
        ASSERT_NEAR(double(out[size_t(t * data.stride + i)]), mean, 1e-5) << kind.name;
      }
    }
  }
}

// A token's mix shows how many tokens, or threads, shared the call; or the result is written over
// a source before another channel has read it.
TEST(DepthAttention, TokensDoNotDependOnTheirCompany) {
  const Sizes sizes{.tokens = 300, .groups = 2, .dim = 50, .count = 7};
  Data data(sizes);
  for (CpuKind kind : cpu_kinds()) {
    kind.options.threads = 4;
    const std::vector<float> all = run(kind.options, data, 0, sizes.tokens);
    for (int32_t t = 0; t < sizes.tokens; t += 37) {
      const std::vector<float> one = run(kind.options, data, t, 1);
      const auto begin = all.begin() + t * data.stride;
      ASSERT_TRUE(same_bits(one, {begin, begin + data.stride})) << kind.name << " token " << t;
    }
    Data over(sizes);
    const Acts last{over.at(sizes.count - 1, 0, 0), over.stride};
    make_cpu_backend(kind.options)->run({over.op(0, sizes.tokens, last)});
    const float* const from = over.at(sizes.count - 1, 0, 0);
    ASSERT_TRUE(same_bits({from, from + all.size()}, all)) << kind.name << " in place";
  }
}

}  // namespace
}  // namespace weir
