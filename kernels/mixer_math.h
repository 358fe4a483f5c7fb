#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/check.h"
#include "kernels/ring.h"
#include "kernels/types.h"

namespace weir {

// The formulas that sequence mixers share, one number at a time, in double precision.

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// log(1 + e^x), which is x itself where 1 no longer counts.
inline double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// log(sigmoid(x)).
inline double log_sigmoid(double x) { return -softplus(-x); }

// log(exp(a) + exp(b)).
inline double log_add_exp(double a, double b) {
  const double larger = std::fmax(a, b);
  return std::isinf(larger) ? larger : larger + std::log1p(std::exp(-std::fabs(a - b)));
}

inline double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::None: return x;
    case Activation::Silu: return x * sigmoid(x);
    case Activation::Sigmoid: return sigmoid(x);
    case Activation::Relu: return x > 0 ? x : 0;
    case Activation::EluPlusOne: return x > 0 ? x + 1 : std::exp(x);
    case Activation::LogSigmoid: return log_sigmoid(x);
    case Activation::ReluSquared: return x > 0 ? x * x : 0;
    case Activation::GeluTanh:
      return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case Activation::Tanh: return std::tanh(x);
  }
  WEIR_UNREACHABLE("an activation without a formula");
}

// The log decay of a delta rule: -a softplus(x), or the bounded gate.
inline double log_decay(double x, double a, double lower_bound) {
  return lower_bound < 0 ? lower_bound * sigmoid(a * x) : -a * softplus(x);
}

// 1 / sqrt(sum x^2 + 1e-6): zeros stay zeros.
inline double l2_scale(double sum_of_squares) { return 1 / std::sqrt(sum_of_squares + 1e-6); }

// 1 / max(|x|, 1e-6): the other form of it.
inline double l2_max_scale(double sum_of_squares) {
  return 1 / std::fmax(std::sqrt(sum_of_squares), 1e-6);
}

inline double rms_scale(double sum_of_squares, int32_t dim, double eps) {
  return 1 / std::sqrt(sum_of_squares / dim + eps);
}

// One row of a step.
struct RowRun {
  Slot slot = kPadding;
  int32_t first = 0;             // position of its first token; 0: from a zero state
  int32_t begin = 0, count = 0;  // its tokens within the step

  RowRun(const Rows& rows, int32_t row)
      : slot(rows.slot[row]),
        first(rows.first[row]),
        begin(rows.begin[row]),
        count(rows.begin[row + 1] - begin) {}

  bool fresh() const { return first == 0; }
  bool empty() const { return slot == kPadding || count == 0; }
};

// Channels of a row that one causal depthwise convolution over time reads: those of the step, and
// before them the last width - 1 of the steps before, in a ring (ring.h).
struct ConvStream {
  int32_t width = 0;             // 0: no convolution
  const float* taps = nullptr;   // [channels, width], newest tap last
  const float* bias = nullptr;   // [channels], or null
  Acts in;                       // from the row's first token on
  float* history = nullptr;      // [width - 1, history_stride]
  int64_t history_stride = 0;
  int32_t first = 0;             // position of that token; 0: the history reads as zeros

  int32_t kept() const { return width - 1; }
  float* row_of(int32_t position) const {
    return history + ring_row(position, kept()) * history_stride;
  }

  // The input of `back` tokens before the row's token t, back < width; null: zeros.
  const float* input(int32_t t, int32_t back) const {
    if (back <= t) return in.at(t - back);
    return first == 0 ? nullptr : row_of(first + t - back);
  }

  double output(int32_t t, int64_t channel) const {
    if (width == 0) return double(in.at(t)[channel]);
    double sum = bias != nullptr ? double(bias[channel]) : 0.0;
    for (int32_t j = 0; j < width; ++j) {
      const float* const x = input(t, width - 1 - j);
      if (x != nullptr) sum += double(taps[channel * width + j]) * double(x[channel]);
    }
    return sum;
  }

  // Leaves the row's last inputs in the history once its `count` tokens are done.
  void remember(int32_t count, int64_t channels) const {
    for (int32_t t = std::max(0, count - kept()); t < count; ++t) {
      std::copy_n(in.at(t), channels, row_of(first + t));
    }
    for (int32_t t = count; first == 0 && t < kept(); ++t) {
      std::fill_n(row_of(t), channels, 0.0f);
    }
  }

  // The same streams from a later channel on.
  ConvStream from(int64_t channel) const {
    ConvStream later = *this;
    later.in = in.from(channel);
    if (taps != nullptr) later.taps += channel * width;
    if (bias != nullptr) later.bias += channel;
    if (history != nullptr) later.history += channel;
    return later;
  }
};

}  // namespace weir
