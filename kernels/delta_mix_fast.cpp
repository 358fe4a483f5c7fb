#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu.h"
#include "kernels/delta_streams.h"
#include "kernels/mixer_math.h"
#include "kernels/scratch.h"

namespace weir::cpu {
namespace {

// Tokens whose vectors are made ready at one time: they fit the first-level cache, and each row of
// the state is fetched once for all of them.
constexpr int32_t kBlockTokens = 8;
constexpr int64_t kPrefetchFloats = 2 * 1024;  // of the state, before the vectors are made ready
constexpr size_t kScratchFloats = 8 * 1024;  // what usual sizes need

// A key head of a row and the value heads that read it. One claim of a thread: no other touches
// their states or their channels of the history.
class KeyHead {
 public:
  KeyHead(const DeltaMix& op, const MixerSimd& simd, const RowRun& row, int64_t key_head);
  void run();

 private:
  // One convolution's taps, turned so that neighbouring channels are neighbours.
  struct Conv {
    ConvStream stream;
    const float* taps = nullptr;  // [width, channels]
    int64_t channels = 0;
  };
  struct Buffers {
    float *q, *k, *decay, *erase;  // [kBlockTokens, key_dim]
    float *v, *out;                // [kBlockTokens, value_dim]
    const float* zeros;            // as many as the widest convolution has channels
  };

  void prefetch() const;
  Conv conv(const ConvStream& stream, int64_t channels);
  void convolve(const Conv& conv, int32_t t, int64_t channel, float* y, int64_t channels) const;
  void prepare_key(const Conv& conv, int32_t t, float scale, float* x) const;
  void prepare_value_head(int64_t value_head, int32_t t, int32_t i) const;
  void finish(int64_t value_head, int32_t t, int32_t i) const;

  int64_t group() const { return op_.value_heads / op_.key_heads; }
  int32_t block_tokens() const { return std::min(row_.count, kBlockTokens); }
  static size_t scratch_floats(const DeltaMix& op, int32_t block_tokens);

  const DeltaMix& op_;
  const MixerSimd& simd_;
  const RowRun row_;
  const int64_t key_head_;
  Scratch<kScratchFloats> scratch_;
  Buffers x_{};
  Conv q_, k_, v_;
};

size_t KeyHead::scratch_floats(const DeltaMix& op, int32_t block_tokens) {
  const auto K = size_t(op.key_dim), V = size_t(op.value_dim);
  const size_t channels = 2 * K + size_t(op.value_heads / op.key_heads) * V;
  const size_t taps = size_t(op.conv_width) * (channels + 3 * kScratchAlign);
  return size_t(block_tokens) * (4 * K + 2 * V) + taps + K + V + 8 * kScratchAlign;
}

KeyHead::KeyHead(const DeltaMix& op, const MixerSimd& simd, const RowRun& row, int64_t key_head)
    : op_(op),
      simd_(simd),
      row_(row),
      key_head_(key_head),
      scratch_(scratch_floats(op, std::min(row.count, kBlockTokens))) {
  const auto K = size_t(op.key_dim), V = size_t(op.value_dim), tokens = size_t(block_tokens());
  prefetch();
  x_ = {.q = scratch_.take(tokens * K),     .k = scratch_.take(tokens * K),
        .decay = scratch_.take(tokens * K), .erase = scratch_.take(tokens * K),
        .v = scratch_.take(tokens * V),     .out = scratch_.take(tokens * V),
        .zeros = nullptr};
  float* const zeros = scratch_.take(std::max(K, V));
  std::fill_n(zeros, std::max(K, V), 0.0f);
  x_.zeros = zeros;
  const DeltaStreams in = delta_streams(op, row);
  q_ = conv(in.q.from(key_head * op.key_dim), op.key_dim);
  k_ = conv(in.k.from(key_head * op.key_dim), op.key_dim);
  v_ = conv(in.v.from(key_head * group() * op.value_dim), group() * op.value_dim);
}

// The first of what comes from memory, while the taps are being turned.
void KeyHead::prefetch() const {
  if (row_.fresh()) return;
  const DeltaStreams in = delta_streams(op_, row_);
  const auto ask = [&](const ConvStream& stream, int64_t channel, int64_t channels) {
    for (int32_t i = 0; i + 1 < stream.width; ++i) {
      simd_.prefetch(stream.history + i * stream.history_stride + channel, channels);
    }
  };
  ask(in.q, key_head_ * op_.key_dim, op_.key_dim);
  ask(in.k, key_head_ * op_.key_dim, op_.key_dim);
  ask(in.v, key_head_ * group() * op_.value_dim, group() * op_.value_dim);
  const int64_t floats = std::min(state_floats(op_), kPrefetchFloats);
  simd_.prefetch(op_.state.at(row_.slot) + key_head_ * group() * state_floats(op_), floats);
}

KeyHead::Conv KeyHead::conv(const ConvStream& stream, int64_t channels) {
  Conv made{.stream = stream, .channels = channels};
  if (stream.width == 0) return made;
  float* const turned = scratch_.take(size_t(stream.width) * size_t(channels));
  simd_.turn_taps(stream.taps, stream.width, channels, turned);
  made.taps = turned;
  return made;
}

// y = the convolution's channels from `channel` on, at the row's token t.
void KeyHead::convolve(const Conv& conv, int32_t t, int64_t channel, float* y,
                       int64_t channels) const {
  const ConvStream& in = conv.stream;
  if (in.width == 0) {
    std::copy_n(in.in.at(t) + channel, channels, y);
    return;
  }
  std::array<const float*, MixerSimd::kTaps> x;
  const float* start = in.bias != nullptr ? in.bias + channel : nullptr;
  for (int32_t first = 0; first < in.width; first += MixerSimd::kTaps) {
    const int32_t taps = std::min(in.width - first, MixerSimd::kTaps);
    for (int32_t j = 0; j < taps; ++j) {
      const float* const from = in.input(t, in.width - 1 - first - j);
      x[size_t(j)] = from != nullptr ? from + channel : x_.zeros;
    }
    simd_.convolve(x.data(), taps, conv.taps + first * conv.channels + channel, conv.channels,
                   start, y, channels);
    start = y;
  }
}

// x = scale * normalised act(conv(q or k)).
void KeyHead::prepare_key(const Conv& conv, int32_t t, float scale, float* x) const {
  const int64_t K = op_.key_dim;
  convolve(conv, t, 0, x, K);
  simd_.activate(op_.qk_activation, x, K);
  float norm = 0;
  switch (op_.qk_norm) {
    case QkNorm::L2: norm = 1.0f / std::sqrt(simd_.squares(x, K) + 1e-6f); break;
    case QkNorm::L2Max: norm = 1.0f / std::max(std::sqrt(simd_.squares(x, K)), 1e-6f); break;
    case QkNorm::Sum: norm = 1.0f / simd_.sum(x, K); break;
  }
  simd_.scale(x, norm * scale, K);
}

// The vectors of the row's token t that one value head has for itself; i is its place in the block.
void KeyHead::prepare_value_head(int64_t value_head, int32_t t, int32_t i) const {
  const int64_t K = op_.key_dim, V = op_.value_dim, token = row_.begin + t;
  float* const decay = x_.decay + i * K;
  float* const erase = x_.erase + i * K;
  float* const v = x_.v + i * V;
  const int64_t head = value_head * op_.decay_heads / op_.value_heads;
  if (op_.decay == Decay::None) {
    std::fill_n(decay, K, 1.0f);
  } else {
    const int64_t channels = op_.decay == Decay::PerHead ? 1 : K, at = head * channels;
    simd_.decay({.x = op_.decay_in.at(token) + at,
                 .bias = op_.dt_bias + at,
                 .a = op_.decay_a[head],
                 .lower_bound = op_.lower_bound},
                decay, channels);
    if (channels == 1) std::fill_n(decay, K, decay[0]);
  }
  convolve(v_, t, (value_head - key_head_ * group()) * V, v, V);
  if (!op_.values_ready) simd_.activate(Activation::Silu, v, V);
  if (!op_.erases) {
    std::fill_n(erase, K, 0.0f);
  } else if (op_.erase) {
    std::copy_n(op_.erase.at(token) + key_head_ * K, K, erase);
    simd_.activate(Activation::Sigmoid, erase, K);
    simd_.scale(erase, op_.beta_scale, K);
    float* const write = x_.out + i * V;  // not in use yet
    std::copy_n(op_.write.at(token) + value_head * V, V, write);
    simd_.activate(Activation::Sigmoid, write, V);
    simd_.multiply(v, write, 1.0f, V);
  } else {
    float beta = 1;
    if (op_.beta) {
      beta = op_.beta.at(token)[value_head];
      simd_.activate(Activation::Sigmoid, &beta, 1);
    }
    beta *= op_.beta_scale;
    std::fill_n(erase, K, beta);
    simd_.scale(v, beta, V);
  }
  simd_.multiply(erase, x_.k + i * K, 1.0f, K);
  simd_.multiply(erase, decay, 1.0f, K);
}

void KeyHead::finish(int64_t value_head, int32_t t, int32_t i) const {
  const int64_t V = op_.value_dim, token = row_.begin + t, at = value_head * V;
  if (op_.answer_add) {
    const float* const add = op_.answer_add.at(token) + at;
    for (int64_t j = 0; j < V; ++j) x_.out[i * V + j] += add[j];
  }
  if (!op_.norm_output) {
    std::copy_n(x_.out + i * V, V, op_.out.at(token) + at);
    return;
  }
  simd_.gated_norm({.in = x_.out + i * V,
                    .weight = op_.norm_weight,
                    .eps = op_.norm_eps,
                    .gate = op_.gate ? op_.gate.at(token) + at : nullptr,
                    .activation = op_.gate_activation,
                    .out = op_.out.at(token) + at},
                   V);
}

void KeyHead::run() {
  const int64_t K = op_.key_dim, V = op_.value_dim;
  const float q_scale = 1.0f / std::sqrt(float(K));
  for (int32_t begin = 0; begin < row_.count; begin += kBlockTokens) {
    const int32_t tokens = std::min(row_.count - begin, kBlockTokens);
    for (int32_t i = 0; i < tokens; ++i) {
      prepare_key(q_, begin + i, q_scale, x_.q + i * K);
      prepare_key(k_, begin + i, 1.0f, x_.k + i * K);
    }
    for (int64_t head = key_head_ * group(); head < (key_head_ + 1) * group(); ++head) {
      for (int32_t i = 0; i < tokens; ++i) prepare_value_head(head, begin + i, i);
      simd_.delta({.key_dim = op_.key_dim,
                   .value_dim = op_.value_dim,
                   .tokens = tokens,
                   .key_stride = K,
                   .value_stride = V,
                   .state = op_.state.at(row_.slot) + head * state_floats(op_),
                   .fresh = row_.fresh() && begin == 0,
                   .q = x_.q,
                   .k = x_.k,
                   .decay = x_.decay,
                   .erase = x_.erase,
                   .v = x_.v,
                   .out = x_.out,
                   .emitted = op_.emits ? op_.emitted.at(row_.begin + begin) + head * V : nullptr,
                   .emitted_stride = op_.emitted.stride});
      for (int32_t i = 0; i < tokens; ++i) finish(head, begin + i, i);
    }
  }
  q_.stream.remember(row_.count, K);
  k_.stream.remember(row_.count, K);
  v_.stream.remember(row_.count, group() * V);
}

}  // namespace

void run_fast(const DeltaMix& op, const Context& context) {
  context.pool.parallel_for(
      int64_t(op.rows.count) * op.key_heads,
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const RowRun row(op.rows, int32_t(i / op.key_heads));
          if (!row.empty()) KeyHead(op, *context.simd.mixers, row, i % op.key_heads).run();
        }
      },
      1);
}

}  // namespace weir::cpu
