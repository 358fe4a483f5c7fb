#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu.h"
#include "kernels/scalar_math.h"

namespace weir::cpu {
namespace {

// One of the three convolved inputs.
struct Stream {
  Acts in;
  const float *taps, *bias;
  int32_t offset;  // of its channels in the history
};

// A key head of a row, and the value heads that read it.
class Group {
 public:
  Group(const DeltaMix& op, const MixerSimd& simd)
      : op_(op),
        simd_(simd),
        q_(op.key_dim),
        k_(op.key_dim),
        erase_(op.key_dim),
        decay_(op.key_dim, 1.0f),
        decayed_erase_(op.key_dim),
        v_(op.value_dim),
        written_(op.value_dim),
        gate_(op.value_dim) {}

  void run(int32_t row, int32_t key_head);

 private:
  Stream q_stream() const { return {op_.q, op_.conv_q, op_.conv_q_bias, 0}; }
  Stream k_stream() const { return {op_.k, op_.conv_k, op_.conv_k_bias, keys()}; }
  Stream v_stream() const { return {op_.v, op_.conv_v, op_.conv_v_bias, 2 * keys()}; }
  int32_t keys() const { return op_.key_heads * op_.key_dim; }
  int32_t values() const { return op_.value_heads * op_.value_dim; }
  int32_t channels() const { return 2 * keys() + values(); }

  void convolve(const Stream& stream, int32_t t, int32_t first, std::vector<float>& out) const;
  void keep_history(const Stream& stream, int32_t first, int32_t count) const;
  void activate_all(Activation activation, std::vector<float>& x) const;
  void normalise(std::vector<float>& x) const;
  void make_keys(int32_t t);
  void make_decay(int64_t token, int32_t value_head);
  void make_written(int64_t token, int32_t value_head);
  void step(int32_t t, int32_t value_head);
  void finish_output(int64_t token, int32_t value_head, float* out);

  const DeltaMix& op_;
  const MixerSimd& simd_;
  int32_t begin_ = 0, count_ = 0, key_head_ = 0;
  bool fresh_ = false;
  Slot slot_ = 0;
  float scale_ = 0;
  std::vector<float> q_, k_, erase_, decay_, decayed_erase_;  // [key_dim]
  std::vector<float> v_, written_, gate_;                     // [value_dim]
};

// Channels first .. first + out.size() - 1 at the row's token t.
void Group::convolve(const Stream& stream, int32_t t, int32_t first,
                     std::vector<float>& out) const {
  const auto size = int32_t(out.size());
  if (op_.conv_width == 0) {
    std::copy_n(stream.in.at(begin_ + t) + first, size, out.begin());
    return;
  }
  const int32_t width = op_.conv_width, kept = width - 1;
  const float* bias = stream.bias ? stream.bias + first : nullptr;
  for (int32_t c = 0; c < size; ++c) out[size_t(c)] = bias ? bias[c] : 0;
  const float* taps = stream.taps + int64_t(first) * width;
  for (int32_t i = 0; i < width; ++i) {
    const int32_t source = t - kept + i;  // a token of this row, or one before it
    if (source < 0 && fresh_) continue;
    const float* x = source >= 0 ? stream.in.at(begin_ + source) + first
                                 : op_.history.at(slot_) + int64_t(source + kept) * channels() +
                                       stream.offset + first;
    for (int32_t c = 0; c < size; ++c) out[size_t(c)] += taps[int64_t(c) * width + i] * x[c];
  }
}

// The last conv_width - 1 raw inputs of some channels. Oldest first: nothing is read after it was
// overwritten.
void Group::keep_history(const Stream& stream, int32_t first, int32_t count) const {
  const int32_t kept = op_.conv_width - 1;
  float* history = op_.history.at(slot_) + stream.offset + first;
  for (int32_t i = 0; i < kept; ++i) {
    const int32_t source = count_ - kept + i;
    float* to = history + int64_t(i) * channels();
    if (source >= 0) {
      std::copy_n(stream.in.at(begin_ + source) + first, count, to);
    } else if (fresh_) {
      std::fill_n(to, count, 0.0f);
    } else {
      std::copy_n(to + int64_t(count_) * channels(), count, to);
    }
  }
}

void Group::activate_all(Activation activation, std::vector<float>& x) const {
  if (activation == Activation::Silu) {
    simd_.silu(x.data(), int32_t(x.size()));
  } else if (activation == Activation::Sigmoid) {
    simd_.sigmoid(x.data(), int32_t(x.size()));
  } else if (activation != Activation::None) {
    for (float& value : x) value = activate(activation, value);
  }
}

void Group::normalise(std::vector<float>& x) const {
  float divisor = 0;
  if (op_.qk_norm == QkNorm::Sum) {
    for (const float value : x) divisor += value;
  } else {
    divisor = std::sqrt(simd_.dot(x.data(), x.data(), op_.key_dim) + 1e-6f);
  }
  for (float& value : x) value /= divisor;
}

void Group::make_keys(int32_t t) {
  const int32_t first = key_head_ * op_.key_dim;
  convolve(q_stream(), t, first, q_);
  convolve(k_stream(), t, first, k_);
  activate_all(op_.qk_activation, q_);
  activate_all(op_.qk_activation, k_);
  normalise(q_);
  normalise(k_);
  for (float& value : q_) value *= scale_;
  if (!op_.erase) return;
  std::copy_n(op_.erase.at(begin_ + t) + first, op_.key_dim, erase_.begin());
  simd_.sigmoid(erase_.data(), op_.key_dim);
  for (size_t i = 0; i < erase_.size(); ++i) erase_[i] *= op_.beta_scale * k_[i];
}

// The factors exp(g) of this token.
void Group::make_decay(int64_t token, int32_t value_head) {
  if (op_.decay == Decay::None) return;  // decay_ stays 1
  const auto head = int32_t(int64_t(value_head) * op_.decay_heads / op_.value_heads);
  const int32_t size = op_.decay == Decay::PerHead ? 1 : op_.key_dim;
  const float* in = op_.decay_in.at(token) + int64_t(head) * size;
  const float* bias = op_.dt_bias + int64_t(head) * size;
  const float a = op_.decay_a[head];
  for (int32_t i = 0; i < size; ++i) {
    const float z = in[i] + bias[i];
    const bool bounded = op_.lower_bound < 0;
    decay_[size_t(i)] = bounded ? op_.lower_bound * sigmoid(a * z) : -a * softplus(z);
  }
  simd_.exp(decay_.data(), size);
  if (size == 1) std::fill(decay_.begin() + 1, decay_.end(), decay_[0]);
}

// write * v, and decay * erase.
void Group::make_written(int64_t token, int32_t value_head) {
  if (op_.erase) {
    std::copy_n(op_.write.at(token) + int64_t(value_head) * op_.value_dim, op_.value_dim,
                written_.begin());
    simd_.sigmoid(written_.data(), op_.value_dim);
    for (size_t j = 0; j < v_.size(); ++j) written_[j] *= v_[j];
    for (size_t i = 0; i < k_.size(); ++i) decayed_erase_[i] = decay_[i] * erase_[i];
    return;
  }
  const float beta = op_.beta_scale * (op_.beta ? sigmoid(op_.beta.at(token)[value_head]) : 1.0f);
  for (size_t j = 0; j < v_.size(); ++j) written_[j] = beta * v_[j];
  for (size_t i = 0; i < k_.size(); ++i) decayed_erase_[i] = decay_[i] * (beta * k_[i]);
}

void Group::finish_output(int64_t token, int32_t value_head, float* out) {
  const float squares = simd_.dot(out, out, op_.value_dim);
  const float scale = 1 / std::sqrt(squares / float(op_.value_dim) + op_.norm_eps);
  for (int32_t j = 0; j < op_.value_dim; ++j) out[j] *= scale * op_.norm_weight[j];
  if (!op_.gate) return;
  std::copy_n(op_.gate.at(token) + int64_t(value_head) * op_.value_dim, op_.value_dim,
              gate_.begin());
  activate_all(op_.gate_activation, gate_);
  for (int32_t j = 0; j < op_.value_dim; ++j) out[j] *= gate_[size_t(j)];
}

void Group::step(int32_t t, int32_t value_head) {
  const int64_t token = begin_ + t;
  convolve(v_stream(), t, value_head * op_.value_dim, v_);
  simd_.silu(v_.data(), op_.value_dim);
  make_decay(token, value_head);
  make_written(token, value_head);
  float* out = op_.out.at(token) + int64_t(value_head) * op_.value_dim;
  const int64_t matrix = int64_t(op_.value_dim) * op_.key_dim;
  simd_.delta_step({.key_dim = op_.key_dim,
                    .value_dim = op_.value_dim,
                    .state = op_.state.at(slot_) + value_head * matrix,
                    .q = q_.data(),
                    .k = k_.data(),
                    .decay = decay_.data(),
                    .decayed_erase = decayed_erase_.data(),
                    .written = written_.data(),
                    .out = out});
  finish_output(token, value_head, out);
}

void Group::run(int32_t row, int32_t key_head) {
  begin_ = op_.rows.begin[row];
  count_ = op_.rows.begin[row + 1] - begin_;
  slot_ = op_.rows.slot[row];
  if (slot_ == kPadding || count_ == 0) return;
  fresh_ = op_.rows.first[row] == 0;
  key_head_ = key_head;
  scale_ = 1 / std::sqrt(float(op_.key_dim));
  const int32_t group = op_.value_heads / op_.key_heads;
  const int32_t first = key_head * group, last = first + group;
  if (fresh_) {
    const int64_t matrix = int64_t(op_.value_dim) * op_.key_dim;
    std::fill_n(op_.state.at(slot_) + first * matrix, group * matrix, 0.0f);
  }
  for (int32_t t = 0; t < count_; ++t) {
    make_keys(t);
    for (int32_t head = first; head < last; ++head) step(t, head);
  }
  if (op_.conv_width == 0) return;
  keep_history(q_stream(), key_head * op_.key_dim, op_.key_dim);
  keep_history(k_stream(), key_head * op_.key_dim, op_.key_dim);
  keep_history(v_stream(), first * op_.value_dim, group * op_.value_dim);
}

}  // namespace

void run_fast(const DeltaMix& op, const Context& context) {
  const auto work = [&](int64_t begin, int64_t end) {
    Group group(op, *context.simd.mixers);
    for (int64_t i = begin; i < end; ++i) {
      group.run(int32_t(i / op.key_heads), int32_t(i % op.key_heads));
    }
  };
  context.pool.parallel_for(int64_t(op.rows.count) * op.key_heads, work, 1);
}

}  // namespace weir::cpu
