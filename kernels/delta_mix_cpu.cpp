#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/delta_streams.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

double key_scale(QkNorm norm, double sum, double squares) {
  switch (norm) {
    case QkNorm::L2: return l2_scale(squares);
    case QkNorm::L2Max: return l2_max_scale(squares);
    case QkNorm::Sum: return 1 / sum;
  }
  WEIR_UNREACHABLE("a norm of queries and keys without a formula");
}

// One head's q or k: activated, then normalised.
std::vector<double> plain_key(const DeltaMix& op, const ConvStream& stream, int32_t t,
                              int64_t key_head) {
  std::vector<double> x(size_t(op.key_dim));
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < op.key_dim; ++i) {
    double& one = x[size_t(i)];
    one = activate(op.qk_activation, stream.output(t, key_head * op.key_dim + i));
    sum += one;
    squares += one * one;
  }
  const double scale = key_scale(op.qk_norm, sum, squares);
  for (double& one : x) one *= scale;
  return x;
}

// exp g
std::vector<double> plain_decay(const DeltaMix& op, int64_t token, int64_t value_head) {
  const int64_t K = op.key_dim;
  std::vector<double> decay(size_t(K), 1.0);
  if (op.decay == Decay::None) return decay;
  const int64_t head = value_head * op.decay_heads / op.value_heads;
  for (int64_t i = 0; i < K; ++i) {
    const int64_t channel = op.decay == Decay::PerHead ? head : head * K + i;
    const double x = double(op.decay_in.at(token)[channel]) + double(op.dt_bias[channel]);
    decay[size_t(i)] =
        std::exp(log_decay(x, double(op.decay_a[head]), double(op.lower_bound)));
  }
  return decay;
}

// out = rms(o) * norm_weight [* gate_act(gate)]
void plain_out(const DeltaMix& op, int64_t token, int64_t value_head,
               const std::vector<double>& o) {
  const int64_t offset = value_head * op.value_dim;
  if (!op.norm_output) {
    std::copy(o.begin(), o.end(), op.out.at(token) + offset);
    return;
  }
  double squares = 0;
  for (const double one : o) squares += one * one;
  const double scale = rms_scale(squares, op.value_dim, double(op.norm_eps));
  for (int64_t j = 0; j < op.value_dim; ++j) {
    double out = o[size_t(j)] * scale * double(op.norm_weight[j]);
    if (op.gate) out *= activate(op.gate_activation, double(op.gate.at(token)[offset + j]));
    op.out.at(token)[offset + j] = float(out);
  }
}

// beta (v - recalled), or what stands in its place.
double write_residual(const DeltaMix& op, int64_t token, int64_t value_head, int64_t j, double v,
                      double recalled) {
  if (!op.erases) return v;
  if (op.erase) {
    return sigmoid(double(op.write.at(token)[value_head * op.value_dim + j])) * v - recalled;
  }
  const double gate = op.beta ? sigmoid(double(op.beta.at(token)[value_head])) : 1.0;
  return double(op.beta_scale) * gate * (v - recalled);
}

// What a token did to a head's state: S = S diag(decay) + value key'.
struct Update {
  std::vector<double> decay, key, value;
};

// One token of one value head, whose state is S, as the header's formulas read.
Update plain_step(const DeltaMix& op, const DeltaStreams& in, const RowRun& row, int32_t t,
                  int64_t value_head, float* S) {
  const int64_t K = op.key_dim, V = op.value_dim, token = row.begin + t;
  const int64_t key_head = value_head * op.key_heads / op.value_heads;
  const std::vector<double> q = plain_key(op, in.q, t, key_head);
  const std::vector<double> k = plain_key(op, in.k, t, key_head);
  Update update{.decay = plain_decay(op, token, value_head), .key = k};

  for (int64_t i = 0; i < V * K; ++i) S[i] = float(S[i] * update.decay[size_t(i % K)]);
  std::vector<double> o(size_t(V), 0.0);
  for (int64_t j = 0; j < V; ++j) {
    const double v = activate(op.values_ready ? Activation::None : Activation::Silu,
                              in.v.output(t, value_head * V + j));
    double recalled = 0;
    for (int64_t i = 0; i < K; ++i) {
      const double erase =
          op.erase ? double(op.beta_scale) * sigmoid(double(op.erase.at(token)[key_head * K + i]))
                   : 1.0;
      recalled += double(S[j * K + i]) * erase * k[size_t(i)];
    }
    const double u = write_residual(op, token, value_head, j, v, recalled);
    if (op.emits) op.emitted.at(token)[value_head * V + j] = float(u);
    update.value.push_back(u);
    for (int64_t i = 0; i < K; ++i) {
      S[j * K + i] = float(double(S[j * K + i]) + u * k[size_t(i)]);
      o[size_t(j)] += double(S[j * K + i]) * q[size_t(i)] / std::sqrt(double(K));
    }
    if (op.answer_add) o[size_t(j)] += double(op.answer_add.at(token)[value_head * V + j]);
  }
  plain_out(op, token, value_head, o);
  return update;
}

// A row's one token, whose heads leave their updates waiting (pending.h).
void plain_deferring(const DeltaMix& op, const DeltaStreams& in, const RowRun& row,
                     int32_t written) {
  const PendingLayout layout = pending_layout(op);
  const int64_t K = op.key_dim, V = op.value_dim;
  for (int64_t h = 0; h < op.value_heads; ++h) {
    float* const S = op.state.at(row.slot) + h * state_floats(op);
    float* const pending = op.pending.at(row.slot) + h * layout.floats();
    const int32_t count = pending_updates(row.first, written, int32_t(h));
    std::vector<float> all(S, S + state_floats(op));
    if (count > 0) add_pending(layout, count, pending, all.data());
    const Update update = plain_step(op, in, row, 0, h, all.data());
    if (writes_state(row.first, int32_t(h))) {
      std::copy(all.begin(), all.end(), S);
      continue;
    }
    for (int64_t i = 0; i < K; ++i) {
      float* const at = pending + i;
      *at = float((count > 0 ? double(*at) : 1.0) * update.decay[size_t(i)]);
      for (int32_t j = 0; j < count; ++j) {
        at[layout.key_at(j)] = float(double(at[layout.key_at(j)]) * update.decay[size_t(i)]);
      }
    }
    std::copy_n(update.key.begin(), K, pending + layout.key_at(count));
    std::copy_n(update.value.begin(), V, pending + layout.value_at(count));
  }
}

void run_plain(const DeltaMix& op) {
  for (int32_t r = 0; r < op.rows.count; ++r) {
    const RowRun row(op.rows, r);
    if (row.empty()) continue;
    const DeltaStreams in = delta_streams(op, row);
    float* const state = op.state.at(row.slot);
    if (row.fresh()) std::fill_n(state, op.value_heads * state_floats(op), 0.0f);
    if (op.pending.data != nullptr && row.count == 1) {
      plain_deferring(op, in, row, op.rows.written[r]);
    } else {
      for (int32_t t = 0; t < row.count; ++t) {
        for (int64_t j = 0; j < op.value_heads; ++j) {
          plain_step(op, in, row, t, j, state + j * state_floats(op));
        }
      }
    }
    in.q.remember(row.count, int64_t(op.key_heads) * op.key_dim);
    in.k.remember(row.count, int64_t(op.key_heads) * op.key_dim);
    in.v.remember(row.count, int64_t(op.value_heads) * op.value_dim);
  }
}

}  // namespace

void run(const DeltaMix& op, const Context& context) {
  WEIR_CHECK(op.key_heads > 0 && op.value_heads % op.key_heads == 0);
  WEIR_CHECK(bool(op.erase) == bool(op.write));
  context.plain || op.pending.data != nullptr ? run_plain(op) : run_fast(op, context);
}

}  // namespace weir::cpu
