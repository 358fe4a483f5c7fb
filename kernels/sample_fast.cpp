#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/cpu.h"
#include "kernels/sample_math.h"

namespace weir::cpu {
namespace {

// A token and its logit as one number: larger for larger logits, and for the smaller of two ids
// with the same logit.
using Key = uint64_t;

Key key_of(float logit, Token token) {
  const auto bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 becomes 0
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return Key{ordered} << 32 | (0xffffffffu - uint32_t(token));
}
Token token_of(Key key) { return Token(0xffffffffu - uint32_t(key)); }
float logit_of(Key key) {
  const auto ordered = uint32_t(key >> 32);
  return std::bit_cast<float>((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

// The tokens that may be drawn. Draws and filters look at the most likely ones, so that only those
// are ever sorted.
class Candidates {
 public:
  // `most` is the largest logit, `keys` memory to work in.
  Candidates(const float* logits, int32_t vocab, float most, double temperature,
             std::vector<Key>& keys)
      : most_(double(most)), temperature_(temperature), keys_(keys) {
    keys_.clear();
    for (Token token = 0; token < vocab; ++token) {
      if (logits[token] > -kInfinity) keys_.push_back(key_of(logits[token], token));
    }
  }

  size_t size() const { return keys_.size(); }
  double log_weight(Key key) const { return (double(logit_of(key)) - most_) / temperature_; }
  double weight(Key key) const { return std::exp(log_weight(key)); }
  double total() const {
    double sum = 0;
    for (const Key key : keys_) sum += weight(key);
    return sum;
  }

  void keep_top(size_t count) {
    if (count >= keys_.size()) return;
    std::nth_element(keys_.begin(), keys_.begin() + int64_t(count), keys_.end(), std::greater<>());
    keys_.resize(count);
  }
  void keep_typical(double typical_p);

  // The nth most likely one.
  Key at(size_t n) {
    while (n >= sorted_) sort_more();
    return keys_[n];
  }

 private:
  void sort_more() {
    const size_t next = std::min(keys_.size(), std::max<size_t>(64, 8 * sorted_));
    const auto begin = keys_.begin() + int64_t(sorted_), end = keys_.begin() + int64_t(next);
    if (next < keys_.size()) std::nth_element(begin, end, keys_.end(), std::greater<>());
    std::sort(begin, end, std::greater<>());
    sorted_ = next;
  }

  double most_, temperature_;
  std::vector<Key>& keys_;
  size_t sorted_ = 0;
};

// Keeps the tokens whose surprise is nearest to the mean surprise.
void Candidates::keep_typical(double typical_p) {
  const double all = total(), log_all = std::log(all);
  const auto surprise = [&](Key key) { return log_all - log_weight(key); };
  double entropy = 0;
  for (const Key key : keys_) entropy += weight(key) / all * surprise(key);
  struct Distance {
    double distance;
    Key key;
    bool operator<(const Distance& other) const {
      return distance != other.distance ? distance < other.distance : key > other.key;
    }
  };
  std::vector<Distance> nearest;
  nearest.reserve(keys_.size());
  for (const Key key : keys_) nearest.push_back({std::fabs(surprise(key) - entropy), key});
  std::sort(nearest.begin(), nearest.end());
  keys_.clear();
  double sum = 0;
  for (const Distance& one : nearest) {
    keys_.push_back(one.key);
    sum += weight(one.key);
    if (sum >= typical_p * all) break;
  }
}

// The token at the end of the given share of the candidates' weights, most likely first, once top_p
// and min_p have cut off the unlikely ones.
Token draw_by_weight(Candidates& set, double total, const Sampling& how, double share) {
  const bool whole = how.top_p >= 1 && how.min_p <= 0;  // nothing is cut off
  const double mass = how.top_p < 1 ? double(how.top_p) * total : HUGE_VAL;
  const double least = double(how.min_p) * set.weight(set.at(0));
  double kept = 0;
  size_t end = 0;
  while (!whole && end < set.size() && kept < mass) {
    const double weight = set.weight(set.at(end));
    if (end > 0 && weight < least) break;
    kept += weight;
    ++end;
  }
  const double goal = share * (whole ? total : kept);
  double sum = 0;
  for (size_t n = 0; n < (whole ? set.size() : end); ++n) {
    sum += set.weight(set.at(n));
    if (sum > goal) return token_of(set.at(n));
  }
  return token_of(set.at(0));  // rounding left the goal just beyond the sum
}

// The token at the end of the given share of all weights, in the order of ids.
class ById {
 public:
  ById(const float* logits, int32_t vocab, float most, const Sampling& how, const MixerSimd& simd)
      : logits_(logits), vocab_(vocab), most_(most), how_(how), simd_(simd),
        least_(how.min_p > 0 ? std::log(double(how.min_p)) : -HUGE_VAL) {}

  Token draw(double share) const {
    double total = 0;
    for (Token begin = 0; begin < vocab_; begin += kBlock) total += block_weight(begin);
    const double goal = share * total;
    double sum = 0;
    Token begin = 0;
    for (; begin + kBlock < vocab_; begin += kBlock) {
      const double weight = block_weight(begin);
      if (sum + weight > goal) break;
      sum += weight;
    }
    Token last = begin;  // what rounding leaves over goes to the block's last one
    for (Token token = begin; token < end(begin); ++token) {
      const double one = weight(token);
      if (one > 0) last = token;
      sum += one;
      if (sum > goal) break;
    }
    return last;
  }

 private:
  static constexpr Token kBlock = 1024;

  Token end(Token begin) const { return std::min(begin + kBlock, vocab_); }
  double weight(Token token) const {
    const double log_weight =
        (double(logits_[token]) - double(most_)) / double(how_.temperature);
    return log_weight >= least_ ? std::exp(log_weight) : 0;
  }
  double block_weight(Token begin) const {
    if (how_.min_p <= 0) {
      return simd_.exp_sum(logits_ + begin, most_, how_.temperature, end(begin) - begin);
    }
    double sum = 0;
    for (Token token = begin; token < end(begin); ++token) sum += weight(token);
    return sum;
  }

  const float* logits_;
  const int32_t vocab_;
  const float most_;
  const Sampling& how_;
  const MixerSimd& simd_;
  const double least_;  // log weights below it are cut off
};

// One row of logits.
class Row {
 public:
  Row(const Sample& op, const MixerSimd& simd, int64_t row)
      : op_(op), simd_(simd), row_(row), logits_(op.logits.at(row)), how_(op.sampling[row]) {}

  void run(std::vector<Key>& keys);

 private:
  // What an edit found.
  struct Before {
    Token token;
    float logit;
  };

  void report_top(float most, double log_sum) const;
  float raw(Token token, const std::vector<Before>& before) const;
  Token draw(float most, std::vector<Key>& keys) const;

  const Sample& op_;
  const MixerSimd& simd_;
  const int64_t row_;
  float* const logits_;
  const Sampling& how_;
};

// The largest logits, kept in order while one pass finds them.
void Row::report_top(float most, double log_sum) const {
  const int32_t wanted = std::min(op_.top[row_], Sample::kTop);
  if (wanted <= 0) return;
  Key best[Sample::kTop];
  int32_t found = 0;
  float least = -kInfinity;  // what a logit must exceed: equal ones come later in the order
  for (Token token = 0; token < op_.vocab; ++token) {
    if (!(logits_[token] > least)) continue;
    const Key key = key_of(logits_[token], token);
    int32_t at = found < wanted ? found++ : wanted - 1;
    for (; at > 0 && best[at - 1] < key; --at) best[at] = best[at - 1];
    best[at] = key;
    if (found == wanted) least = logit_of(best[wanted - 1]);
  }
  for (int32_t n = 0; n < found; ++n) {
    op_.top_token[row_ * Sample::kTop + n] = token_of(best[n]);
    op_.top_logprob[row_ * Sample::kTop + n] =
        float(double(logit_of(best[n])) - double(most) - log_sum);
  }
}

// A logit as it was before the edits.
float Row::raw(Token token, const std::vector<Before>& before) const {
  for (const Before& one : before) {
    if (one.token == token) return one.logit;
  }
  return logits_[token];
}

Token Row::draw(float most, std::vector<Key>& keys) const {
  if (how_.temperature <= 0) {
    return Token(std::find(logits_, logits_ + op_.vocab, most) - logits_);
  }
  const double share = uniform(how_.seed, op_.position[row_]);
  if (!draws_in_order(how_)) return ById(logits_, op_.vocab, most, how_, simd_).draw(share);
  Candidates set(logits_, op_.vocab, most, double(how_.temperature), keys);
  const size_t all = set.size();
  if (how_.top_k > 0) set.keep_top(size_t(how_.top_k));
  if (how_.typical_p < 1) set.keep_typical(double(how_.typical_p));
  const double total = set.size() == all
                           ? simd_.exp_sum(logits_, most, how_.temperature, op_.vocab)
                           : set.total();
  return draw_by_weight(set, total, how_, share);
}

void Row::run(std::vector<Key>& keys) {
  answer_nothing(op_, row_);
  const float most = simd_.largest(logits_, op_.vocab);
  if (!std::isfinite(most)) return;
  const double log_sum = std::log(simd_.exp_sum(logits_, most, 1.0f, op_.vocab));
  report_top(most, log_sum);

  Token token = op_.target[row_];
  std::vector<Before> before;
  if (token < 0) {
    before.reserve(size_t(op_.edit_begin[row_ + 1] - op_.edit_begin[row_]));
    for_each_edit(op_, row_, [&](const LogitEdit& edit) {
      float& logit = logits_[edit.token];
      before.push_back({edit.token, logit});
      logit = edited(logit, edit, how_);
    });
    const float most_edited = before.empty() ? most : simd_.largest(logits_, op_.vocab);
    if (!std::isfinite(most_edited)) return;
    token = draw(most_edited, keys);
  }
  op_.token[row_] = token;
  op_.logprob[row_] = float(double(raw(token, before)) - double(most) - log_sum);
}

}  // namespace

void run_fast(const Sample& op, const Context& context) {
  context.pool.parallel_for(
      op.count,
      [&](int64_t begin, int64_t end) {
        std::vector<Key> keys;
        for (int64_t i = begin; i < end; ++i) Row(op, *context.simd.mixers, i).run(keys);
      },
      1);
}

}  // namespace weir::cpu
