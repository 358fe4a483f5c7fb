#pragma once
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/delta_mix.h"

namespace weir {

// A delta-rule mixer and whole sequences through it in double precision: each step is a product of
// matrices, S = S A + w k' with A = diag(exp g) (I - e k'), over inputs that are held from the
// first token on. Nothing of it is shared with the code under test.
struct DeltaConfig {
  std::string name;
  int32_t key_heads = 2, value_heads = 2, key_dim = 16, value_dim = 16;
  int32_t conv_width = 4;
  bool conv_bias = false;
  Activation qk_activation = Activation::Silu;
  QkNorm qk_norm = QkNorm::L2;
  Decay decay = Decay::PerHead;
  int32_t decay_heads = 2;
  float lower_bound = 0;
  bool beta = true, erase = false, gate = true;
  float beta_scale = 1;
  bool erases = true;
  bool routed = false;  // values are ready, residuals are emitted, something joins the answer
  Activation gate_activation = Activation::Silu;

  int32_t keys() const { return key_heads * key_dim; }
  int32_t values() const { return value_heads * value_dim; }
  int32_t decay_channels() const {
    if (decay == Decay::None) return 0;
    return decay_heads * (decay == Decay::PerHead ? 1 : key_dim);
  }
  size_t state_floats() const { return size_t(values()) * size_t(key_dim); }
  size_t history_floats() const {
    const size_t channels = size_t(2 * keys() + (routed ? 0 : values()));
    return conv_width > 1 ? size_t(conv_width - 1) * channels : 0;
  }
};

using Random = std::mt19937_64;

inline std::vector<float> normal(Random& random, size_t count, float scale = 1, float mean = 0) {
  std::normal_distribution<float> distribution(mean, scale);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

struct DeltaParameters {
  std::vector<float> conv_q, conv_k, conv_v, bias_q, bias_k, bias_v, decay_a, dt_bias, norm;

  DeltaParameters(const DeltaConfig& c, Random& random) {
    const auto keys = size_t(c.keys()), values = size_t(c.values()), width = size_t(c.conv_width);
    conv_q = normal(random, keys * width, 0.5f);
    conv_k = normal(random, keys * width, 0.5f);
    conv_v = normal(random, values * width, 0.5f);
    if (c.conv_bias) {
      bias_q = normal(random, keys, 0.3f);
      bias_k = normal(random, keys, 0.3f);
      bias_v = normal(random, values, 0.3f);
    }
    decay_a = normal(random, size_t(c.decay_heads), 0.7f);
    for (float& a : decay_a) a = std::exp(a);
    dt_bias = normal(random, size_t(c.decay_channels()), 1, -1);
    norm = normal(random, size_t(c.value_dim), 0.2f, 1);
  }
};

// The mixer's inputs for one sequence, [tokens, channels] each.
struct DeltaSequence {
  int32_t tokens = 0;
  std::vector<float> q, k, v, decay, beta, erase, write, gate, answer_add;

  DeltaSequence(const DeltaConfig& c, int32_t tokens, Random& random) : tokens(tokens) {
    const auto make = [&](int32_t channels) {
      return normal(random, size_t(tokens) * size_t(channels));
    };
    q = make(c.keys());
    k = make(c.keys());
    v = make(c.values());
    decay = make(c.decay_channels());
    beta = make(c.value_heads);
    erase = make(c.keys());
    write = make(c.values());
    gate = make(c.values());
    answer_add = make(c.routed ? c.values() : 0);
  }
};

struct DeltaAnswer {
  std::vector<double> out;      // [tokens, values]
  std::vector<double> emitted;  // the same shape: u
  std::vector<double> state;    // [value_heads, value_dim, key_dim], after the last token
};

class DeltaReference {
 public:
  DeltaReference(const DeltaConfig& c, const DeltaParameters& p, const DeltaSequence& s)
      : c_(c), p_(p), s_(s) {}

  DeltaAnswer answer() const {
    DeltaAnswer answer;
    answer.out.resize(size_t(s_.tokens) * size_t(c_.values()));
    answer.emitted = answer.out;
    for (int32_t head = 0; head < c_.value_heads; ++head) {
      std::vector<double> S(size_t(c_.value_dim) * size_t(c_.key_dim), 0.0);
      for (int32_t t = 0; t < s_.tokens; ++t) step(t, head, S, answer);
      answer.state.insert(answer.state.end(), S.begin(), S.end());
    }
    return answer;
  }

 private:
  using Vector = std::vector<double>;

  static double logistic(double x) { return 0.5 * (1 + std::tanh(x / 2)); }
  static double act(Activation activation, double x) {
    switch (activation) {
      case Activation::Silu: return x * logistic(x);
      case Activation::Sigmoid: return logistic(x);
      case Activation::Relu: return std::fmax(x, 0);
      case Activation::EluPlusOne: return x > 0 ? x + 1 : std::exp(x);
      default: return x;
    }
  }
  double conv(const std::vector<float>& x, const std::vector<float>& taps,
              const std::vector<float>& bias, int32_t channels, int32_t t, int32_t c) const {
    const auto at = [&](int32_t time) { return double(x[size_t(time * channels + c)]); };
    if (c_.conv_width == 0) return at(t);
    double sum = bias.empty() ? 0 : double(bias[size_t(c)]);
    for (int32_t back = 0; back < c_.conv_width && back <= t; ++back) {
      sum += at(t - back) * double(taps[size_t(c * c_.conv_width + c_.conv_width - 1 - back)]);
    }
    return sum;
  }
  Vector key(const std::vector<float>& x, const std::vector<float>& taps,
             const std::vector<float>& bias, int32_t t, int32_t head) const {
    Vector key;
    double divisor = 0;
    for (int32_t i = 0; i < c_.key_dim; ++i) {
      key.push_back(act(c_.qk_activation,
                        conv(x, taps, bias, c_.keys(), t, head * c_.key_dim + i)));
      divisor += c_.qk_norm == QkNorm::Sum ? key.back() : key.back() * key.back();
    }
    if (c_.qk_norm == QkNorm::L2) divisor = std::sqrt(divisor + 1e-6);
    if (c_.qk_norm == QkNorm::L2Max) divisor = std::fmax(std::sqrt(divisor), 1e-6);
    for (double& one : key) one /= divisor;
    return key;
  }
  double decay(int32_t t, int32_t value_head, int32_t i) const {
    if (c_.decay == Decay::None) return 1;
    const int32_t head = value_head * c_.decay_heads / c_.value_heads;
    const int32_t channel = c_.decay == Decay::PerHead ? head : head * c_.key_dim + i;
    const double a = double(p_.decay_a[size_t(head)]);
    const double x = double(s_.decay[size_t(t * c_.decay_channels() + channel)]) +
                     double(p_.dt_bias[size_t(channel)]);
    const double softplus = std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x)));
    return std::exp(c_.lower_bound < 0 ? double(c_.lower_bound) * logistic(a * x) : -a * softplus);
  }

  void step(int32_t t, int32_t head, Vector& S, DeltaAnswer& answer) const {
    const int32_t K = c_.key_dim, V = c_.value_dim;
    const int32_t key_head = head * c_.key_heads / c_.value_heads;
    const Vector q = key(s_.q, p_.conv_q, p_.bias_q, t, key_head);
    const Vector k = key(s_.k, p_.conv_k, p_.bias_k, t, key_head);
    const auto head_channel = size_t(t * c_.value_heads + head);
    const double beta =
        double(c_.beta_scale) * (c_.beta ? logistic(double(s_.beta[head_channel])) : 1);
    Vector A(size_t(K) * size_t(K)), E, next(S.size()), o(static_cast<size_t>(V));
    for (int32_t i = 0; i < K; ++i) {
      const double gate =
          c_.erase ? double(c_.beta_scale) *
                         logistic(double(s_.erase[size_t(t * c_.keys() + key_head * K + i)]))
                   : beta;
      const double g = decay(t, head, i), e = c_.erases ? gate * k[size_t(i)] : 0;
      E.push_back(g * e);
      for (int32_t j = 0; j < K; ++j) A[size_t(i * K + j)] = g * ((i == j) - e * k[size_t(j)]);
    }
    double squares = 0;
    for (int32_t r = 0; r < V; ++r) {
      const auto channel = size_t(t * c_.values() + head * V + r);
      const double gate = !c_.erases  ? 1
                          : c_.erase ? logistic(double(s_.write[channel]))
                                     : beta;
      const double v = c_.routed ? double(s_.v[channel])
                                 : act(Activation::Silu, conv(s_.v, p_.conv_v, p_.bias_v,
                                                              c_.values(), t, head * V + r));
      double* const row = &next[size_t(r * K)];
      answer.emitted[channel] = gate * v;
      for (int32_t i = 0; i < K; ++i) {
        answer.emitted[channel] -= S[size_t(r * K + i)] * E[size_t(i)];
      }
      for (int32_t j = 0; j < K; ++j) row[j] = gate * v * k[size_t(j)];
      for (int32_t i = 0; i < K; ++i) {
        const double s = S[size_t(r * K + i)];
        for (int32_t j = 0; j < K; ++j) row[j] += s * A[size_t(i * K + j)];
      }
      for (int32_t j = 0; j < K; ++j) o[size_t(r)] += row[j] * q[size_t(j)] / std::sqrt(K);
      if (c_.routed) o[size_t(r)] += double(s_.answer_add[channel]);
      squares += o[size_t(r)] * o[size_t(r)];
    }
    S = next;
    for (int32_t r = 0; r < V; ++r) {
      const auto channel = size_t(t * c_.values() + head * V + r);
      double& out = answer.out[channel];
      out = o[size_t(r)] / std::sqrt(squares / V + 1e-5) * double(p_.norm[size_t(r)]);
      if (c_.gate) out *= act(c_.gate_activation, double(s_.gate[channel]));
    }
  }

  const DeltaConfig& c_;
  const DeltaParameters& p_;
  const DeltaSequence& s_;
};

// ||a - b|| / ||b||; infinite where one is not finite.
inline double relative_error(const std::vector<float>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return HUGE_VAL;
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    norm += b[i] * b[i];
  }
  return norm == 0 ? (difference == 0 ? 0 : HUGE_VAL) : std::sqrt(difference / norm);
}

}  // namespace weir
