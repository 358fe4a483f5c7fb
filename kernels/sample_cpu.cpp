#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu.h"
#include "kernels/sample_math.h"

namespace weir::cpu {
namespace {

// A token that may be drawn. Sorts before a less likely one, and before an equally likely one with
// a larger id.
struct Candidate {
  float logit = 0;
  Token token = 0;

  bool operator<(const Candidate& other) const {
    return logit != other.logit ? logit > other.logit : token < other.token;
  }
};

// Neither NaN nor plus infinity among them, and not minus infinity all of them.
bool drawable(const float* logits, int32_t vocab) {
  const auto usable = [](float logit) { return logit < kInfinity; };
  const auto finite = [](float logit) { return std::isfinite(logit); };
  return std::all_of(logits, logits + vocab, usable) &&
         std::any_of(logits, logits + vocab, finite);
}

// Every token with a finite logit, most likely first.
std::vector<Candidate> candidates(const float* logits, int32_t vocab) {
  std::vector<Candidate> all;
  for (Token token = 0; token < vocab; ++token) {
    if (std::isfinite(logits[token])) all.push_back({logits[token], token});
  }
  std::sort(all.begin(), all.end());
  return all;
}

// In any order of the set.
std::vector<double> probabilities(const std::vector<Candidate>& set, double temperature) {
  const double largest = double(std::min_element(set.begin(), set.end())->logit);
  std::vector<double> p;
  double sum = 0;
  for (const Candidate& one : set) {
    p.push_back(std::exp((double(one.logit) - largest) / temperature));
    sum += p.back();
  }
  for (double& one : p) one /= sum;
  return p;
}

// How many of these probabilities it takes to reach the goal; one at least.
size_t reach(const std::vector<double>& p, double goal) {
  double sum = 0;
  for (size_t n = 0; n < p.size(); ++n) {
    sum += p[n];
    if (sum >= goal) return n + 1;
  }
  return p.size();
}

// Keeps the tokens whose surprise is nearest to the mean surprise.
void keep_typical(std::vector<Candidate>& set, const Sampling& how) {
  const std::vector<double> p = probabilities(set, double(how.temperature));
  double entropy = 0;
  for (const double one : p) entropy -= one > 0 ? one * std::log(one) : 0;
  std::vector<size_t> order(set.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto distance = [&](size_t i) { return std::fabs(-std::log(p[i]) - entropy); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return distance(a) < distance(b);
  });
  std::vector<double> sorted;
  for (const size_t i : order) sorted.push_back(p[i]);
  std::vector<Candidate> kept;
  for (size_t n = reach(sorted, double(how.typical_p)), i = 0; i < n; ++i) {
    kept.push_back(set[order[i]]);
  }
  std::sort(kept.begin(), kept.end());
  set = kept;
}

Token draw(const float* logits, int32_t vocab, const Sampling& how, int32_t position) {
  std::vector<Candidate> set = candidates(logits, vocab);
  const auto temperature = double(how.temperature);
  if (temperature <= 0) return set.front().token;
  if (how.top_k > 0) set.resize(std::min(set.size(), size_t(how.top_k)));
  if (how.typical_p < 1) keep_typical(set, how);
  if (how.top_p < 1) set.resize(reach(probabilities(set, temperature), double(how.top_p)));
  if (how.min_p > 0) {
    const std::vector<double> p = probabilities(set, temperature);
    size_t kept = 1;
    while (kept < p.size() && p[kept] >= double(how.min_p) * p.front()) ++kept;
    set.resize(kept);
  }
  std::vector<double> p = probabilities(set, temperature);
  if (!draws_in_order(how)) {
    std::sort(set.begin(), set.end(), [](Candidate a, Candidate b) { return a.token < b.token; });
    p = probabilities(set, temperature);
  }
  const double goal = uniform(how.seed, position);
  double sum = 0;
  for (size_t i = 0; i < set.size(); ++i) {
    sum += p[i];
    if (sum > goal) return set[i].token;
  }
  return set.front().token;  // rounding left the goal just beyond the sum
}

void run_plain(const Sample& op, int64_t i) {
  float* const logits = op.logits.at(i);
  const Sampling& how = op.sampling[i];
  answer_nothing(op, i);
  if (!drawable(logits, op.vocab)) return;
  const std::vector<Candidate> all = candidates(logits, op.vocab);
  double sum = 0;
  for (const Candidate& one : all) sum += std::exp(double(one.logit) - double(all[0].logit));
  const auto logprob = [&](float logit) {
    return float(double(logit) - double(all[0].logit) - std::log(sum));
  };
  for (size_t n = 0; n < std::min(size_t(op.top[i]), all.size()); ++n) {
    op.top_token[i * Sample::kTop + int64_t(n)] = all[n].token;
    op.top_logprob[i * Sample::kTop + int64_t(n)] = logprob(all[n].logit);
  }
  const std::vector<float> raw(logits, logits + op.vocab);
  Token token = op.target[i];
  if (token < 0) {
    for_each_edit(op, i, [&](const LogitEdit& edit) {
      logits[edit.token] = edited(logits[edit.token], edit, how);
    });
    if (!drawable(logits, op.vocab)) return;
    token = draw(logits, op.vocab, how, op.position[i]);
  }
  op.token[i] = token;
  op.logprob[i] = logprob(raw[size_t(token)]);
}

}  // namespace

void run(const Sample& op, const Context& context) {
  if (!context.plain) return run_fast(op, context);
  for (int64_t i = 0; i < op.count; ++i) run_plain(op, i);
}

}  // namespace weir::cpu
