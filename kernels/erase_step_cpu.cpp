#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/mixer_math.h"
#include "kernels/scratch.h"

namespace weir::cpu {
namespace {

// One head of one row.
struct Head {
  const EraseStep& op;
  const RowRun row;
  const int64_t head;

  int64_t K() const { return op.key_dim; }
  int64_t V() const { return op.value_dim; }
  float* state() const { return op.state.at(row.slot) + head * V() * K(); }
  // This head's vector of one update, of `dim` numbers.
  const float* of(Acts acts, int64_t token, int32_t update, int64_t dim) const {
    return acts.at(token) + (int64_t(update) * op.heads + head) * dim;
  }
  const float* k(int64_t token, int32_t u) const { return of(op.k, token, u, K()); }
  const float* p(int64_t token, int32_t u) const { return of(op.p ? op.p : op.k, token, u, K()); }
  const float* e(int64_t token, int32_t u) const { return of(op.e ? op.e : op.k, token, u, K()); }
  const float* v(int64_t token, int32_t u) const { return of(op.v, token, u, V()); }
  const float* q(int64_t token) const { return of(op.q, token, 0, K()); }
};

// --- as the header's formulas read --------------------------------------------------------------

double decay_of(const Head& at, int64_t token, int32_t update, int64_t i) {
  const EraseStep& op = at.op;
  if (op.decay == Decay::None || update > 0) return 1;
  const float* const g = op.log_decay.at(token);
  return std::exp(double(op.decay == Decay::PerHead ? g[at.head] : g[at.head * at.K() + i]));
}

void plain_update(const Head& at, int64_t token, int32_t u) {
  const EraseStep& op = at.op;
  const int64_t K = at.K();
  const float *const k = at.k(token, u), *const p = at.p(token, u), *const e = at.e(token, u);
  const double logit = op.beta ? double(op.beta.at(token)[u * op.heads + at.head]) : 0.0;
  const double beta = double(op.beta_scale) * (op.beta ? sigmoid(logit) : 1.0);
  for (int64_t j = 0; j < at.V(); ++j) {
    float* const S = at.state() + j * K;
    double read = 0;
    for (int64_t i = 0; i < K; ++i) {
      const double decay = op.decayed_read ? decay_of(at, token, u, i) : 1.0;
      read += double(S[i]) * decay * double(p[i]);
    }
    for (int64_t i = 0; i < K; ++i) {
      const double change = double(at.v(token, u)[j]) * double(k[i]) - read * double(e[i]);
      S[i] = float(double(S[i]) * decay_of(at, token, u, i) + beta * change);
    }
  }
}

void plain_answer(const Head& at, int64_t token) {
  const EraseStep& op = at.op;
  const float* const q = at.q(token);
  for (int64_t j = 0; j < at.V(); ++j) {
    double sum = 0;
    for (int64_t i = 0; i < at.K(); ++i) sum += double(at.state()[j * at.K() + i]) * double(q[i]);
    op.out.at(token)[at.head * at.V() + j] = float(double(op.scale) * sum);
  }
  if (op.bonus == nullptr) return;
  const float* const k = at.k(token, op.updates - 1);
  double weight = 0;
  for (int64_t i = 0; i < at.K(); ++i) {
    weight += double(q[i]) * double(k[i]) * double(op.bonus[at.head * at.K() + i]);
  }
  for (int64_t j = 0; j < at.V(); ++j) {
    const double v = double(at.v(token, op.updates - 1)[j]);
    op.bonus_out.at(token)[at.head * at.V() + j] = float(weight * v);
  }
}

void run_plain(const Head& at) {
  if (at.row.fresh()) std::fill_n(at.state(), at.V() * at.K(), 0.0f);
  for (int64_t token = at.row.begin; token < at.row.begin + at.row.count; ++token) {
    for (int32_t u = 0; u < at.op.updates; ++u) plain_update(at, token, u);
    plain_answer(at, token);
  }
}

// --- vectorised ---------------------------------------------------------------------------------

// Updates whose vectors are made ready at one time: each row of the state is fetched once for all.
constexpr int32_t kBlock = 8;
constexpr size_t kScratchFloats = 8 * 1024;  // what usual sizes need

class FastHead {
 public:
  FastHead(const Head& head, const MixerSimd& simd)
      : at_(head),
        simd_(simd),
        scratch_(block() * size_t(5 * at_.K() + 2 * at_.V()) + size_t(at_.K()) +
                 8 * kScratchAlign) {
    const size_t K = block() * size_t(at_.K()), V = block() * size_t(at_.V());
    q_ = scratch_.take(K);
    k_ = scratch_.take(K);
    decay_ = scratch_.take(K);
    read_ = scratch_.take(K);
    remove_ = scratch_.take(K);
    v_ = scratch_.take(V);
    out_ = scratch_.take(V);
    product_ = scratch_.take(size_t(at_.K()));
  }

  void run() {
    const EraseStep& op = at_.op;
    for (int64_t begin = 0; begin < updates(); begin += kBlock) {
      const auto count = int32_t(std::min<int64_t>(kBlock, updates() - begin));
      for (int32_t i = 0; i < count; ++i) prepare(begin + i, i);
      simd_.delta({.key_dim = op.key_dim,
                   .value_dim = op.value_dim,
                   .tokens = count,
                   .key_stride = at_.K(),
                   .value_stride = at_.V(),
                   .state = at_.state(),
                   .fresh = at_.row.fresh() && begin == 0,
                   .q = q_,
                   .k = k_,
                   .decay = decay_,
                   .erase = read_,
                   .remove = op.e ? remove_ : nullptr,
                   .v = v_,
                   .out = out_});
      for (int32_t i = 0; i < count; ++i) answer(begin + i, i);
    }
  }

 private:
  int64_t updates() const { return int64_t(at_.row.count) * at_.op.updates; }
  size_t block() const { return size_t(std::min<int64_t>(kBlock, updates())); }
  int64_t token(int64_t step) const { return at_.row.begin + step / at_.op.updates; }
  int32_t update(int64_t step) const { return int32_t(step % at_.op.updates); }
  bool last(int64_t step) const { return update(step) == at_.op.updates - 1; }

  // The vectors of the row's update `step`, the i-th of the block.
  void prepare(int64_t step, int32_t i) {
    const EraseStep& op = at_.op;
    const int64_t K = at_.K(), t = token(step);
    const int32_t u = update(step);
    float beta = 1;
    if (op.beta) {
      beta = op.beta.at(t)[u * op.heads + at_.head];
      simd_.activate(Activation::Sigmoid, &beta, 1);
    }
    beta *= op.beta_scale;
    float *const decay = decay_ + i * K, *const read = read_ + i * K, *const q = q_ + i * K;
    prepare_decay(t, u, decay);
    // The strength goes to what is taken out along k, or to the direction it is taken out along.
    copy_scaled(at_.p(t, u), op.e ? 1 : beta, K, read);
    if (op.decayed_read) simd_.multiply(read, decay, 1, K);
    if (op.e) copy_scaled(at_.e(t, u), beta, K, remove_ + i * K);
    std::copy_n(at_.k(t, u), K, k_ + i * K);
    copy_scaled(at_.v(t, u), beta, at_.V(), v_ + i * at_.V());
    last(step) ? copy_scaled(at_.q(t), op.scale, K, q) : void(std::fill_n(q, K, 0.0f));
  }

  void prepare_decay(int64_t t, int32_t u, float* decay) const {
    const EraseStep& op = at_.op;
    const int64_t K = at_.K();
    if (op.decay == Decay::None || u > 0) {
      std::fill_n(decay, K, 1.0f);
    } else if (op.decay == Decay::PerHead) {
      simd_.exp(op.log_decay.at(t) + at_.head, decay, 1);
      std::fill_n(decay, K, decay[0]);
    } else {
      simd_.exp(op.log_decay.at(t) + at_.head * K, decay, K);
    }
  }

  void answer(int64_t step, int32_t i) {
    if (!last(step)) return;
    const EraseStep& op = at_.op;
    const int64_t K = at_.K(), V = at_.V(), t = token(step);
    std::copy_n(out_ + i * V, V, op.out.at(t) + at_.head * V);
    if (op.bonus == nullptr) return;
    std::copy_n(at_.q(t), K, product_);
    simd_.multiply(product_, at_.k(t, update(step)), 1, K);
    simd_.multiply(product_, op.bonus + at_.head * K, 1, K);
    copy_scaled(at_.v(t, update(step)), simd_.sum(product_, K), V,
                op.bonus_out.at(t) + at_.head * V);
  }

  void copy_scaled(const float* from, float by, int64_t count, float* to) const {
    std::copy_n(from, count, to);
    simd_.scale(to, by, count);
  }

  const Head at_;
  const MixerSimd& simd_;
  Scratch<kScratchFloats> scratch_;
  float *q_, *k_, *decay_, *read_, *remove_;  // [block(), key_dim]
  float *v_, *out_;                           // [block(), value_dim]
  float* product_;                            // [key_dim]
};

}  // namespace

void run(const EraseStep& op, const Context& context) {
  WEIR_CHECK(op.updates > 0 && (op.bonus == nullptr) == !op.bonus_out);
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Head head{op, RowRun(op.rows, int32_t(i / op.heads)), i % op.heads};
      if (head.row.empty()) continue;
      context.plain ? run_plain(head) : FastHead(head, *context.simd.mixers).run();
    }
  };
  const int64_t items = int64_t(op.rows.count) * op.heads;
  context.plain ? work(0, items) : context.pool.parallel_for(items, work, 1);
}

}  // namespace weir::cpu
