#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/op.h"
#include "kernels/simd.h"
#include "kernels/widen.h"

namespace weir {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

const char* dtype_name(DType dtype) {
  return dtype == DType::F32 ? "F32" : dtype == DType::BF16 ? "BF16" : "F16";
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float value() { return std::uniform_real_distribution<float>(-1, 1)(engine_); }
  int32_t below(int32_t end) { return int32_t(engine_() % uint32_t(end)); }
  std::vector<float> values(int64_t count) {
    std::vector<float> all(static_cast<size_t>(count));
    for (float& one : all) one = value();
    return all;
  }

 private:
  std::mt19937 engine_;
};

// A random matrix that begins `shift` bytes past any alignment.
struct Weights {
  std::vector<char> bytes;
  Matrix matrix;

  Weights(int32_t rows, int32_t cols, DType dtype, Random& random) {
    const size_t shift = dtype == DType::F32 ? 4 : 2;
    matrix = {.rows = rows, .cols = cols, .dtype = dtype};
    bytes.resize(matrix.bytes() + shift);
    for (size_t i = 0; i < size_t(rows) * size_t(cols); ++i) {
      const float value = random.value();
      char* const at = bytes.data() + shift + i * size_of(dtype);
      if (dtype == DType::F32) {
        std::memcpy(at, &value, sizeof(value));
      } else {
        // As float16 these bits are a normal number of the same sign, between 0.5 and 2.
        const uint16_t bits = dtype == DType::BF16
                                  ? uint16_t(std::bit_cast<uint32_t>(value) >> 16)
                                  : uint16_t(0x3800 + random.below(0x800) + (value < 0) * 0x8000);
        std::memcpy(at, &bits, sizeof(bits));
      }
    }
    matrix.data = bytes.data() + shift;
  }
};

// Vectors with a gap behind each that must stay as it was.
struct Vectors {
  std::vector<float> data;
  int64_t dim, stride;

  Vectors(int64_t tokens, int64_t dim, float fill = kNaN)
      : data(size_t(tokens * (dim + 3)), fill), dim(dim), stride(dim + 3) {}
  Vectors(int64_t tokens, int64_t dim, Random& random) : Vectors(tokens, dim) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < dim; ++i) at(t)[i] = random.value();
    }
  }
  float* at(int64_t token) { return data.data() + token * stride; }
  Acts acts() { return {data.data(), stride}; }
};

void expect_near(Vectors& found, Vectors& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(found.data.size(), expected.data.size());
  for (size_t i = 0; i < found.data.size(); ++i) {
    const bool gap = int64_t(i) % found.stride >= found.dim;
    if (gap) {
      ASSERT_TRUE(std::isnan(found.data[i])) << what << ": wrote past a vector, at " << i;
      continue;
    }
    ASSERT_NEAR(found.data[i], expected.data[i],
                tolerance * std::max(1.0f, std::abs(expected.data[i])))
        << what << ", at " << i;
  }
}

// Every test runs for each instruction set that this machine has.
class DenseOps : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (simd_table(GetParam()) == nullptr) {
      GTEST_SKIP() << "this machine lacks instruction set number " << GetParam();
    }
  }
  void check(const Op& fast, const Op& plain, Vectors& found, Vectors& expected, double tolerance,
             const std::string& what) {
    std::fill(found.data.begin(), found.data.end(), kNaN);
    run_fast(fast, 1);
    plain_->run({plain});
    expect_near(found, expected, tolerance, what);
  }
  void run_fast(const Op& op, int threads) {
    std::unique_ptr<Backend>& backend = fast_[threads];
    if (!backend) backend = make_cpu_backend({.threads = threads, .simd = GetParam()});
    backend->run({op});
  }

  std::unique_ptr<Backend> plain_ = make_cpu_backend({.plain = true});
  std::unique_ptr<Backend> fast_[5];
};

struct LinearCase {
  int32_t in, parts, tokens;
  DType dtype;
  bool bias, accumulate;

  std::string text() const {
    return std::string(dtype_name(dtype)) + " in " + std::to_string(in) + ", parts " +
           std::to_string(parts) + ", tokens " + std::to_string(tokens) + (bias ? ", bias" : "") +
           (accumulate ? ", accumulate" : "");
  }
};

// Everything one Linear needs, its output not yet written.
struct LinearData {
  LinearCase shape;
  std::vector<Weights> weights;
  std::vector<std::vector<float>> biases;
  int64_t rows = 0;
  Vectors x;
  std::vector<float> before;  // y, where it accumulates

  LinearData(const LinearCase& shape, Random& random)
      : shape(shape), x(shape.tokens, shape.in, random) {
    for (int32_t i = 0; i < shape.parts; ++i) {
      const int32_t part_rows = 1 + random.below(23);
      weights.emplace_back(part_rows, shape.in, shape.dtype, random);
      biases.push_back(random.values(part_rows));
      rows += part_rows;
    }
    before = random.values(shape.tokens * rows);
  }

  // Tokens first .. first + tokens - 1 into y, which this fills as the op expects it.
  Linear op(int32_t first, int32_t tokens, Vectors& y) {
    Linear linear{.tokens = tokens,
                  .in = shape.in,
                  .parts = shape.parts,
                  .accumulate = shape.accumulate,
                  .x = {x.at(first), x.stride},
                  .y = y.acts()};
    for (size_t i = 0; i < weights.size(); ++i) {
      linear.part[i] = weights[i].matrix;
      linear.bias[i] = shape.bias && i % 2 == 0 ? biases[i].data() : nullptr;
    }
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t r = 0; r < rows; ++r) {
        y.at(t)[r] = shape.accumulate ? before[size_t((first + t) * rows + r)] : kNaN;
      }
    }
    return linear;
  }
};

// A tile, a tail, a part's border, a bias or an old value handled wrongly.
TEST_P(DenseOps, LinearEqualsItsFormula) {
  Random random(1);
  for (const DType dtype : {DType::F32, DType::BF16, DType::F16}) {
    for (const int32_t in : {1, 7, 15, 16, 17, 33, 100, 640, 1031}) {
      for (const int32_t tokens : {1, 2, 3, 4, 5, 6, 7, 11, 16, 35}) {
        const LinearCase shape{in, 1 + random.below(Linear::kParts), tokens, dtype,
                               random.below(2) == 0, random.below(2) == 0};
        LinearData data(shape, random);
        Vectors found(tokens, data.rows), expected(tokens, data.rows);
        run_fast(data.op(0, tokens, found), 1);
        plain_->run({data.op(0, tokens, expected)});
        expect_near(found, expected, 3e-7 * in + 1e-6, shape.text());
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Long vectors and many tokens go through several blocks of tokens.
TEST_P(DenseOps, LinearOfLongVectors) {
  Random random(2);
  LinearData data({.in = 5632, .parts = 2, .tokens = 29, .dtype = DType::BF16}, random);
  Vectors found(29, data.rows), expected(29, data.rows);
  run_fast(data.op(0, 29, found), 1);
  plain_->run({data.op(0, 29, expected)});
  expect_near(found, expected, 1e-4, data.shape.text());
}

// A token's numbers show how many others shared the call, or how many threads: the same request
// would be answered differently on a busy server.
TEST_P(DenseOps, LinearOfATokenIsTheSameInEveryCall) {
  Random random(3);
  for (const DType dtype : {DType::F32, DType::BF16, DType::F16}) {
    for (const int32_t in : {7, 33, 640, 4099}) {
      LinearData data({.in = in, .parts = 5, .tokens = 67, .dtype = dtype, .bias = true,
                       .accumulate = true}, random);
      Vectors alone(67, data.rows);
      for (int32_t t = 0; t < 67; ++t) {
        Vectors y(1, data.rows);
        run_fast(data.op(t, 1, y), 1);
        std::memcpy(alone.at(t), y.at(0), size_t(data.rows) * sizeof(float));
      }
      for (int32_t tokens = 1; tokens <= 67; tokens += tokens < 20 ? 1 : 47) {
        for (const int threads : {1, 2, 4}) {
          const int32_t first = random.below(67 - tokens + 1);
          Vectors y(tokens, data.rows);
          run_fast(data.op(first, tokens, y), threads);
          for (int32_t t = 0; t < tokens; ++t) {
            ASSERT_EQ(std::memcmp(y.at(t), alone.at(first + t),
                                  size_t(data.rows) * sizeof(float)), 0)
                << dtype_name(dtype) << " in " << in << ", token " << t << " of " << tokens
                << " with " << threads << " threads";
          }
        }
      }
    }
  }
}

// A large product is shared among threads: a row lost or computed with another part's weights.
TEST_P(DenseOps, LinearAmongThreads) {
  Random random(4);
  Weights weights(1501, 257, DType::BF16, random), more(703, 257, DType::BF16, random);
  Vectors x(9, 257, random), one(9, 2204), many(9, 2204);
  Linear op{.tokens = 9, .in = 257, .parts = 2, .part = {weights.matrix, more.matrix},
            .x = x.acts(), .y = one.acts()};
  run_fast(op, 1);
  op.y = many.acts();
  run_fast(op, 4);
  EXPECT_EQ(std::memcmp(one.data.data(), many.data.data(), one.data.size() * sizeof(float)), 0);
}

// Infinite and not-a-number weights, as a broken checkpoint has them, stay visible.
TEST_P(DenseOps, LinearKeepsNaN) {
  Random random(5);
  Weights weights(9, 37, DType::F32, random);
  Vectors x(3, 37, random), y(3, 9, 0.0f);
  x.at(1)[36] = kNaN;
  run_fast(Linear{.tokens = 3, .in = 37, .parts = 1, .part = {weights.matrix}, .x = x.acts(),
                  .y = y.acts()}, 1);
  for (int r = 0; r < 9; ++r) {
    EXPECT_FALSE(std::isnan(y.at(0)[r]));
    EXPECT_TRUE(std::isnan(y.at(1)[r]));
    EXPECT_FALSE(std::isnan(y.at(2)[r]));
  }
}

// Every 16-bit pattern: subnormals, infinities and all.
TEST_P(DenseOps, EmbedWidensEveryNumber) {
  for (const DType dtype : {DType::BF16, DType::F16}) {
    std::vector<uint16_t> bits(65536);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = uint16_t(i);
    const Matrix table{.data = bits.data(), .rows = 64, .cols = 1024, .dtype = dtype};
    std::vector<Token> ids(64);
    for (int32_t i = 0; i < 64; ++i) ids[size_t(i)] = 63 - i;
    Vectors found(64, 1024), expected(64, 1024);
    run_fast(Embed{.tokens = 64, .ids = ids.data(), .table = table, .out = found.acts()}, 2);
    plain_->run({Embed{.tokens = 64, .ids = ids.data(), .table = table, .out = expected.acts()}});
    for (int64_t t = 0; t < 64; ++t) {
      for (int64_t i = 0; i < 1024; ++i) {
        const float a = found.at(t)[i], b = expected.at(t)[i];
        ASSERT_TRUE((std::isnan(a) && std::isnan(b)) ||
                    std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b))
            << dtype_name(dtype) << " " << (63 - t) * 1024 + i << ": " << a << " and " << b;
      }
    }
  }
  EXPECT_EQ(widen_f16(0x3c00), 1.0f);
  EXPECT_EQ(widen_f16(0x0001), 0x1p-24f);
  EXPECT_EQ(widen_f16(0xfbff), -65504.0f);
  EXPECT_EQ(widen_bf16(0xc040), -3.0f);
}

// Tokens that only the device knows: what the step before has drawn, or 0 where that broke.
TEST_P(DenseOps, EmbedTakesWhatTheStepBeforeHasDrawn) {
  Random random(8);
  Weights table(11, 24, DType::BF16, random);
  const std::vector<Token> ids = {2, ~1, 10, ~2, ~0}, drawn = {9, 4, -1}, known = {2, 4, 10, 0, 9};
  std::vector<Token> read(5, -7);
  Vectors found(5, 24), expected(5, 24);
  check(Embed{.tokens = 5, .ids = ids.data(), .drawn = drawn.data(), .read = read.data(),
              .table = table.matrix, .out = found.acts()},
        Embed{.tokens = 5, .ids = known.data(), .table = table.matrix, .out = expected.acts()},
        found, expected, 0, "drawn");
  EXPECT_EQ(read, known);
}

TEST_P(DenseOps, EmbedOfOddWidths) {
  Random random(6);
  for (const DType dtype : {DType::F32, DType::BF16, DType::F16}) {
    for (const int32_t dim : {1, 3, 8, 17, 640}) {
      Weights table(5, dim, dtype, random);
      const std::vector<Token> ids = {4, 0, 4, 2};
      Vectors found(4, dim), expected(4, dim);
      check(Embed{.tokens = 4, .ids = ids.data(), .table = table.matrix, .out = found.acts()},
            Embed{.tokens = 4, .ids = ids.data(), .table = table.matrix, .out = expected.acts()},
            found, expected, 0, dtype_name(dtype));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(DenseOps, RmsNormEqualsItsFormula) {
  Random random(7);
  for (const int32_t dim : {1, 7, 16, 33, 640, 2048}) {
    for (const int32_t tokens : {1, 5, 35}) {
      Vectors in(tokens, dim, random), found(tokens, dim), expected(tokens, dim);
      const std::vector<float> weight = random.values(dim);
      RmsNorm op{.tokens = tokens, .dim = dim, .eps = 1e-6f, .weight = weight.data(),
                 .in = in.acts(), .out = found.acts()};
      RmsNorm plain = op;
      plain.out = expected.acts();
      check(op, plain, found, expected, 2e-6, "dim " + std::to_string(dim));
      if (HasFatalFailure()) return;
      Vectors threaded(tokens, dim);
      op.out = threaded.acts();
      run_fast(op, 4);
      for (int64_t t = 0; t < tokens; ++t) {
        ASSERT_EQ(std::memcmp(threaded.at(t), found.at(t), size_t(dim) * sizeof(float)), 0);
      }
    }
  }
}

// The exponential at both ends, and `out` lying upon `gate`.
TEST_P(DenseOps, SwigluEqualsItsFormula) {
  Random random(8);
  for (const int32_t dim : {1, 7, 16, 33, 640, 5632}) {
    for (const int32_t tokens : {1, 3, 35}) {
      Vectors gate(tokens, dim, random), up(tokens, dim, random);
      Vectors expected(tokens, dim), threaded(tokens, dim);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t i = 0; i < dim; ++i) gate.at(t)[i] *= i % 5 == 0 ? 200.0f : 10.0f;
      }
      Swiglu op{.tokens = tokens, .dim = dim, .gate = gate.acts(), .up = up.acts(),
                .out = expected.acts()};
      plain_->run({op});
      op.out = threaded.acts();
      run_fast(op, 4);
      op.out = gate.acts();
      run_fast(op, 1);
      expect_near(gate, expected, 1e-6, "dim " + std::to_string(dim));
      expect_near(threaded, expected, 1e-6, "dim " + std::to_string(dim));
      if (HasFatalFailure()) return;
      for (int64_t t = 0; t < tokens; ++t) {
        ASSERT_EQ(std::memcmp(threaded.at(t), gate.at(t), size_t(dim) * sizeof(float)), 0);
      }
    }
  }
}

TEST_P(DenseOps, GatherPicksTokens) {
  Random random(9);
  Vectors in(6, 11, random), found(3, 11), expected(3, 11);
  const std::vector<int32_t> index = {5, 0, 5};
  for (int64_t i = 0; i < 3; ++i) {
    std::memcpy(expected.at(i), in.at(index[size_t(i)]), 11 * sizeof(float));
  }
  run_fast(Gather{.count = 3, .dim = 11, .index = index.data(), .in = in.acts(),
                  .out = found.acts()}, 2);
  expect_near(found, expected, 0, "gather");
}

std::string level_name(const testing::TestParamInfo<int>& info) {
  return info.param == 2 ? "AVX512" : info.param == 1 ? "AVX2" : "Portable";
}
INSTANTIATE_TEST_SUITE_P(Simd, DenseOps, testing::Range(0, kSimdLevels), level_name);

}  // namespace
}  // namespace weir
