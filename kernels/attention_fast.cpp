#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/attention_memory.h"
#include "kernels/cpu.h"
#include "kernels/mixer_math.h"
#include "kernels/scratch.h"

namespace weir::cpu {
namespace {

constexpr size_t kScratchFloats = 4 * 1024;  // what usual sizes need
constexpr int64_t kClaimRotations = 8;       // tokens

// Cosines and sines of every token's angles, made once for all heads.
class Rotations {
 public:
  Rotations(const Attention& op, ThreadPool& pool)
      : half_(op.rope_theta > 0 ? op.head_dim / 2 : 0) {
    if (half_ == 0) return;
    const auto half = size_t(half_);
    turned_ = std::make_unique_for_overwrite<float[]>(2 * half * size_t(op.rows.tokens));
    const auto frequency = std::make_unique_for_overwrite<double[]>(half);
    for (int32_t i = 0; i < half_; ++i) {
      frequency[size_t(i)] = std::pow(double(op.rope_theta), -2.0 * i / op.head_dim);
    }
    const auto fill = [&](int64_t begin, int64_t end) {
      for (int32_t r = 0; r < op.rows.count; ++r) {
        const RowRun row(op.rows, r);
        const int64_t last = row.empty() ? 0 : std::min<int64_t>(end, row.begin + row.count);
        for (int64_t token = std::max<int64_t>(begin, row.begin); token < last; ++token) {
          turn(frequency.get(), row.first + double(token - row.begin), token);
        }
      }
    };
    pool.parallel_for(op.rows.tokens, fill, kClaimRotations);
  }

  // x = rope(x) for one head of a token.
  void rotate(int64_t token, float* x) const {
    const float* const cosine = turned_.get() + 2 * half_ * token;
    const float* const sine = cosine + half_;
    for (int64_t i = 0; i < half_; ++i) {
      const float a = x[i], b = x[i + half_];
      x[i] = a * cosine[i] - b * sine[i];
      x[i + half_] = b * cosine[i] + a * sine[i];
    }
  }

 private:
  // In double precision: at position 10^6 a float32 angle is off by up to 0.03.
  void turn(const double* frequency, double position, int64_t token) {
    float* const cosine = turned_.get() + 2 * half_ * token;
    for (int64_t i = 0; i < half_; ++i) {
      const double angle = position * frequency[i];
      cosine[i] = float(std::cos(angle));
      cosine[half_ + i] = float(std::sin(angle));
    }
  }

  int64_t half_ = 0;                 // head_dim / 2; 0: no positions
  std::unique_ptr<float[]> turned_;  // [tokens, cosines | sines]
};

// What works on one kv head of one row at a time.
struct Head {
  const Attention& op;
  const MixerSimd& simd;
  const Rotations& rotations;
  AttentionMemory memory;

  int32_t queries() const { return op.heads / op.kv_heads; }

  // to = rope(norm(x)).
  void rotate(const float* x, const float* norm, int64_t token, float* to) const {
    const int64_t d = op.head_dim;
    if (norm == nullptr) {
      std::copy_n(x, d, to);
    } else {
      simd.gated_norm({.in = x, .weight = norm, .eps = op.norm_eps, .out = to}, d);
    }
    rotations.rotate(token, to);
  }

  void append(int32_t token, int32_t position) const {
    const int64_t at = memory.kv_head * op.head_dim;
    float* const key = memory.key(position);
    rotate(op.k.at(token) + at, norm_of(op.k_norm, memory.kv_head), token, key);
    std::copy_n(op.v.at(token) + at, op.head_dim, key + memory.values_after());
    if (op.forgets) add_gates(memory, token, position);
  }
  // The norm of a head: all heads share one, or there is one for each.
  const float* norm_of(const float* norm, int64_t head) const {
    return norm != nullptr && op.norm_per_head ? norm + head * op.head_dim : norm;
  }

  // All queries of the kv head, over the blocks of positions that the token sees. Where the blocks
  // begin follows from the position alone.
  void attend(int32_t token, int32_t position) const {
    const int32_t count = queries();
    const int64_t d = op.head_dim, at = memory.kv_head * count * d;
    const size_t biases = op.forgets ? size_t(count) * AttentionBlock::kCount : 0;
    Scratch<kScratchFloats> scratch(size_t(count) * size_t(d + 2) + biases + 4 * kScratchAlign);
    float* const q = scratch.take(size_t(count) * size_t(d));
    float* const most = scratch.take(size_t(count));
    float* const total = scratch.take(size_t(count));
    float* const bias = op.forgets ? scratch.take(biases) : nullptr;
    float* const out = op.out.at(token) + at;
    for (int32_t i = 0; i < count; ++i) {
      const float* const norm = norm_of(op.q_norm, memory.kv_head * count + i);
      rotate(op.q.at(token) + at + i * d, norm, token, q + i * d);
    }
    std::fill_n(most, count, -std::numeric_limits<float>::infinity());
    std::fill_n(total, count, 0.0f);
    std::fill_n(out, count * d, 0.0f);
    std::array<const float*, AttentionBlock::kCount> keys;
    int32_t p = memory.first_seen(position);
    while (p <= position) {
      const int32_t from = p;
      int32_t n = 0;
      for (; n < AttentionBlock::kCount && p <= position; ++n, ++p) keys[size_t(n)] = memory.key(p);
      if (op.forgets) forget(position, from, n, bias);
      simd.attention({.dim = op.head_dim,
                      .queries = count,
                      .count = n,
                      .keys = keys.data(),
                      .values_after = memory.values_after(),
                      .scale = 1.0f / std::sqrt(float(d)),
                      .bias = bias,
                      .q = q,
                      .most = most,
                      .total = total,
                      .out = out});
    }
    for (int32_t i = 0; i < count; ++i) simd.scale(out + i * d, 1.0f / total[i], d);
  }

  // F_t - F_s of all queries, for positions s = first .. first + count - 1.
  void forget(int32_t t, int32_t first, int32_t count, float* bias) const {
    const float* const now = memory.gate_sum(t);
    const int64_t next = memory.block_tokens(), rest = memory.sum_rest();
    for (int32_t p = 0; p < count; ++p) {
      const float* const then = memory.gate_sum(first + p);
      for (int32_t i = 0; i < queries(); ++i) {
        bias[i * AttentionBlock::kCount + p] =
            (now[i * next] - then[i * next]) + (now[i * next + rest] - then[i * next + rest]);
      }
    }
  }
};

// Calls body(head, row) for every kv head of every row with tokens.
template <typename Body>
void for_heads(const Attention& op, const Context& context, const Rotations& rotations,
               const Body& body) {
  context.pool.parallel_for(
      int64_t(op.rows.count) * op.kv_heads,
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const auto r = int32_t(i / op.kv_heads);
          const RowRun row(op.rows, r);
          if (row.empty()) continue;
          body(Head{op, *context.simd.mixers, rotations, {op, r, row.slot, i % op.kv_heads}}, row);
        }
      },
      1);
}

// The last row that begins at or before a token, past rows without tokens.
int32_t row_of(const Rows& rows, int32_t token) {
  return int32_t(std::upper_bound(rows.begin, rows.begin + rows.count, token) - rows.begin) - 1;
}

}  // namespace

void run_fast(const Attention& op, const Context& context) {
  const Rotations rotations(op, context.pool);
  if (op.window > 0) {
    // A token's key takes the place of the one that leaves its window: one token after the other.
    for_heads(op, context, rotations, [](const Head& head, const RowRun& row) {
      for (int32_t t = 0; t < row.count; ++t) {
        head.append(row.begin + t, row.first + t);
        head.attend(row.begin + t, row.first + t);
      }
    });
    return;
  }
  for_heads(op, context, rotations, [](const Head& head, const RowRun& row) {
    for (int32_t t = 0; t < row.count; ++t) head.append(row.begin + t, row.first + t);
  });
  context.pool.parallel_for(
      int64_t(op.rows.tokens) * op.kv_heads,
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const auto token = int32_t(i % op.rows.tokens);
          const int32_t r = row_of(op.rows, token);
          const RowRun row(op.rows, r);
          if (row.empty() || token >= row.begin + row.count) continue;
          const Head head{op, *context.simd.mixers, rotations,
                          {op, r, row.slot, i / op.rows.tokens}};
          head.attend(token, row.first + token - row.begin);
        }
      },
      1);
}

}  // namespace weir::cpu
