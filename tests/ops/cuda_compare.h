#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace weir {

// One backend with the arrays of one op on it. Both sides of a comparison draw the same numbers,
// since both build the same arrays in the same order from the same seed.
class Side {
 public:
  Side(std::unique_ptr<Backend> backend, uint64_t seed)
      : backend_(std::move(backend)), random_(seed) {}

  Backend& backend() { return *backend_; }

  std::vector<float> normal(size_t count, float scale = 1) {
    std::normal_distribution<float> distribution(0, scale);
    std::vector<float> values(count);
    for (float& value : values) value = distribution(random_);
    return values;
  }
  template <typename T>
  T* put(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    T* data = static_cast<T*>(backend_->allocate(bytes));
    backend_->upload(data, values.data(), bytes);
    backend_->finish();
    return data;
  }
  float* floats(size_t count, float scale = 1) { return put(normal(count, scale)); }
  Acts acts(int64_t tokens, int64_t dim, float scale = 1, float mean = 0) {
    const int64_t stride = (dim + 15) / 16 * 16 + 16;
    std::vector<float> values = normal(size_t(tokens * stride), scale);
    for (float& value : values) value += mean;
    return {put(values), stride};
  }
  // A matrix [rows, cols], each entry about 1 / sqrt(cols).
  Matrix matrix(int32_t rows, int32_t cols, DType dtype) {
    const float size = std::sqrt(3.0f / float(cols));
    std::vector<float> values(size_t(rows) * size_t(cols));
    for (float& value : values) value = size * (float(random_() >> 40) * 0x1p-23f - 1.0f);
    Matrix matrix{.rows = rows, .cols = cols, .dtype = dtype};
    if (dtype == DType::F32) {
      matrix.data = put(values);
      return matrix;
    }
    std::vector<uint16_t> halves(values.size());
    for (size_t i = 0; i < values.size(); ++i) halves[i] = narrow(values[i], dtype);
    matrix.data = put(halves);
    return matrix;
  }
  // Registers what is compared: filled with NaN first unless it is also an input.
  Acts out(int64_t tokens, int64_t dim, const std::string& name) {
    const int64_t stride = (dim + 15) / 16 * 16;
    std::vector<float> poison(size_t(tokens * stride), std::numeric_limits<float>::quiet_NaN());
    const Acts acts{put(poison), stride};
    outputs_.push_back({name, acts.data, poison.size(), dim, stride});
    return acts;
  }
  void compare(const float* data, size_t count, const std::string& name) {
    outputs_.push_back({name, data, count, int64_t(count), int64_t(count)});
  }
  // The first `dim` numbers of each `stride`.
  void compare(const float* data, size_t count, int64_t dim, int64_t stride,
               const std::string& name) {
    outputs_.push_back({name, data, count, dim, stride});
  }
  std::vector<float> read(const float* data, size_t count) {
    std::vector<float> values(count);
    backend_->download(values.data(), data, count * sizeof(float));
    backend_->finish();
    return values;
  }

  struct Output {
    std::string name;
    const float* data;
    size_t count;
    int64_t dim, stride;
  };
  const std::vector<Output>& outputs() const { return outputs_; }

 private:
  static uint16_t narrow(float value, DType dtype) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (dtype == DType::BF16) return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    const int exponent = int(bits >> 23 & 255) - 112;
    if (exponent <= 0) return uint16_t(bits >> 16 & 0x8000);
    return uint16_t((bits >> 16 & 0x8000) | uint32_t(exponent) << 10 | (bits >> 13 & 1023));
  }

  std::unique_ptr<Backend> backend_;
  std::mt19937_64 random_;
  std::vector<Output> outputs_;
};

// ||a - b|| / ||b|| over the values that `b` says were written (NaN: not written by either).
inline double relative_error(const std::vector<float>& a, const std::vector<float>& b,
                             const Side::Output& output) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (int64_t(i) % output.stride >= output.dim) continue;
    if (std::isnan(a[i]) != std::isnan(b[i])) return HUGE_VAL;
    if (std::isnan(b[i])) continue;
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    norm += double(b[i]) * b[i];
  }
  return norm == 0 ? (difference == 0 ? 0 : HUGE_VAL) : std::sqrt(difference / norm);
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "skipped: no CUDA device";
  }
  static std::unique_ptr<Backend> cuda(const CudaOptions& options = {}) {
    std::string error;
    auto backend = make_cuda_backend(0, &error, options);
    EXPECT_NE(backend, nullptr) << error;
    return backend;
  }
  // Runs make(side)'s program on the plain CPU and on CUDA and compares what it registered.
  template <typename Make>
  static void same(const std::string& what, double tolerance, const Make& make,
                   const CudaOptions& options = {}) {
    Side plain(make_cpu_backend({.plain = true}), 7), gpu(cuda(options), 7);
    for (Side* side : {&plain, &gpu}) {
      const Program program = make(*side);
      side->backend().run(program);
      side->backend().finish();
    }
    for (size_t i = 0; i < plain.outputs().size(); ++i) {
      const auto &a = gpu.outputs()[i], &b = plain.outputs()[i];
      const double error =
          relative_error(gpu.read(a.data, a.count), plain.read(b.data, b.count), b);
      std::printf("%-60s %-10s %.2e\n", what.c_str(), b.name.c_str(), error);
      EXPECT_LE(error, tolerance) << what << ", " << b.name;
    }
  }
};

}  // namespace weir
