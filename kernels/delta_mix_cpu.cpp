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

// S = S diag(exp g)
void plain_decay(const DeltaMix& op, int64_t token, int64_t value_head, float* S) {
  if (op.decay == Decay::None) return;
  const int64_t K = op.key_dim, head = value_head * op.decay_heads / op.value_heads;
  for (int64_t i = 0; i < K; ++i) {
    const int64_t channel = op.decay == Decay::PerHead ? head : head * K + i;
    const double x = double(op.decay_in.at(token)[channel]) + double(op.dt_bias[channel]);
    const double g = log_decay(x, double(op.decay_a[head]), double(op.lower_bound));
    for (int64_t j = 0; j < op.value_dim; ++j) S[j * K + i] = float(S[j * K + i] * std::exp(g));
  }
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

// One token of one value head, as the header's formulas read.
void plain_step(const DeltaMix& op, const DeltaStreams& in, const RowRun& row, int32_t t,
                int64_t value_head) {
  const int64_t K = op.key_dim, V = op.value_dim, token = row.begin + t;
  const int64_t key_head = value_head * op.key_heads / op.value_heads;
  float* const S = op.state.at(row.slot) + value_head * state_floats(op);
  const std::vector<double> q = plain_key(op, in.q, t, key_head);
  const std::vector<double> k = plain_key(op, in.k, t, key_head);

  plain_decay(op, token, value_head, S);
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
    for (int64_t i = 0; i < K; ++i) {
      S[j * K + i] = float(double(S[j * K + i]) + u * k[size_t(i)]);
      o[size_t(j)] += double(S[j * K + i]) * q[size_t(i)] / std::sqrt(double(K));
    }
    if (op.answer_add) o[size_t(j)] += double(op.answer_add.at(token)[value_head * V + j]);
  }
  plain_out(op, token, value_head, o);
}

void run_plain(const DeltaMix& op) {
  for (int32_t r = 0; r < op.rows.count; ++r) {
    const RowRun row(op.rows, r);
    if (row.empty()) continue;
    const DeltaStreams in = delta_streams(op, row);
    float* const state = op.state.at(row.slot);
    if (row.fresh()) std::fill_n(state, op.value_heads * state_floats(op), 0.0f);
    for (int32_t t = 0; t < row.count; ++t) {
      for (int64_t j = 0; j < op.value_heads; ++j) plain_step(op, in, row, t, j);
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
  context.plain ? run_plain(op) : run_fast(op, context);
}

}  // namespace weir::cpu
