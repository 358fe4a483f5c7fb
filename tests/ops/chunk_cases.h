#pragma once
#include <cmath>
#include <random>
#include <vector>

namespace weir {

using Vector = std::vector<double>;

// Numbers that a chunk form and its step form are both given.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}

  Vector normal(int64_t count, double scale = 1) {
    std::normal_distribution<double> distribution(0, scale);
    Vector x(static_cast<size_t>(count));
    for (double& one : x) one = distribution(random_);
    return x;
  }
  // 0 .. 1
  Vector gates(int64_t count) {
    Vector x = normal(count);
    for (double& one : x) one = 1 / (1 + std::exp(-one));
    return x;
  }
  // Log decays from none at all to `strongest`, most of them small.
  Vector log_decays(int64_t count, double strongest) {
    Vector x = gates(count);
    for (double& one : x) one *= one * one * strongest;
    return x;
  }
  // [count, dim], each of length 1
  Vector unit(int64_t count, int64_t dim) {
    Vector x = normal(count * dim);
    for (int64_t t = 0; t < count; ++t) {
      double squares = 0;
      for (int64_t i = 0; i < dim; ++i) squares += x[size_t(t * dim + i)] * x[size_t(t * dim + i)];
      for (int64_t i = 0; i < dim; ++i) x[size_t(t * dim + i)] /= std::sqrt(squares);
    }
    return x;
  }
  int32_t upto(int32_t most) { return int32_t(random_() % uint64_t(most)) + 1; }

 private:
  std::mt19937_64 random_;
};

// What double precision leaves of a difference, after some thousand tokens at most.
inline constexpr double kRounding = 1e-11;

// ||a - b|| / ||b||; infinite where one is not finite.
template <typename X, typename Y>
double apart(const std::vector<X>& a, const std::vector<Y>& b) {
  double difference = 0, norm = 0;
  if (a.size() != b.size()) return HUGE_VAL;
  for (size_t i = 0; i < b.size(); ++i) {
    const double x = double(a[i]), y = double(b[i]);
    if (!std::isfinite(x) || !std::isfinite(y)) return HUGE_VAL;
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

inline std::vector<float> floats(const Vector& x) { return {x.begin(), x.end()}; }

}  // namespace weir
