#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/op.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Row {
  std::vector<float> logits;
  Sampling sampling;
  int32_t position = 0;
  Token target = -1;
  int32_t top = 0;
  std::vector<LogitEdit> edits;
  Token last = -1;  // that the edits do not know yet
};

struct Drawn {
  Token token = -7;
  float logprob = kNan;
  std::vector<Token> top_token;
  std::vector<float> top_logprob;

  bool operator==(const Drawn& other) const {
    return token == other.token && same_bits({logprob}, {other.logprob}) &&
           top_token == other.top_token && same_bits(top_logprob, other.top_logprob);
  }
};

std::vector<Drawn> draw(Backend& backend, const std::vector<Row>& rows) {
  const auto count = int32_t(rows.size()), vocab = int32_t(rows[0].logits.size());
  const int64_t stride = vocab + 3;
  std::vector<float> logits(size_t(count * stride), kNan);
  std::vector<Sampling> sampling;
  std::vector<int32_t> position, top, counts, edit_begin = {0};
  std::vector<Token> target, read(7, -1);
  std::vector<LogitEdit> edits;
  for (int32_t i = 0; i < count; ++i) {
    const Row& row = rows[size_t(i)];
    std::copy(row.logits.begin(), row.logits.end(), logits.begin() + i * stride);
    sampling.push_back(row.sampling);
    position.push_back(row.position);
    top.push_back(row.top);
    target.push_back(row.target);
    counts.push_back(row.last < 0 ? -1 : int32_t(read.size()));
    read.push_back(row.last);
    edits.insert(edits.end(), row.edits.begin(), row.edits.end());
    edit_begin.push_back(int32_t(edits.size()));
  }
  constexpr auto kTop = size_t(Sample::kTop);
  std::vector<Token> token(rows.size(), -7), top_token(rows.size() * kTop, -7);
  std::vector<float> logprob(rows.size(), kNan), top_logprob(rows.size() * kTop, kNan);
  backend.run({Sample{.count = count, .vocab = vocab, .logits = {logits.data(), stride},
                      .sampling = sampling.data(), .position = position.data(),
                      .target = target.data(), .top = top.data(), .edit_begin = edit_begin.data(),
                      .edits = edits.data(), .read = read.data(), .counts = counts.data(),
                      .token = token.data(), .logprob = logprob.data(),
                      .top_token = top_token.data(), .top_logprob = top_logprob.data()}});
  std::vector<Drawn> drawn;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Token* const ids = &top_token[i * kTop];
    const float* const values = &top_logprob[i * kTop];
    drawn.push_back({.token = token[i], .logprob = logprob[i],
                     .top_token = {ids, ids + rows[i].top},
                     .top_logprob = {values, values + rows[i].top}});
  }
  return drawn;
}

std::vector<float> random_logits(int32_t vocab, uint64_t seed, float scale = 2) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> distribution(0, scale);
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& logit : logits) logit = distribution(random);
  return logits;
}

// The distribution that a row is drawn from, token by token. Each filter looks at every token for
// itself: it stays when what ranks before it has not filled the filter yet.
std::vector<double> expected(const Row& row) {
  const Sampling& s = row.sampling;
  std::vector<double> logits(row.logits.begin(), row.logits.end());
  for (const LogitEdit& edit : row.edits) {
    double& logit = logits[size_t(edit.token)];
    if (edit.seen && logit > 0) logit /= double(s.repetition_penalty);
    else if (edit.seen) logit *= double(s.repetition_penalty);
    logit -= double(s.frequency_penalty) * edit.generated +
             double(s.presence_penalty) * (edit.generated > 0);
    logit += double(edit.bias);
  }
  const size_t n = logits.size();
  std::vector<double> p(n);
  for (size_t i = 0; i < n; ++i) p[i] = std::exp(logits[i] / double(s.temperature));
  const auto normalise = [&] {
    double sum = 0;
    for (const double one : p) sum += one;
    for (double& one : p) one /= sum;
  };
  // Keeps i when `filled(mass, tokens)` does not hold for the tokens with a larger rank.
  const auto filter = [&](const auto& rank, const auto& filled) {
    std::vector<double> kept(n, 0.0);
    for (size_t i = 0; i < n; ++i) {
      double mass = 0;
      int32_t tokens = 0;
      for (size_t j = 0; j < n; ++j) {
        const bool before = rank(j) > rank(i) || (rank(j) == rank(i) && j < i);
        if (p[j] > 0 && before) mass += p[j];
        if (p[j] > 0 && before) ++tokens;
      }
      if (!filled(mass, tokens)) kept[i] = p[i];
    }
    p = kept;
    normalise();
  };
  normalise();
  const auto likely = [&](size_t i) { return p[i]; };
  if (s.top_k > 0) filter(likely, [&](double, int32_t tokens) { return tokens >= s.top_k; });
  if (s.typical_p < 1) {
    double entropy = 0;
    for (const double one : p) entropy -= one > 0 ? one * std::log(one) : 0;
    filter([&](size_t i) { return -std::fabs(std::log(p[i]) + entropy); },
           [&](double mass, int32_t) { return mass >= double(s.typical_p); });
  }
  if (s.top_p < 1) filter(likely, [&](double mass, int32_t) { return mass >= double(s.top_p); });
  const double most = *std::max_element(p.begin(), p.end());
  for (double& one : p) one = one < double(s.min_p) * most ? 0 : one;
  normalise();
  return p;
}

std::vector<Sampling> filters() {
  return {{.temperature = 1},
          {.temperature = 0.6f},
          {.temperature = 1.7f},
          {.temperature = 1, .top_k = 1},
          {.temperature = 1, .top_k = 4},
          {.temperature = 1, .top_k = 100},
          {.temperature = 1, .top_p = 0.7f},
          {.temperature = 1, .top_p = 1e-6f},
          {.temperature = 1, .min_p = 0.2f},
          {.temperature = 1, .typical_p = 0.6f},
          {.temperature = 1.3f, .top_k = 8, .top_p = 0.8f},
          {.temperature = 0.9f, .top_k = 9, .top_p = 0.95f, .min_p = 0.1f, .typical_p = 0.9f},
          {.temperature = 1, .repetition_penalty = 1.5f},
          {.temperature = 1, .frequency_penalty = 0.4f, .presence_penalty = 0.8f},
          {.temperature = 0.8f, .top_p = 0.9f, .repetition_penalty = 1.2f,
           .frequency_penalty = -0.3f, .presence_penalty = 0.2f}};
}

TEST(Sample, DrawsFromTheDistributionOfItsFilters) {
  constexpr int32_t kVocab = 14, kDraws = 20000;
  for (const CpuKind& kind : cpu_kinds()) {
    const auto backend = make_cpu_backend(kind.options);
    for (size_t f = 0; f < filters().size(); ++f) {
      Row row{.logits = random_logits(kVocab, 40 + f, 1.2f), .sampling = filters()[f]};
      row.sampling.seed = 1000 + f;
      row.edits = {{.token = 2, .generated = 1, .seen = true}, {.token = 5, .seen = true},
                   {.token = 7, .bias = 1.5f, .generated = 3, .seen = true},
                   {.token = 11, .bias = -kInfinity}};
      std::vector<Row> rows(kDraws, row);
      for (int32_t i = 0; i < kDraws; ++i) rows[size_t(i)].position = i;
      std::vector<double> count(kVocab, 0.0);
      for (const Drawn& drawn : draw(*backend, rows)) {
        ASSERT_GE(drawn.token, 0);
        ++count[size_t(drawn.token)];
      }
      double chi_square = 0;
      const std::vector<double> p = expected(row);
      for (size_t i = 0; i < p.size(); ++i) {
        if (p[i] == 0) {
          EXPECT_EQ(count[i], 0) << kind.name << ", filter " << f << ", token " << i;
          continue;
        }
        chi_square += (count[i] - kDraws * p[i]) * (count[i] - kDraws * p[i]) / (kDraws * p[i]);
      }
      // 13 degrees of freedom at most: exceeded by chance once in 10^5 settings. Seeds are fixed.
      EXPECT_LT(chi_square, 47) << kind.name << ", filter " << f;
    }
  }
}

// The rows of a busy step: every filter, edits, alternatives and targets over a large vocabulary.
std::vector<Row> busy_rows(int32_t vocab, size_t count) {
  std::vector<Row> rows;
  for (size_t i = 0; i < count; ++i) {
    Row row{.logits = random_logits(vocab, i, i % 3 == 0 ? 0.3f : 3)};
    row.sampling = filters()[i % filters().size()];
    if (i % 5 == 0) row.sampling.temperature = 0;
    if (row.sampling.top_k == 100) row.sampling.top_k = 300;
    row.sampling.seed = i * 77;
    row.position = int32_t(i * 31);
    row.target = i % 11 == 3 ? Token(i * 7 % size_t(vocab)) : -1;
    row.top = int32_t(i % (Sample::kTop + 1));
    for (size_t e = 0; e < i % 7; ++e) {
      row.edits.push_back({.token = Token((e * 131 + i) % size_t(vocab)),
                           .bias = e == 3 ? -kInfinity : 0.5f, .generated = int32_t(e % 3),
                           .seen = e % 2 == 0});
    }
    rows.push_back(row);
  }
  return rows;
}

TEST(Sample, FastDrawsWhatThePlainDraws) {
  for (const int32_t vocab : {2, 50, 3001}) {
    const std::vector<Row> rows = busy_rows(vocab, 300);
    const auto plain = draw(*make_cpu_backend({.plain = true}), rows);
    for (const CpuKind& kind : cpu_kinds()) {
      const auto fast = draw(*make_cpu_backend(kind.options), rows);
      for (size_t i = 0; i < rows.size(); ++i) {
        EXPECT_EQ(fast[i].token, plain[i].token) << kind.name << ", " << vocab << ", row " << i;
        EXPECT_NEAR(fast[i].logprob, plain[i].logprob, 3e-6) << kind.name << ", row " << i;
        EXPECT_EQ(fast[i].top_token, plain[i].top_token) << kind.name << ", row " << i;
        for (size_t j = 0; j < fast[i].top_logprob.size(); ++j) {
          if (fast[i].top_token[j] < 0) continue;
          EXPECT_NEAR(fast[i].top_logprob[j], plain[i].top_logprob[j], 3e-6) << kind.name;
        }
      }
    }
  }
}

TEST(Sample, ADrawDoesNotDependOnItsPlace) {
  std::vector<Row> rows = busy_rows(900, 40), reversed(rows.rbegin(), rows.rend());
  rows[7].logits[3] = kNan;
  reversed[reversed.size() - 1 - 7].logits[3] = kNan;
  for (const CpuKind& kind : cpu_kinds()) {
    const auto together = draw(*make_cpu_backend(kind.options), rows);
    const auto backwards = draw(*make_cpu_backend(kind.options), reversed);
    CpuOptions one = kind.options;
    one.threads = 1;
    for (size_t i = 0; i < rows.size(); ++i) {
      const Drawn alone = draw(*make_cpu_backend(one), {rows[i]})[0];
      EXPECT_TRUE(alone == together[i]) << kind.name << ", row " << i;
      EXPECT_TRUE(alone == backwards[rows.size() - 1 - i]) << kind.name << ", row " << i;
    }
  }
}

// A token drawn after the edits were made counts as if they knew it, whether it is among them or
// not.
TEST(Sample, CountsTheLastTokenThatTheEditsDoNotKnow) {
  std::vector<Row> rows, known;
  for (Row& row : busy_rows(300, 200)) {
    for (LogitEdit& edit : row.edits) edit.token = edit.token / 2 * 2;  // the odd ones are new
    std::ranges::sort(row.edits, {}, &LogitEdit::token);
    const auto twice = std::ranges::unique(row.edits, {}, &LogitEdit::token);
    row.edits.erase(twice.begin(), twice.end());
    row.sampling.repetition_penalty = 3;
    row.sampling.presence_penalty = 0.7f;
    row.sampling.frequency_penalty = 0.4f;
    const auto most = std::ranges::max_element(row.logits) - row.logits.begin();
    row.last = !row.edits.empty() && rows.size() % 2 == 0 ? row.edits.back().token : Token(most);
    rows.push_back(row);
    auto place = std::ranges::find(row.edits, row.last, &LogitEdit::token);
    if (place == row.edits.end()) place = row.edits.insert(place, {.token = row.last});
    ++place->generated;
    place->seen = true;
    row.last = -1;
    known.push_back(row);
  }
  std::vector<Row> ignorant = rows;
  for (Row& row : ignorant) row.last = -1;
  for (const CpuKind& kind : cpu_kinds()) {
    const auto backend = make_cpu_backend(kind.options);
    const auto drawn = draw(*backend, rows), expected = draw(*backend, known);
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_TRUE(drawn[i] == expected[i]) << kind.name << ", row " << i;
    }
    EXPECT_FALSE(drawn == draw(*backend, ignorant)) << kind.name;
  }
}

TEST(Sample, SeedsAndPositionsGiveDifferentDraws) {
  Row row{.logits = std::vector<float>(1000, 0.0f), .sampling = {.temperature = 1}};
  for (const CpuKind& kind : cpu_kinds()) {
    std::vector<Row> rows;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      for (int32_t position = 0; position < 20; ++position) {
        row.sampling.seed = seed;
        row.position = position;
        rows.push_back(row);
      }
    }
    std::vector<Token> tokens;
    for (const Drawn& drawn : draw(*make_cpu_backend(kind.options), rows)) {
      tokens.push_back(drawn.token);
    }
    std::sort(tokens.begin(), tokens.end());
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
    EXPECT_GT(tokens.size(), 300u) << kind.name;  // 330 are expected of 400 draws out of 1000
  }
}

TEST(Sample, BrokenRowsAnswerMinusOneAlone) {
  const std::vector<float> good = random_logits(37, 5);
  std::vector<Row> rows(7, {.logits = good, .sampling = {.temperature = 1}, .top = 3});
  rows[1].logits[36] = kNan;
  rows[2].logits[0] = kInfinity;
  rows[3].logits.assign(37, -kInfinity);
  rows[4].logits[5] = kNan;
  rows[4].target = 2;
  rows[5].sampling.temperature = 0;
  for (Token token = 0; token < 37; ++token) {  // all are forbidden
    rows[5].edits.push_back({.token = token, .bias = -kInfinity});
  }
  for (const CpuKind& kind : cpu_kinds()) {
    const auto drawn = draw(*make_cpu_backend(kind.options), rows);
    for (const size_t i : {1, 2, 3, 4, 5}) EXPECT_EQ(drawn[i].token, -1) << kind.name << i;
    EXPECT_GE(drawn[0].token, 0) << kind.name;
    EXPECT_TRUE(drawn[0] == drawn[6]) << kind.name;
    EXPECT_TRUE(drawn[0] == draw(*make_cpu_backend(kind.options), {rows[0]})[0]) << kind.name;
  }
}

TEST(Sample, EqualLogitsGoToTheSmallerId) {
  Row row{.logits = std::vector<float>(40, -1.0f), .top = 4};
  row.logits[33] = row.logits[9] = row.logits[21] = 2;
  Row two = row;
  two.sampling = {.temperature = 1, .top_k = 2};
  Row zeros{.logits = {-3, 0.0f, -0.0f, 0.0f}, .top = 4};
  for (const CpuKind& kind : cpu_kinds()) {
    const auto backend = make_cpu_backend(kind.options);
    const Drawn drawn = draw(*backend, {row})[0];
    EXPECT_EQ(drawn.token, 9) << kind.name;
    EXPECT_EQ(drawn.top_token, (std::vector<Token>{9, 21, 33, 0})) << kind.name;
    EXPECT_EQ(draw(*backend, {zeros})[0].top_token, (std::vector<Token>{1, 2, 3, 0})) << kind.name;
    for (two.position = 0; two.position < 50; ++two.position) {
      const Token token = draw(*backend, {two})[0].token;
      EXPECT_TRUE(token == 9 || token == 21) << kind.name << ", " << token;
    }
  }
}

// The first token by id may be further below the largest than exp() reaches.
TEST(Sample, LogitsFarApartStayInRange) {
  Row row{.logits = std::vector<float>(40, -1e30f), .sampling = {.temperature = 0.8f, .seed = 3}};
  row.logits[33] = 60;
  for (const CpuKind& kind : cpu_kinds()) {
    const auto backend = make_cpu_backend(kind.options);
    EXPECT_EQ(draw(*backend, {row})[0].token, 33) << kind.name;
  }
}

// The report is of the model's own distribution, whatever the request makes of it.
TEST(Sample, LogProbabilitiesAreTheModels) {
  Row row{.logits = {1, 2, 3, -kInfinity}, .sampling = {.temperature = 0.2f}, .top = 4};
  row.edits = {{.token = 2, .bias = -kInfinity}, {.token = 1, .bias = -1, .seen = true},
               {.token = 1, .bias = -kInfinity}};
  Row target = row, forbidden = row;
  target.target = 1;
  forbidden.target = 3;
  const double log_sum = std::log(std::exp(1) + std::exp(2) + std::exp(3));
  for (const CpuKind& kind : cpu_kinds()) {
    const auto drawn = draw(*make_cpu_backend(kind.options), {row, target, forbidden});
    EXPECT_EQ(drawn[0].token, 0) << kind.name;
    EXPECT_NEAR(drawn[0].logprob, 1 - log_sum, 1e-6) << kind.name;
    EXPECT_EQ(drawn[0].top_token, (std::vector<Token>{2, 1, 0, -1})) << kind.name;
    EXPECT_NEAR(drawn[0].top_logprob[0], 3 - log_sum, 1e-6) << kind.name;
    EXPECT_EQ(drawn[1].token, 1) << kind.name;
    EXPECT_NEAR(drawn[1].logprob, 2 - log_sum, 1e-6) << kind.name;
    EXPECT_EQ(drawn[2].logprob, -kInfinity) << kind.name;
    row.edits.back().token = 0;  // the drawn token's own edit does not show
    row.edits.back().bias = 4;
    EXPECT_NEAR(draw(*make_cpu_backend(kind.options), {row})[0].logprob, 1 - log_sum, 1e-6);
    row.edits.back() = {.token = 1, .bias = -kInfinity};
  }
}

TEST(Sample, GreedyIgnoresFiltersAndSeed) {
  for (const CpuKind& kind : cpu_kinds()) {
    std::vector<Row> rows;
    for (uint64_t seed = 0; seed < 30; ++seed) {
      rows.push_back({.logits = random_logits(2000, 3),
                      .sampling = {.top_k = int32_t(seed), .top_p = 0.5f, .seed = seed}});
    }
    const std::vector<float>& logits = rows[0].logits;
    const auto most = std::max_element(logits.begin(), logits.end()) - logits.begin();
    for (const Drawn& drawn : draw(*make_cpu_backend(kind.options), rows)) {
      EXPECT_EQ(drawn.token, most) << kind.name;
    }
  }
}

}  // namespace
}  // namespace weir
