#include "kernels/swila_chunk.h"

#include "kernels/check.h"

namespace weir::cpu {
namespace {

// One chunk: its tokens, and for each mixture what is linear in it.
struct Part {
  int32_t first = 0, n = 0;
  std::vector<std::vector<double>> L;        // of each mixture, [n, dim]
  std::vector<std::vector<double>> gram_k;   // G, [n, n]
  std::vector<std::vector<double>> gram_q;   // H, [n, n]
  std::vector<std::vector<double>> recalled; // p, [n, dim]: the state's part, then all of it
  std::vector<std::vector<double>> u;        // [n, dim]
};

// state (x_t * exp L_t) for every token, [n, dim].
std::vector<double> ask_state(const double* state, const double* x, const std::vector<double>& L,
                              int32_t n, int32_t D) {
  const std::vector<double> asks = since_start(x, L);
  std::vector<double> answer(asks.size());
  for (int32_t t = 0; t < n; ++t) {
    for (int32_t d = 0; d < D; ++d) {
      answer[size_t(t * D + d)] = dot(state + d * D, &asks[size_t(t * D)], D);
    }
  }
  return answer;
}

Part linear_part(const SwilaChunk& op, int32_t first, int32_t n) {
  const int32_t D = op.dim, J = op.mixtures;
  Part c{.first = first, .n = n};
  std::vector<double> g(size_t(n) * size_t(D));
  for (int32_t j = 0; j < J; ++j) {
    for (size_t i = 0; i < g.size() && op.log_decay != nullptr; ++i) {
      const int64_t t = first + int64_t(i) / D;
      g[i] = op.log_decay[(t * J + j) * D + int64_t(i) % D];
    }
    const double *q = op.q + int64_t(first) * D, *k = op.k + int64_t(first) * D;
    c.L.push_back(decay_sums(g.data(), n, D));
    c.gram_k.push_back(decayed_gram(k, k, c.L.back(), n, D, op.sizes.block));
    c.gram_q.push_back(decayed_gram(q, k, c.L.back(), n, D, op.sizes.block));
    c.recalled.push_back(ask_state(op.state + int64_t(j) * D * D, k, c.L.back(), n, D));
    c.u.emplace_back(g.size(), 0.0);
  }
  return c;
}

// One number for each mixture, of one value dimension of one token.
using Mixed = std::vector<double>;

// The router's distribution, mixed with the last token's where there is a mix.
Mixed mix(const double* router, const double* mix, const double* last, int64_t token, int32_t d,
          int32_t J, int32_t D) {
  Mixed prior(static_cast<size_t>(J));
  for (int32_t j = 0; j < J; ++j) {
    double& one = prior[size_t(j)];
    one = router[(token * J + j) * D + d];
    if (mix == nullptr) continue;
    const double share = mix[token * D + d];
    one = (1 - share) * last[j * D + d] + share * one;
  }
  return prior;
}

// r and u of one value dimension of one token, all of whose p is known.
void switch_mixtures(const SwilaChunk& op, Part& c, int32_t t, int32_t d) {
  const int32_t D = op.dim, J = op.mixtures;
  const int64_t token = c.first + t;
  Mixed r = mix(op.key_router, op.key_mix, op.posterior, token, d, J, D), delta(r.size());
  double largest = -HUGE_VAL, sum = 0;
  for (size_t j = 0; j < r.size(); ++j) {
    delta[j] = op.v[token * D + d] - c.recalled[j][size_t(t * D + d)];
    r[j] = std::log(r[j]) - delta[j] * delta[j] / 2;
    largest = std::fmax(largest, r[j]);
  }
  for (double& one : r) sum += one = std::exp(one - largest);
  for (size_t j = 0; j < r.size(); ++j) {
    r[j] /= sum;
    c.u[j][size_t(t * D + d)] = op.beta[(token * J + int64_t(j)) * D + d] * r[j] * delta[j];
    if (op.key_mix != nullptr) op.posterior[int64_t(j) * D + d] = r[j];
  }
}

// u of all tokens, block after block: what earlier blocks left is a product of matrices, and only
// inside a block does one token wait for the last.
void solve(const SwilaChunk& op, Part& c) {
  const int32_t D = op.dim, J = op.mixtures, block = op.sizes.block;
  const auto add = [&](int32_t t, int32_t from, int32_t to) {
    for (int32_t j = 0; j < J; ++j) {
      for (int32_t s = from; s < to; ++s) {
        const double G = c.gram_k[size_t(j)][size_t(t * c.n + s)];
        const double* u = &c.u[size_t(j)][size_t(s * D)];
        double* p = &c.recalled[size_t(j)][size_t(t * D)];
        for (int32_t d = 0; d < D; ++d) p[d] += G * u[d];
      }
    }
  };
  for (int32_t first = 0; first < c.n; first += block) {
    const int32_t end = std::min(c.n, first + block);
    for (int32_t t = first; t < end; ++t) add(t, 0, first);
    for (int32_t t = first; t < end; ++t) {
      add(t, first, t);
      for (int32_t d = 0; d < D; ++d) switch_mixtures(op, c, t, d);
    }
  }
}

void answer(const SwilaChunk& op, const Part& c) {
  const int32_t D = op.dim, J = op.mixtures;
  std::vector<std::vector<double>> reads;
  for (int32_t j = 0; j < J; ++j) {
    reads.push_back(ask_state(op.state + int64_t(j) * D * D, op.q + int64_t(c.first) * D,
                              c.L[size_t(j)], c.n, D));
  }
  for (int32_t t = 0; t < c.n; ++t) {
    const int64_t token = c.first + t;
    for (int32_t d = 0; d < D; ++d) {
      const Mixed rho = mix(op.query_router, op.query_mix, op.prior, token, d, J, D);
      double o = 0;
      for (size_t j = 0; j < rho.size(); ++j) {
        double y = reads[j][size_t(t * D + d)];
        for (int32_t s = 0; s <= t; ++s) {
          y += c.gram_q[j][size_t(t * c.n + s)] * c.u[j][size_t(s * D + d)];
        }
        o += rho[j] * y;
        if (op.query_mix != nullptr) op.prior[int64_t(j) * D + d] = rho[j];
      }
      op.out[token * D + d] = o;
    }
  }
}

}  // namespace

void run(const SwilaChunk& op) {
  WEIR_CHECK(op.sizes.block > 0 && op.sizes.chunk % op.sizes.block == 0);
  WEIR_CHECK((op.key_mix == nullptr) == (op.query_mix == nullptr));
  const int32_t D = op.dim;
  for (int32_t first = 0; first < op.tokens; first += op.sizes.chunk) {
    Part c = linear_part(op, first, std::min(op.sizes.chunk, op.tokens - first));
    solve(op, c);
    answer(op, c);
    for (int32_t j = 0; j < op.mixtures; ++j) {
      const std::vector<double>& L = c.L[size_t(j)];
      const std::vector<double> kept = until_end(op.k + int64_t(first) * D, L, c.n, D);
      advance_state(op.state + int64_t(j) * D * D, c.u[size_t(j)].data(), D, kept, L, c.n, D, D);
    }
  }
}

}  // namespace weir::cpu
