#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "kernels/op.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

using Random = std::mt19937_64;
constexpr int32_t kSlots = 11;

struct Config {
  std::string name;
  int32_t heads = 2, key_dim = 16, value_dim = 12, updates = 1;
  Decay decay = Decay::None;
  bool decayed_read = true, own_p = false, own_e = false, beta = true, bonus = false;
  float beta_scale = 1, scale = 0.3f;

  int32_t queries() const { return heads * key_dim; }
  int32_t keys() const { return updates * queries(); }
  int32_t answers() const { return heads * value_dim; }
  int32_t values() const { return updates * answers(); }
  int32_t decays() const {
    if (decay == Decay::None) return 0;
    return decay == Decay::PerHead ? heads : queries();
  }
  int32_t betas() const { return beta ? updates * heads : 0; }
  int64_t state_floats() const { return int64_t(answers()) * key_dim; }
};

std::vector<Config> configs() {
  return {
      {.name = "DeltaProduct", .updates = 3, .decay = Decay::PerHead, .beta_scale = 2},
      {.name = "DeltaProduct, no decay", .heads = 3, .key_dim = 33, .value_dim = 7, .updates = 2},
      {.name = "Comba", .key_dim = 40, .value_dim = 9, .decay = Decay::PerHead,
       .decayed_read = false, .own_p = true},
      {.name = "RWKV-7", .heads = 3, .key_dim = 16, .value_dim = 16, .decay = Decay::PerChannel,
       .decayed_read = false, .own_p = true, .own_e = true, .beta = false, .bonus = true,
       .scale = 1},
      {.name = "RWKV-7, wide values", .key_dim = 5, .value_dim = 21, .decay = Decay::PerChannel,
       .decayed_read = false, .own_p = true, .own_e = true, .beta = false, .bonus = true,
       .scale = 1},
      {.name = "everything", .key_dim = 17, .value_dim = 8, .updates = 5,
       .decay = Decay::PerChannel, .own_p = true, .own_e = true, .bonus = true, .beta_scale = 1.5f},
      {.name = "nothing", .heads = 1, .key_dim = 1, .value_dim = 1, .beta = false},
      {.name = "large", .heads = 1, .key_dim = 256, .value_dim = 40, .decay = Decay::PerHead,
       .own_e = true},
  };
}

std::vector<float> normal(Random& random, int64_t count, float scale, float mean = 0) {
  std::normal_distribution<float> distribution(mean, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(random);
  return values;
}

// One sequence's vectors, [tokens, channels] each.
struct Sequence {
  int32_t tokens = 0;
  std::vector<float> q, k, p, e, v, log_decay, beta;

  Sequence(const Config& c, int32_t tokens, Random& random) : tokens(tokens) {
    const float unit = 1 / std::sqrt(float(c.key_dim));  // keys about one long, as they are in use
    q = normal(random, int64_t(tokens) * c.queries(), 1);
    k = normal(random, int64_t(tokens) * c.keys(), unit);
    p = normal(random, int64_t(tokens) * c.keys(), unit);
    e = normal(random, int64_t(tokens) * c.keys(), unit);
    v = normal(random, int64_t(tokens) * c.values(), 1);
    log_decay = normal(random, int64_t(tokens) * c.decays(), 0.5f);
    for (float& g : log_decay) g = -std::fabs(g);
    beta = normal(random, int64_t(tokens) * c.betas(), 1);
  }
};

struct Setting {
  Config config;
  std::vector<float> bonus;
  std::vector<Sequence> sequences;

  Setting(const Config& c, const std::vector<int32_t>& lengths, uint64_t seed = 1) : config(c) {
    Random random(seed);
    bonus = normal(random, c.queries(), 1);
    for (const int32_t length : lengths) sequences.emplace_back(c, length, random);
  }
  std::vector<int32_t> lengths() const {
    std::vector<int32_t> lengths;
    for (const Sequence& s : sequences) lengths.push_back(s.tokens);
    return lengths;
  }
};

// Sequences through the op on one backend, each in a slot of its own among others.
class Machine {
 public:
  Machine(const Setting& setting, CpuOptions options)
      : setting_(setting),
        backend_(make_cpu_backend(options)),
        stride_(setting.config.state_floats() + 3),
        memory_(size_t(kSlots * stride_), kNan) {
    for (size_t s = 0; s < setting.sequences.size(); ++s) {
      slots_.push_back(Slot((5 * s + 2) % kSlots));
      out_.emplace_back(), bonus_out_.emplace_back();
    }
  }

  void step(const std::vector<Piece>& pieces) {
    const Config& c = setting_.config;
    const StepRows rows(pieces, slots_);
    const auto acts = [&](int32_t dim, std::vector<float> Sequence::*member) {
      StepActs made(rows.tokens(), dim);
      made.gather(pieces, [&](int32_t s) -> const std::vector<float>& {
        return setting_.sequences[size_t(s)].*member;
      });
      return made;
    };
    StepActs q = acts(c.queries(), &Sequence::q), k = acts(c.keys(), &Sequence::k);
    StepActs p = acts(c.keys(), &Sequence::p), e = acts(c.keys(), &Sequence::e);
    StepActs v = acts(c.values(), &Sequence::v), g = acts(c.decays(), &Sequence::log_decay);
    StepActs beta = acts(c.betas(), &Sequence::beta);
    StepActs out(rows.tokens(), c.answers()), bonus_out(rows.tokens(), c.answers());
    EraseStep op{.rows = rows.rows(),
                 .heads = c.heads,
                 .key_dim = c.key_dim,
                 .value_dim = c.value_dim,
                 .updates = c.updates,
                 .decay = c.decay,
                 .decayed_read = c.decayed_read,
                 .scale = c.scale,
                 .q = q.acts(),
                 .k = k.acts(),
                 .v = v.acts(),
                 .log_decay = g.acts(),
                 .beta_scale = c.beta_scale,
                 .out = out.acts(),
                 .state = {memory_.data(), stride_}};
    if (c.own_p) op.p = p.acts();
    if (c.own_e) op.e = e.acts();
    if (c.beta) op.beta = beta.acts();
    if (c.bonus) op.bonus = setting_.bonus.data(), op.bonus_out = bonus_out.acts();
    backend_->run({op});
    backend_->finish();
    int32_t t = 0;
    for (const Piece& piece : pieces) {
      for (int32_t i = 0; i < piece.count; ++i, ++t) {
        if (piece.sequence < 0) continue;
        const auto keep = [&](std::vector<float>& to, StepActs& from) {
          to.insert(to.end(), from.acts().at(t), from.acts().at(t) + c.answers());
        };
        keep(out_[size_t(piece.sequence)], out);
        if (c.bonus) keep(bonus_out_[size_t(piece.sequence)], bonus_out);
      }
    }
  }

  const std::vector<float>& out(size_t s) const { return out_[s]; }
  const std::vector<float>& bonus_out(size_t s) const { return bonus_out_[s]; }
  std::vector<float>& memory() { return memory_; }
  std::vector<float> state(size_t s) const {
    const auto from = memory_.begin() + slots_[s] * stride_;
    return {from, from + setting_.config.state_floats()};
  }

 private:
  const Setting& setting_;
  std::unique_ptr<Backend> backend_;
  int64_t stride_;
  std::vector<float> memory_;
  std::vector<Slot> slots_;
  std::vector<std::vector<float>> out_, bonus_out_;
};

// The answers in double precision, by matrices: S = S D (I - p beta e') + beta v k' with D before
// or after what is read. Nothing of it is shared with the code under test.
struct Answer {
  std::vector<double> out, bonus_out, state;
};
Answer answer(const Setting& setting, const Sequence& s) {
  const Config& c = setting.config;
  const auto K = size_t(c.key_dim), V = size_t(c.value_dim), H = size_t(c.heads);
  const auto U = size_t(c.updates);
  Answer a;
  a.out.resize(size_t(s.tokens) * H * V);
  a.bonus_out.resize(c.bonus ? a.out.size() : 0);
  for (size_t h = 0; h < H; ++h) {
    std::vector<double> S(V * K, 0.0);
    for (size_t t = 0; t < size_t(s.tokens); ++t) {
      for (size_t u = 0; u < U; ++u) {
        const size_t vector = (t * U + u) * H + h;
        const float* k = &s.k[vector * K];
        const float* p = c.own_p ? &s.p[vector * K] : k;
        const float* e = c.own_e ? &s.e[vector * K] : k;
        const double logit = c.beta ? double(s.beta[vector]) : 0;
        const double beta = c.beta_scale * (c.beta ? 0.5 * (1 + std::tanh(logit / 2)) : 1.0);
        std::vector<double> A(K * K);  // what multiplies S from the right
        for (size_t i = 0; i < K; ++i) {
          double D = 1;
          if (c.decay == Decay::PerHead && u == 0) D = std::exp(double(s.log_decay[t * H + h]));
          if (c.decay == Decay::PerChannel && u == 0) {
            D = std::exp(double(s.log_decay[(t * H + h) * K + i]));
          }
          for (size_t j = 0; j < K; ++j) {
            A[i * K + j] = (i == j ? D : 0) - (c.decayed_read ? D : 1) * p[i] * beta * e[j];
          }
        }
        std::vector<double> next(V * K, 0.0);
        for (size_t r = 0; r < V; ++r) {
          for (size_t i = 0; i < K; ++i) {
            for (size_t j = 0; j < K; ++j) next[r * K + j] += S[r * K + i] * A[i * K + j];
          }
          for (size_t j = 0; j < K; ++j) next[r * K + j] += beta * s.v[vector * V + r] * k[j];
        }
        S = next;
      }
      const size_t last = (t * U + U - 1) * H + h;
      double weight = 0;
      for (size_t i = 0; i < K && c.bonus; ++i) {
        weight += double(s.q[(t * H + h) * K + i]) * s.k[last * K + i] * setting.bonus[h * K + i];
      }
      for (size_t r = 0; r < V; ++r) {
        double& out = a.out[(t * H + h) * V + r];
        for (size_t i = 0; i < K; ++i) out += c.scale * S[r * K + i] * s.q[(t * H + h) * K + i];
        if (c.bonus) a.bonus_out[(t * H + h) * V + r] = weight * s.v[last * V + r];
      }
    }
    a.state.insert(a.state.end(), S.begin(), S.end());
  }
  return a;
}

double error(const std::vector<float>& found, const std::vector<double>& expected) {
  if (found.size() != expected.size()) return HUGE_VAL;
  double worst = 0, largest = 1e-30;
  for (size_t i = 0; i < found.size(); ++i) {
    const double gap = std::fabs(double(found[i]) - expected[i]);
    worst = std::isfinite(gap) ? std::max(worst, gap) : HUGE_VAL;
    largest = std::max(largest, std::fabs(expected[i]));
  }
  return worst / largest;
}

// Steps that advance random sequences by random counts, with padding and empty rows in between.
std::vector<std::vector<Piece>> random_steps(const std::vector<int32_t>& lengths, Random& random) {
  const auto upto = [&](int32_t most) { return int32_t(random() % uint64_t(most + 1)); };
  std::vector<int32_t> done(lengths.size(), 0);
  std::vector<std::vector<Piece>> steps;
  while (done != lengths) {
    std::vector<Piece> step;
    for (size_t s = 0; s < lengths.size(); ++s) {
      const int32_t count = std::min(upto(9), lengths[s] - done[s]);
      if (upto(3) == 0) step.push_back({-1, upto(1), upto(2)});
      if (upto(3) == 0) continue;
      step.push_back({int32_t(s), done[s], count});
      done[s] += count;
    }
    std::shuffle(step.begin(), step.end(), random);
    steps.push_back(step);
  }
  return steps;
}

constexpr double kTolerance = 1e-5;  // float32 rounding over some tens of tokens

void expect_answers(const Setting& setting, const CpuKind& kind, const Machine& machine) {
  for (size_t s = 0; s < setting.sequences.size(); ++s) {
    const Answer expected = answer(setting, setting.sequences[s]);
    EXPECT_LE(error(machine.out(s), expected.out), kTolerance)
        << setting.config.name << ", " << kind.name << ", sequence " << s;
    EXPECT_LE(error(machine.bonus_out(s), expected.bonus_out), kTolerance)
        << setting.config.name << ", " << kind.name << ", bonus of " << s;
    EXPECT_LE(error(machine.state(s), expected.state), kTolerance)
        << setting.config.name << ", " << kind.name << ", state of " << s;
  }
}

TEST(EraseStep, EveryKindFollowsTheReference) {
  for (const Config& config : configs()) {
    const Setting setting(config, {13, 1, 30, 5});
    for (const CpuKind& kind : cpu_kinds()) {
      Machine machine(setting, kind.options);
      Random random(7);
      for (const auto& step : random_steps(setting.lengths(), random)) machine.step(step);
      expect_answers(setting, kind, machine);
    }
  }
}

TEST(EraseStep, CutsDoNotShow) {
  for (const Config& config : configs()) {
    const Setting setting(config, {22, 3, 37});
    for (const CpuKind& kind : cpu_kinds()) {
      Machine whole(setting, kind.options);
      for (const auto& step : cut_evenly(setting.lengths(), 1000)) whole.step(step);
      for (const int32_t count : {1, 2, 3, 7, 8, 9}) {
        Machine cut(setting, kind.options);
        for (const auto& step : cut_evenly(setting.lengths(), count)) cut.step(step);
        for (size_t s = 0; s < setting.sequences.size(); ++s) {
          EXPECT_TRUE(same_bits(cut.out(s), whole.out(s)) &&
                      same_bits(cut.bonus_out(s), whole.bonus_out(s)) &&
                      same_bits(cut.state(s), whole.state(s)))
              << config.name << ", " << kind.name << ", " << count << " at a time";
        }
      }
    }
  }
}

TEST(EraseStep, AloneEqualsTogether) {
  for (const Config& config : configs()) {
    Setting setting(config, {9, 14, 6, 21});
    for (auto member : {&Sequence::q, &Sequence::k, &Sequence::v, &Sequence::log_decay}) {
      std::ranges::fill(setting.sequences[2].*member, kNan);  // nobody else notices
    }
    for (const CpuKind& kind : cpu_kinds()) {
      CpuOptions more = kind.options;
      if (!more.plain) more.threads = 3;
      Machine together(setting, more);
      Random random(3);
      for (const auto& step : random_steps(setting.lengths(), random)) together.step(step);
      CpuOptions one = kind.options;
      one.threads = 1;
      Machine alone(setting, one);
      for (const int32_t s : {3, 0, 1}) {
        alone.step({{s, 0, setting.sequences[size_t(s)].tokens}});
        EXPECT_TRUE(same_bits(alone.out(size_t(s)), together.out(size_t(s))) &&
                    same_bits(alone.state(size_t(s)), together.state(size_t(s))))
            << config.name << ", " << kind.name << ", sequence " << s;
      }
    }
  }
}

TEST(EraseStep, PaddingAndEmptyRowsTouchNoSlot) {
  for (const CpuKind& kind : cpu_kinds()) {
    const Setting setting(configs()[3], {8, 8});
    Machine machine(setting, kind.options);
    Random random(5);
    machine.memory() = normal(random, int64_t(machine.memory().size()), 1);
    const std::vector<float> before = machine.memory();
    machine.step({{-1, 0, 3}, {-1, 4, 0}, {0, 0, 0}, {1, 4, 0}});
    EXPECT_TRUE(same_bits(machine.memory(), before)) << kind.name;
    const std::vector<float> other = machine.state(0);
    machine.step({{1, 0, 5}});
    EXPECT_TRUE(same_bits(machine.state(0), other)) << kind.name;
    size_t changed = 0;
    for (size_t i = 0; i < before.size(); ++i) changed += machine.memory()[i] != before[i];
    EXPECT_EQ(changed, size_t(setting.config.state_floats())) << kind.name;
  }
}

// Several updates a token are as many tokens of which only the last is asked.
TEST(EraseStep, UpdatesAreTokensWithoutAnswers) {
  const Config many{.name = "updates", .heads = 1, .updates = 3};
  Config one = many;
  one.updates = 1;
  const Setting setting(many, {7});
  Setting spread(one, {21});
  const Sequence& from = setting.sequences[0];
  Sequence& to = spread.sequences[0];
  to.k = from.k, to.v = from.v, to.beta = from.beta;
  for (int32_t t = 0; t < 7; ++t) {
    std::copy_n(from.q.begin() + t * many.key_dim, many.key_dim,
                to.q.begin() + (3 * t + 2) * many.key_dim);
  }
  for (const CpuKind& kind : cpu_kinds()) {
    Machine a(setting, kind.options), b(spread, kind.options);
    a.step({{0, 0, 7}});
    b.step({{0, 0, 21}});
    EXPECT_TRUE(same_bits(a.state(0), b.state(0))) << kind.name;
    for (int32_t t = 0; t < 7; ++t) {
      EXPECT_TRUE(std::equal(a.out(0).begin() + t * many.value_dim,
                             a.out(0).begin() + (t + 1) * many.value_dim,
                             b.out(0).begin() + (3 * t + 2) * many.value_dim))
          << kind.name << ", token " << t;
    }
  }
}

TEST(EraseStep, StrongDecaysStayFinite) {
  Config config{.name = "decays", .heads = 1, .key_dim = 8, .value_dim = 8,
                .decay = Decay::PerChannel, .decayed_read = false, .own_e = true};
  Setting setting(config, {4096, 12});
  std::ranges::fill(setting.sequences[0].log_decay, -5.0f);
  std::ranges::fill(setting.sequences[1].log_decay, -3000.0f);  // beyond what exp can hold
  for (const CpuKind& kind : cpu_kinds()) {
    Machine machine(setting, kind.options);
    for (const auto& step : cut_evenly(setting.lengths(), 500)) machine.step(step);
    expect_answers(setting, kind, machine);
  }
}

}  // namespace
}  // namespace weir
