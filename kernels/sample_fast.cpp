#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/cpu.h"

namespace weir::cpu {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

// A number in [0, 1) that is a function of (seed, position) alone (the splitmix64 finaliser, twice).
double random_unit(uint64_t seed, int32_t position) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  };
  const uint64_t bits = mix(mix(seed + 0x9E3779B97F4A7C15ull) + uint64_t(uint32_t(position)) *
                                                                    0xD1342543DE82EF95ull);
  return double(bits >> 11) * 0x1p-53;
}

struct Candidate {
  Token token = 0;
  double weight = 0;  // its logit over the temperature, then its probability
};

// One row of logits.
class Row {
 public:
  Row(const Sample& op, int64_t row)
      : op_(op), row_(row), logits_(op.logits.at(row)), sampling_(op.sampling[row]) {}

  void run(std::vector<Candidate>& scratch);

 private:
  bool usable() const;
  void report_top(double log_sum) const;
  void edit();
  Token draw(std::vector<Candidate>& candidates) const;
  Token most_likely() const;

  const Sample& op_;
  const int64_t row_;
  float* logits_;
  const Sampling& sampling_;
};

// Whether the row is a distribution: no NaN, no +inf, at least one finite number.
bool Row::usable() const {
  bool finite = false;
  for (int32_t i = 0; i < op_.vocab; ++i) {
    if (std::isnan(logits_[i]) || logits_[i] == std::numeric_limits<float>::infinity()) return false;
    finite = finite || std::isfinite(logits_[i]);
  }
  return finite;
}

void Row::report_top(double log_sum) const {
  const int32_t wanted = std::min({op_.top[row_], Sample::kTop, op_.vocab});
  Token* token = op_.top_token + row_ * Sample::kTop;
  float* logprob = op_.top_logprob + row_ * Sample::kTop;
  std::fill_n(token, Sample::kTop, -1);
  if (wanted <= 0) return;
  std::vector<Token> order(static_cast<size_t>(op_.vocab));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + wanted, order.end(), [&](Token a, Token b) {
    return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
  });
  for (int32_t i = 0; i < wanted; ++i) {
    token[i] = order[size_t(i)];
    logprob[i] = float(logits_[order[size_t(i)]] - log_sum);
  }
}

void Row::edit() {
  for (int32_t i = op_.edit_begin[row_]; i < op_.edit_begin[row_ + 1]; ++i) {
    const LogitEdit& edit = op_.edits[i];
    float& logit = logits_[edit.token];
    if (edit.seen) {
      const float penalty = sampling_.repetition_penalty;
      logit = logit > 0 ? logit / penalty : logit * penalty;
    }
    logit -= sampling_.frequency_penalty * float(edit.generated);
    if (edit.generated > 0) logit -= sampling_.presence_penalty;
    logit += edit.bias;
  }
}

Token Row::most_likely() const {
  const float* best = std::max_element(logits_, logits_ + op_.vocab);
  return std::isfinite(*best) ? Token(best - logits_) : -1;
}

bool likelier(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

// Logits to probabilities.
void softmax(std::vector<Candidate>& candidates) {
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (const Candidate& c : candidates) largest = std::max(largest, c.weight);
  for (Candidate& c : candidates) sum += c.weight = std::exp(c.weight - largest);
  for (Candidate& c : candidates) c.weight /= sum;
}

void renormalise(std::vector<Candidate>& candidates) {
  double sum = 0;
  for (const Candidate& c : candidates) sum += c.weight;
  for (Candidate& c : candidates) c.weight /= sum;
}

// Keeps the first candidates until they hold at least `mass`, in the order given.
void keep_mass(std::vector<Candidate>& candidates, double mass) {
  double sum = 0;
  size_t kept = 0;
  while (kept < candidates.size() && sum < mass) sum += candidates[kept++].weight;
  candidates.resize(std::max<size_t>(kept, 1));
  renormalise(candidates);
}

// Keeps tokens whose surprise is nearest to the entropy.
void keep_typical(std::vector<Candidate>& candidates, double mass) {
  double entropy = 0;
  for (const Candidate& c : candidates) {
    if (c.weight > 0) entropy -= c.weight * std::log(c.weight);
  }
  const auto distance = [&](const Candidate& c) { return std::fabs(-std::log(c.weight) - entropy); };
  std::sort(candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
    const double da = distance(a), db = distance(b);
    return da != db ? da < db : likelier(a, b);
  });
  keep_mass(candidates, mass);
  std::sort(candidates.begin(), candidates.end(), likelier);
}

Token Row::draw(std::vector<Candidate>& candidates) const {
  const Sampling& s = sampling_;
  candidates.clear();
  for (int32_t i = 0; i < op_.vocab; ++i) {
    if (logits_[i] != kForbidden) candidates.push_back({i, double(logits_[i]) / s.temperature});
  }
  if (candidates.empty()) return -1;
  if (s.top_k > 0 && size_t(s.top_k) < candidates.size()) {
    std::nth_element(candidates.begin(), candidates.begin() + s.top_k, candidates.end(), likelier);
    candidates.resize(size_t(s.top_k));
  }
  softmax(candidates);
  const bool ordered = s.typical_p < 1 || s.top_p < 1 || s.top_k > 0;
  if (ordered) std::sort(candidates.begin(), candidates.end(), likelier);
  if (s.typical_p < 1) keep_typical(candidates, s.typical_p);
  if (s.top_p < 1) keep_mass(candidates, s.top_p);
  if (s.min_p > 0) {
    double largest = 0;
    for (const Candidate& c : candidates) largest = std::max(largest, c.weight);
    std::erase_if(candidates, [&](const Candidate& c) { return c.weight < s.min_p * largest; });
    renormalise(candidates);
  }
  double left = random_unit(s.seed, op_.position[row_]);
  for (const Candidate& c : candidates) {
    left -= c.weight;
    if (left < 0) return c.token;
  }
  // What rounding left over goes to the last token that can be drawn.
  for (size_t i = candidates.size(); i-- > 0;) {
    if (candidates[i].weight > 0) return candidates[i].token;
  }
  return -1;
}

void Row::run(std::vector<Candidate>& scratch) {
  Token& token = op_.token[row_];
  float& logprob = op_.logprob[row_];
  token = -1;
  logprob = 0;
  std::fill_n(op_.top_token + row_ * Sample::kTop, Sample::kTop, -1);
  if (!usable()) return;
  double sum = 0;
  const double largest = *std::max_element(logits_, logits_ + op_.vocab);
  for (int32_t i = 0; i < op_.vocab; ++i) sum += std::exp(logits_[i] - largest);
  const double log_sum = largest + std::log(sum);
  report_top(log_sum);
  const Token target = op_.target[row_];
  const auto log_of = [&](Token id) { return float(logits_[id] - log_sum); };
  if (target >= 0) {
    token = target;
    logprob = log_of(target);
    return;
  }
  if (op_.edit_begin[row_] == op_.edit_begin[row_ + 1]) {
    token = sampling_.temperature > 0 ? draw(scratch) : most_likely();
    if (token >= 0) logprob = log_of(token);
    return;
  }
  const std::vector<float> raw(logits_, logits_ + op_.vocab);
  edit();
  if (sampling_.temperature > 0) {
    token = draw(scratch);
  } else {
    token = most_likely();
  }
  if (token >= 0) logprob = float(raw[size_t(token)] - log_sum);
}

}  // namespace

void run_fast(const Sample& op, const Context& context) {
  const auto work = [&](int64_t begin, int64_t end) {
    std::vector<Candidate> scratch;
    for (int64_t row = begin; row < end; ++row) Row(op, row).run(scratch);
  };
  context.plain ? work(0, op.count) : context.pool.parallel_for(op.count, work, 1);
}

}  // namespace weir::cpu
