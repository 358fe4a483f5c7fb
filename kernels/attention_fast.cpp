#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu.h"

namespace weir::cpu {
namespace {

// A kv head of a row, and the query heads that read it.
class Group {
 public:
  Group(const Attention& op, const MixerSimd& simd)
      : op_(op), simd_(simd), query_(op.head_dim), frequency_(size_t(op.head_dim) / 2),
        cosine_(frequency_.size()), sine_(frequency_.size()) {
    for (size_t i = 0; i < frequency_.size() && op.rope_theta > 0; ++i) {
      frequency_[i] = std::pow(double(op.rope_theta), -2.0 * double(i) / op.head_dim);
    }
  }

  void run(int32_t row, int32_t kv_head);

 private:
  // Where a position's key lies; its value lies value_offset() floats later.
  float* key_at(int32_t position) const;
  int64_t value_offset() const {
    return int64_t(op_.kv_heads) * block_tokens() * op_.head_dim;
  }
  int32_t block_tokens() const { return op_.window > 0 ? op_.window : op_.page_tokens; }
  // Positions from `position` on that lie one after the other in memory, at most to `last`.
  int32_t run_length(int32_t position, int32_t last) const {
    return std::min(last - position + 1, block_tokens() - position % block_tokens());
  }

  void set_position(int32_t position);
  void normalise_and_rotate(const float* weight, float* x) const;
  void append(int32_t t, int32_t position);
  void attend(int32_t t, int32_t position, int32_t head);

  const Attention& op_;
  const MixerSimd& simd_;
  int32_t row_ = 0, kv_head_ = 0;
  std::vector<float> query_;   // [head_dim]
  std::vector<float> scores_;  // [positions seen], grows
  std::vector<double> frequency_;
  std::vector<float> cosine_, sine_;  // of the current position
};

float* Group::key_at(int32_t position) const {
  const int32_t tokens = block_tokens();
  const int64_t in_block =
      (int64_t(kv_head_) * tokens + position % tokens) * op_.head_dim;
  if (op_.window > 0) return op_.ring.at(op_.rows.slot[row_]) + in_block;
  const int32_t* pages = op_.page_table + int64_t(row_) * op_.pages_per_row;
  return op_.pages + pages[position / tokens] * op_.page_stride + in_block;
}

void Group::set_position(int32_t position) {
  if (op_.rope_theta <= 0) return;
  for (size_t i = 0; i < frequency_.size(); ++i) {
    const double angle = position * frequency_[i];
    cosine_[i] = float(std::cos(angle));
    sine_[i] = float(std::sin(angle));
  }
}

void Group::normalise_and_rotate(const float* weight, float* x) const {
  if (weight) {
    const float squares = simd_.dot(x, x, op_.head_dim);
    const float scale = 1 / std::sqrt(squares / float(op_.head_dim) + op_.norm_eps);
    for (int32_t i = 0; i < op_.head_dim; ++i) x[i] *= scale * weight[i];
  }
  if (op_.rope_theta <= 0) return;
  const auto half = int32_t(frequency_.size());
  for (int32_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half], c = cosine_[size_t(i)], s = sine_[size_t(i)];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

void Group::append(int32_t t, int32_t position) {
  const int64_t first = int64_t(kv_head_) * op_.head_dim;
  float* key = key_at(position);
  std::copy_n(op_.k.at(t) + first, op_.head_dim, key);
  normalise_and_rotate(op_.k_norm, key);
  std::copy_n(op_.v.at(t) + first, op_.head_dim, key + value_offset());
}

void Group::attend(int32_t t, int32_t position, int32_t head) {
  const int64_t first = int64_t(head) * op_.head_dim;
  std::copy_n(op_.q.at(t) + first, op_.head_dim, query_.begin());
  normalise_and_rotate(op_.q_norm, query_.data());
  const int32_t oldest = op_.window > 0 ? std::max(0, position - op_.window + 1) : 0;
  const float scale = 1 / std::sqrt(float(op_.head_dim));
  for (int32_t p = oldest; p <= position;) {
    const int32_t count = run_length(p, position);
    simd_.scores(query_.data(), key_at(p), count, op_.head_dim, scale,
                 &scores_[size_t(p - oldest)]);
    p += count;
  }
  const int32_t seen = position - oldest + 1;
  const float largest = *std::max_element(scores_.begin(), scores_.begin() + seen);
  for (int32_t i = 0; i < seen; ++i) scores_[size_t(i)] -= largest;
  simd_.exp(scores_.data(), seen);
  float sum = 0;
  for (int32_t i = 0; i < seen; ++i) sum += scores_[size_t(i)];

  float* out = op_.out.at(t) + first;
  std::fill_n(out, op_.head_dim, 0.0f);
  for (int32_t p = oldest; p <= position;) {
    const int32_t count = run_length(p, position);
    simd_.weighted_sum(&scores_[size_t(p - oldest)], key_at(p) + value_offset(), count,
                       op_.head_dim, out);
    p += count;
  }
  for (int32_t i = 0; i < op_.head_dim; ++i) out[i] /= sum;
}

void Group::run(int32_t row, int32_t kv_head) {
  row_ = row;
  kv_head_ = kv_head;
  const int32_t begin = op_.rows.begin[row], end = op_.rows.begin[row + 1];
  if (op_.rows.slot[row] == kPadding || begin == end) return;
  const auto longest = size_t(op_.rows.first[row]) + size_t(end - begin);
  const size_t seen = op_.window > 0 ? std::min(longest, size_t(op_.window)) : longest;
  if (scores_.size() < seen) scores_.resize(seen);
  const int32_t group = op_.heads / op_.kv_heads;
  // Token by token: a ring's older entries are gone once a later token of the row is appended.
  for (int32_t t = begin; t < end; ++t) {
    const int32_t position = op_.rows.first[row] + (t - begin);
    set_position(position);
    append(t, position);
    for (int32_t i = 0; i < group; ++i) attend(t, position, kv_head * group + i);
  }
}

}  // namespace

void run_fast(const Attention& op, const Context& context) {
  const MixerSimd& simd = context.plain ? plain_mixers() : *context.simd.mixers;
  const auto work = [&](int64_t begin, int64_t end) {
    Group group(op, simd);
    for (int64_t i = begin; i < end; ++i) {
      group.run(int32_t(i / op.kv_heads), int32_t(i % op.kv_heads));
    }
  };
  const int64_t items = int64_t(op.rows.count) * op.kv_heads;
  context.plain ? work(0, items) : context.pool.parallel_for(items, work, 1);
}

}  // namespace weir::cpu
