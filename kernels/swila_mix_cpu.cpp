#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu.h"
#include "kernels/mixer_math.h"
#include "kernels/ring.h"

namespace weir::cpu {
namespace {

// What one head needs for one token.
struct Scratch {
  explicit Scratch(const SwilaMix& op)
      : q(size_t(op.dim)), k(q), v(q), mixed(size_t(op.mixtures) * size_t(op.dim)), query(mixed),
        written(mixed), decay(size_t(pending_layout(op).keys()), 1.0f) {}
  std::vector<float> q, k, v;
  std::vector<float> mixed;    // [mixtures, dim]: the key's prior, then its posterior
  std::vector<float> query;    // [mixtures, dim]: the query's prior
  std::vector<float> written;  // [mixtures, dim]: what is added along the key
  std::vector<float> decay;    // [mixtures, dim], or [dim] of ones where nothing decays
  std::vector<float> all;      // a state and what waits beside it
};

// Where one row's head lies.
struct Place {
  const SwilaMix& op;
  int32_t row = 0, head = 0;

  int64_t token(int32_t t) const { return op.rows.begin[row] + t; }
  int32_t count() const { return op.rows.begin[row + 1] - op.rows.begin[row]; }
  bool fresh() const { return op.rows.first[row] == 0; }
  Slot slot() const { return op.rows.slot[row]; }
  int64_t channel() const { return int64_t(head) * op.dim; }
  int64_t mixed() const { return channel() * op.mixtures; }
  // This head's channels of the kept input of the row's token t, which may be before it; `group`
  // 0, 1, 2 for q, k, v.
  float* kept(int32_t t, int32_t group) const {
    const int64_t channels = int64_t(op.heads) * op.dim;
    const int32_t ring = ring_row(op.rows.first[row] + t, op.conv_width - 1);
    return op.history.at(slot()) + (3 * ring + group) * channels + channel();
  }
};

// silu(conv(x)) of this head's channels at the row's token t.
void convolve(const Place& at, Acts in, const float* taps, int32_t group, int32_t t, float* out) {
  const SwilaMix& op = at.op;
  const int32_t width = op.conv_width;
  for (int32_t d = 0; d < op.dim; ++d) {
    const int64_t c = at.channel() + d;
    float sum = 0;
    for (int32_t i = 0; i < width; ++i) {
      const int32_t source = t - (width - 1) + i;  // a token of this row, or one before it
      float x = 0;
      if (source >= 0) {
        x = in.at(at.token(source))[c];
      } else if (!at.fresh()) {
        x = at.kept(source, group)[d];
      }
      sum += taps[c * width + i] * x;
    }
    out[d] = float(activate(Activation::Silu, sum));
  }
}

// Keeps the row's last raw inputs of this head's channels, conv_width - 1 at most.
void keep_history(const Place& at, Acts in, int32_t group) {
  const int32_t dim = at.op.dim;
  for (int32_t t = at.count() - (at.op.conv_width - 1); t < at.count(); ++t) {
    if (t >= 0) std::copy_n(in.at(at.token(t)) + at.channel(), dim, at.kept(t, group));
    if (t < 0 && at.fresh()) std::fill_n(at.kept(t, group), dim, 0.0f);
  }
}

void l2_normalise(std::vector<float>& x) {
  float squares = 0;
  for (const float value : x) squares += value * value;
  const float scale = 1 / std::sqrt(squares + 1e-6f);
  for (float& value : x) value *= scale;
}

// Softmax over the mixtures of one value dim: p[j * dim], j = 0 .. mixtures - 1.
void softmax_over_mixtures(float* p, int32_t mixtures, int32_t dim) {
  float largest = p[0], sum = 0;
  for (int32_t j = 1; j < mixtures; ++j) largest = std::max(largest, p[j * dim]);
  for (int32_t j = 0; j < mixtures; ++j) sum += p[j * dim] = std::exp(p[j * dim] - largest);
  for (int32_t j = 0; j < mixtures; ++j) p[j * dim] /= sum;
}

// The router's distribution, mixed with the last token's where the layer is temporal.
void make_prior(const Place& at, Acts router, Acts mix, SlotState last, int32_t t,
                std::vector<float>& prior) {
  const SwilaMix& op = at.op;
  std::copy_n(router.at(at.token(t)) + at.mixed(), prior.size(), prior.begin());
  for (int32_t d = 0; d < op.dim; ++d)
    softmax_over_mixtures(&prior[size_t(d)], op.mixtures, op.dim);
  if (!mix) return;
  const float* before = last.at(at.slot()) + at.mixed();
  for (size_t i = 0; i < prior.size(); ++i) {
    const auto g = float(sigmoid(mix.at(at.token(t))[at.channel() + int64_t(i) % op.dim]));
    prior[i] = (1 - g) * before[i] + g * prior[i];
  }
}

void decay_state(const Place& at, int32_t t, std::vector<float>& decay, float* state) {
  const SwilaMix& op = at.op;
  const float* in = op.decay_in.at(at.token(t)) + at.mixed();
  for (int32_t j = 0; j < op.mixtures; ++j) {
    const float a = op.decay_a[at.head * op.mixtures + j];
    float* const alpha = &decay[size_t(j * op.dim)];
    for (int32_t e = 0; e < op.dim; ++e) {
      const int64_t i = int64_t(j) * op.dim + e;
      alpha[e] = float(std::exp(-a * softplus(in[i] + op.dt_bias[at.mixed() + i])));
    }
    float* matrix = state + int64_t(j) * op.dim * op.dim;
    for (int32_t d = 0; d < op.dim; ++d) {
      for (int32_t e = 0; e < op.dim; ++e) matrix[d * op.dim + e] *= alpha[e];
    }
  }
}

// One token of one head: S, which is `state`, r, rho and the output o.
void step(const Place& at, int32_t t, Scratch& s, float* state, float* o) {
  const SwilaMix& op = at.op;
  const int32_t D = op.dim, J = op.mixtures;
  const float* beta = op.beta.at(at.token(t)) + at.mixed();
  if (op.gated) decay_state(at, t, s.decay, state);
  make_prior(at, op.key_router, op.key_mix, op.posterior, t, s.mixed);
  make_prior(at, op.query_router, op.query_mix, op.prior, t, s.query);

  std::vector<float> delta(static_cast<size_t>(J));
  for (int32_t d = 0; d < D; ++d) {
    for (int32_t j = 0; j < J; ++j) {
      const float* row = state + (int64_t(j) * D + d) * D;
      float recalled = 0;
      for (int32_t e = 0; e < D; ++e) recalled += row[e] * s.k[size_t(e)];
      delta[size_t(j)] = s.v[size_t(d)] - recalled;
      float& r = s.mixed[size_t(j * D + d)];
      r = std::log(r) - delta[size_t(j)] * delta[size_t(j)] / 2;
    }
    softmax_over_mixtures(&s.mixed[size_t(d)], J, D);
    o[d] = 0;
    for (int32_t j = 0; j < J; ++j) {
      float* row = state + (int64_t(j) * D + d) * D;
      const auto i = size_t(j * D + d);
      const float u = s.written[i] = float(sigmoid(beta[i])) * s.mixed[i] * delta[size_t(j)];
      float sum = 0;
      for (int32_t e = 0; e < D; ++e) {
        row[e] += u * s.k[size_t(e)];
        sum += row[e] * s.q[size_t(e)];
      }
      o[d] += s.query[i] * sum;
    }
  }
  if (!op.key_mix) return;
  std::copy(s.mixed.begin(), s.mixed.end(), op.posterior.at(at.slot()) + at.mixed());
  std::copy(s.query.begin(), s.query.end(), op.prior.at(at.slot()) + at.mixed());
}

// The update of a token joins those that wait.
void leave_waiting(const Place& at, int32_t count, const Scratch& s, float* pending) {
  const PendingLayout layout = pending_layout(at.op);
  for (int32_t i = 0; i < layout.keys(); ++i) {
    const float decay = s.decay[size_t(i)];
    pending[i] = count > 0 ? pending[i] * decay : decay;
    for (int32_t u = 0; u < count; ++u) pending[layout.key_at(u) + i] *= decay;
    pending[layout.key_at(count) + i] = s.k[size_t(i % layout.key_dim)];
  }
  std::copy(s.written.begin(), s.written.end(), pending + layout.value_at(count));
}

// A row's one token, whose heads leave their updates waiting (pending.h).
void step_deferring(const Place& at, Scratch& s, float* state, float* o) {
  const SwilaMix& op = at.op;
  const PendingLayout layout = pending_layout(op);
  const int32_t position = op.rows.first[at.row];
  const int32_t count = pending_updates(position, op.rows.written[at.row], at.head);
  float* const pending = op.pending.at(at.slot()) + int64_t(at.head) * layout.floats();
  s.all.assign(state, state + int64_t(layout.values) * layout.key_dim);
  if (count > 0) add_pending(layout, count, pending, s.all.data());
  step(at, 0, s, s.all.data(), o);
  if (writes_state(position, at.head)) {
    std::copy(s.all.begin(), s.all.end(), state);
  } else {
    leave_waiting(at, count, s, pending);
  }
}

void run_head(const Place& at, Scratch& s) {
  const SwilaMix& op = at.op;
  if (at.slot() == kPadding || at.count() == 0) return;
  const size_t mixed = s.mixed.size();
  float* const state = op.state.at(at.slot()) + at.mixed() * op.dim;
  if (at.fresh()) {
    std::fill_n(state, mixed * size_t(op.dim), 0.0f);
    if (op.key_mix) {
      const float uniform = 1 / float(op.mixtures);
      std::fill_n(op.posterior.at(at.slot()) + at.mixed(), mixed, uniform);
      std::fill_n(op.prior.at(at.slot()) + at.mixed(), mixed, uniform);
    }
  }
  for (int32_t t = 0; t < at.count(); ++t) {
    convolve(at, op.q, op.conv_q, 0, t, s.q.data());
    convolve(at, op.k, op.conv_k, 1, t, s.k.data());
    convolve(at, op.v, op.conv_v, 2, t, s.v.data());
    l2_normalise(s.q);
    l2_normalise(s.k);
    float* o = op.out.at(at.token(t)) + at.channel();
    if (op.pending.data != nullptr && at.count() == 1) {
      step_deferring(at, s, state, o);
    } else {
      step(at, t, s, state, o);
    }
    float squares = 0;
    for (int32_t d = 0; d < op.dim; ++d) squares += o[d] * o[d];
    const float scale = 1 / std::sqrt(squares / float(op.dim) + op.norm_eps);
    for (int32_t d = 0; d < op.dim; ++d) o[d] *= scale * op.norm_weight[d];
  }
  keep_history(at, op.q, 0);
  keep_history(at, op.k, 1);
  keep_history(at, op.v, 2);
}

}  // namespace

void run(const SwilaMix& op, const Context& context) {
  const auto heads = [&](int64_t begin, int64_t end) {
    Scratch scratch(op);
    for (int64_t i = begin; i < end; ++i) {
      run_head({op, int32_t(i / op.heads), int32_t(i % op.heads)}, scratch);
    }
  };
  const int64_t items = int64_t(op.rows.count) * op.heads;
  if (context.plain) {
    heads(0, items);
  } else {
    context.pool.parallel_for(items, heads, 1);
  }
}

}  // namespace weir::cpu
