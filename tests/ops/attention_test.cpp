#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <span>

#include "kernels/op.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

using Random = std::mt19937_64;

std::vector<float> normal(Random& random, size_t count, float scale = 1) {
  std::normal_distribution<float> distribution(0, scale);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

struct Config {
  std::string name;
  int32_t heads = 4, kv_heads = 2, head_dim = 16, window = 0, page_tokens = 8;
  float rope_theta = 10000;
  bool norm = true;
  bool norm_per_head = false, forgets = false;

  int32_t queries() const { return heads * head_dim; }
  int32_t keys() const { return kv_heads * head_dim; }
};

struct Sequence {
  int32_t tokens = 0, first = 0;   // position of the first token
  std::vector<float> q, k, v;      // [tokens, channels]
  std::vector<float> forget;       // [tokens, heads]
};

struct Setting {
  Config config;
  std::vector<float> q_norm, k_norm;
  std::vector<Sequence> sequences;

  Setting(const Config& c, const std::vector<int32_t>& lengths, uint64_t seed = 1) : config(c) {
    Random random(seed);
    q_norm = normal(random, size_t(c.norm_per_head ? c.queries() : c.head_dim));
    k_norm = normal(random, size_t(c.norm_per_head ? c.keys() : c.head_dim));
    for (const int32_t tokens : lengths) {
      sequences.push_back({.tokens = tokens,
                           .q = normal(random, size_t(tokens * c.queries()), 2),
                           .k = normal(random, size_t(tokens * c.keys()), 2),
                           .v = normal(random, size_t(tokens * c.keys())),
                           .forget = normal(random, size_t(tokens * c.heads), 3)});
    }
  }
  std::vector<int32_t> lengths() const {
    std::vector<int32_t> lengths;
    for (const Sequence& s : sequences) lengths.push_back(s.tokens);
    return lengths;
  }
};

// One sequence in double precision, over keys that are all kept.
class Reference {
 public:
  Reference(const Setting& setting, const Sequence& s)
      : c_(setting.config), setting_(setting), s_(s) {}

  // Answers of tokens `from` and later.
  std::vector<double> out(int32_t from = 0) const {
    const auto d = size_t(c_.head_dim);
    std::vector<double> out;
    for (int32_t t = from; t < s_.tokens; ++t) {
      for (int32_t head = 0; head < c_.heads; ++head) {
        const auto q = head_of(s_.q, c_.queries(), t, head, setting_.q_norm);
        const int32_t kv_head = head * c_.kv_heads / c_.heads;
        std::vector<double> sum(d, 0.0);
        double total = 0, lost = 0;
        for (int32_t p = t; p >= 0; --p) {
          if (c_.window > 0 && t - p >= c_.window) continue;
          const auto k = head_of(s_.k, c_.keys(), p, kv_head, setting_.k_norm);
          const double dot = std::inner_product(q.begin(), q.end(), k.begin(), 0.0);
          const double weight = std::exp(dot / std::sqrt(double(d)) - lost);
          if (c_.forgets) lost += std::log1p(std::exp(-double(s_.forget[gate(p, head)])));
          total += weight;
          for (size_t i = 0; i < d; ++i) {
            sum[i] += weight * double(s_.v[size_t(p * c_.keys()) + size_t(kv_head) * d + i]);
          }
        }
        for (const double one : sum) out.push_back(one / total);
      }
    }
    return out;
  }

 private:
  size_t gate(int32_t token, int32_t head) const { return size_t(token * c_.heads + head); }

  std::vector<double> head_of(const std::vector<float>& x, int32_t channels, int32_t t,
                              int32_t head, const std::vector<float>& norm) const {
    const int32_t d = c_.head_dim;
    const float* const from = &x[size_t(t * channels + head * d)];
    std::vector<double> h(from, from + d);
    if (c_.norm) {
      const double mean = std::inner_product(h.begin(), h.end(), h.begin(), 0.0) / d;
      const double scale = 1 / std::sqrt(mean + 1e-5);
      for (int32_t i = 0; i < d; ++i) {
        h[size_t(i)] *= scale * double(norm[size_t(c_.norm_per_head ? head * d + i : i)]);
      }
    }
    for (int32_t i = 0; c_.rope_theta > 0 && i < d / 2; ++i) {
      const double angle = (s_.first + t) / std::pow(double(c_.rope_theta), 2.0 * i / d);
      const double a = h[size_t(i)], b = h[size_t(i + d / 2)];
      h[size_t(i)] = a * std::cos(angle) - b * std::sin(angle);
      h[size_t(i + d / 2)] = a * std::sin(angle) + b * std::cos(angle);
    }
    return h;
  }

  const Config& c_;
  const Setting& setting_;
  const Sequence& s_;
};

double relative_error(const std::vector<float>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (!std::isfinite(a[i])) return HUGE_VAL;
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

// Sequences on one backend: rings in slots, or pages dealt out in a mixed order.
class Machine {
 public:
  static constexpr int32_t kSlots = 31, kPagesPerSequence = 40;

  Machine(const Setting& setting, const CpuOptions& options)
      : setting_(setting), c_(setting.config), backend_(make_cpu_backend(options)) {
    const auto count = int32_t(setting.sequences.size());
    for (int32_t s = 0; s < count; ++s) slot_of_.push_back((s * 7 + 3) % kSlots);
    const int32_t block = c_.window > 0 ? c_.window : c_.page_tokens;
    stride_ = 2 * int64_t(block) * (c_.keys() + (c_.forgets ? c_.heads : 0)) + 9;
    const int32_t blocks = c_.window > 0 ? kSlots : count * kPagesPerSequence;
    memory_.assign(size_t(blocks * stride_), kNan);
    pages_.resize(size_t(count * kPagesPerSequence));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), Random(9));
    for (const Sequence& s : setting.sequences) {
      out_.push_back(std::vector<float>(size_t(s.tokens * c_.queries()), kNan));
    }
  }

  void step(const std::vector<Piece>& pieces) {
    StepRows rows(pieces, slot_of_);
    std::vector<int32_t> table;
    for (size_t r = 0; r < pieces.size(); ++r) {
      const int32_t s = std::max(0, pieces[r].sequence);
      const auto begin = pages_.begin() + s * kPagesPerSequence;
      table.insert(table.end(), begin, begin + kPagesPerSequence);
      if (pieces[r].sequence >= 0) rows.first[r] += setting_.sequences[size_t(s)].first;
    }
    StepActs q(rows.tokens(), c_.queries()), k(rows.tokens(), c_.keys()),
        v(rows.tokens(), c_.keys()), forget(rows.tokens(), c_.heads),
        out(rows.tokens(), c_.queries());
    const auto gather = [&](StepActs& acts, std::vector<float> Sequence::*of) {
      acts.gather(pieces, [&](int32_t s) -> const std::vector<float>& {
        return setting_.sequences[size_t(s)].*of;
      });
    };
    gather(q, &Sequence::q);
    gather(k, &Sequence::k);
    gather(v, &Sequence::v);
    gather(forget, &Sequence::forget);
    Attention op{.rows = rows.rows(), .heads = c_.heads, .kv_heads = c_.kv_heads,
                 .head_dim = c_.head_dim, .window = c_.window, .rope_theta = c_.rope_theta,
                 .norm_per_head = c_.norm_per_head, .norm_eps = 1e-5f, .q = q.acts(),
                 .k = k.acts(), .v = v.acts(), .forgets = c_.forgets, .out = out.acts()};
    if (c_.forgets) op.forget = forget.acts();
    if (c_.norm) op.q_norm = setting_.q_norm.data();
    if (c_.norm) op.k_norm = setting_.k_norm.data();
    if (c_.window > 0) {
      op.ring = {memory_.data(), stride_};
    } else {
      op.pages = memory_.data();
      op.page_stride = stride_;
      op.page_tokens = c_.page_tokens;
      op.page_table = table.data();
      op.pages_per_row = kPagesPerSequence;
    }
    backend_->run({op});
    scatter(pieces, out);
  }

  const std::vector<float>& out(size_t sequence) const { return out_[sequence]; }
  std::vector<float>& memory() { return memory_; }

 private:
  void scatter(const std::vector<Piece>& pieces, StepActs& out) {
    int64_t t = 0;
    for (const Piece& piece : pieces) {
      for (int32_t i = 0; i < piece.count; ++i, ++t) {
        const float* const from = out.acts().at(t);
        for (int32_t j = 0; j < c_.queries() + StepActs::kGap; ++j) {
          if (piece.sequence < 0 || j >= c_.queries()) {
            ASSERT_TRUE(std::isnan(from[j]));
          } else {
            out_[size_t(piece.sequence)][size_t((piece.first + i) * c_.queries() + j)] = from[j];
          }
        }
      }
    }
  }

  const Setting& setting_;
  const Config& c_;
  std::unique_ptr<Backend> backend_;
  int64_t stride_ = 0;
  std::vector<Slot> slot_of_;
  std::vector<int32_t> pages_;
  std::vector<float> memory_;
  std::vector<std::vector<float>> out_;
};

std::vector<Config> configs() {
  return {{.name = "pages"},
          {.name = "pages of 3, MHA, no norm", .heads = 3, .kv_heads = 3, .head_dim = 40,
           .page_tokens = 3, .norm = false},
          {.name = "no positions, one kv head", .heads = 6, .kv_heads = 1, .head_dim = 128,
           .page_tokens = 64, .rope_theta = 0},
          {.name = "odd head", .heads = 2, .kv_heads = 1, .head_dim = 13, .rope_theta = 0},
          {.name = "pages of 1", .heads = 2, .kv_heads = 2, .head_dim = 6, .page_tokens = 16},
          {.name = "forgetting", .rope_theta = 0, .norm_per_head = true, .forgets = true},
          {.name = "forgetting, pages of 3, one kv head", .heads = 3, .kv_heads = 1,
           .head_dim = 11, .page_tokens = 3, .rope_theta = 0, .norm = false, .forgets = true},
          {.name = "forgetting in a ring of 6", .heads = 6, .kv_heads = 3, .window = 6,
           .forgets = true},
          {.name = "forgetting in a ring of 1", .window = 1, .forgets = true},
          {.name = "ring of 1", .window = 1},
          {.name = "ring of 5", .window = 5},
          {.name = "ring of 64", .head_dim = 64, .window = 64, .rope_theta = 500},
          {.name = "ring of 70", .heads = 2, .kv_heads = 1, .head_dim = 34, .window = 70}};
}

TEST(Attention, FollowsTheReference) {
  for (const Config& config : configs()) {
    const Setting setting(config, {17, 1, 90, 66});
    for (const CpuKind& kind : cpu_kinds()) {
      Machine machine(setting, kind.options);
      for (auto step : cut_evenly(setting.lengths(), 11)) {
        step.insert(step.begin() + 1, {-1, 0, 2});
        step.push_back({-1, 3, 0});
        machine.step(step);
      }
      for (size_t s = 0; s < setting.sequences.size(); ++s) {
        EXPECT_LE(relative_error(machine.out(s), Reference(setting, setting.sequences[s]).out()),
                  5e-6)
            << config.name << ", " << kind.name << ", sequence " << s;
      }
    }
  }
}

// In a ring a chunk's own keys push out the ones that its first tokens still need.
TEST(Attention, CutsDoNotShow) {
  for (const Config& config : configs()) {
    const Setting setting(config, {20, 75, 3});
    for (const CpuKind& kind : cpu_kinds()) {
      Machine whole(setting, kind.options);
      whole.step({{0, 0, 20}, {1, 0, 75}, {2, 0, 3}});
      for (const int32_t count : {1, 2, 3, 7, 50}) {
        Machine cut(setting, kind.options);
        for (const auto& step : cut_evenly(setting.lengths(), count)) cut.step(step);
        for (size_t s = 0; s < setting.sequences.size(); ++s) {
          EXPECT_TRUE(same_bits(cut.out(s), whole.out(s)))
              << config.name << ", " << kind.name << ", " << count << " at a time";
        }
        EXPECT_TRUE(same_bits(cut.memory(), whole.memory())) << config.name << ", " << kind.name;
      }
    }
  }
}

TEST(Attention, AloneEqualsTogether) {
  for (const Config& config : configs()) {
    Setting setting(config, {30, 12, 80, 9});
    std::fill(setting.sequences[1].k.begin(), setting.sequences[1].k.end(), kNan);
    std::fill(setting.sequences[1].q.begin(), setting.sequences[1].q.end(), HUGE_VALF);
    for (const CpuKind& kind : cpu_kinds()) {
      CpuOptions more = kind.options, one = kind.options;
      if (!more.plain) more.threads = 3;
      one.threads = 1;
      Machine together(setting, more), permuted(setting, kind.options), alone(setting, one);
      together.step({{0, 0, 30}, {1, 0, 12}, {2, 0, 80}, {3, 0, 9}});
      permuted.step({{3, 0, 9}, {2, 0, 80}, {-1, 7, 1}, {0, 0, 30}, {1, 0, 12}});
      for (const int32_t s : {2, 0, 3}) {
        alone.step({{s, 0, setting.sequences[size_t(s)].tokens}});
        EXPECT_TRUE(same_bits(alone.out(size_t(s)), together.out(size_t(s))) &&
                    same_bits(permuted.out(size_t(s)), together.out(size_t(s))))
            << config.name << ", " << kind.name << ", sequence " << s;
      }
    }
  }
}

TEST(Attention, PaddingAndEmptyRowsTouchNothing) {
  for (const Config& config : configs()) {
    const Setting setting(config, {4, 4});
    for (const CpuKind& kind : cpu_kinds()) {
      Machine machine(setting, kind.options);
      const std::vector<float> before = machine.memory();
      machine.step({{-1, 0, 3}, {0, 0, 0}, {-1, 5, 0}, {1, 2, 0}});
      EXPECT_TRUE(same_bits(machine.memory(), before)) << config.name << ", " << kind.name;
    }
  }
}

// float32 angles are off by some hundredths this far out.
TEST(Attention, AnglesAreExactAtFarPositions) {
  const Config config{.name = "far", .heads = 2, .kv_heads = 1, .window = 12, .norm = false};
  Setting setting(config, {30});
  setting.sequences[0].first = 12 * 87381;  // a multiple of the window: the ring begins at 0
  for (const CpuKind& kind : cpu_kinds()) {
    Machine machine(setting, kind.options);
    std::fill(machine.memory().begin(), machine.memory().end(), 0.0f);
    machine.step({{0, 0, 30}});
    // Before the first token the ring holds zeros here, which the reference does not see.
    const std::vector<double> all = Reference(setting, setting.sequences[0]).out();
    const auto skipped = size_t(12 * config.queries());
    EXPECT_LE(relative_error({machine.out(0).begin() + int64_t(skipped), machine.out(0).end()},
                             {all.begin() + int64_t(skipped), all.end()}),
              5e-6)
        << kind.name;
  }
}

// Sums of log gates grow without end, and their differences must stay right: a sum kept as float32
// is off by 0.03 here, and by 0.001 with gates of -5.
TEST(Attention, ForgettingIsExactAfterStrongGates) {
  for (const float strong : {-5.0f, -400.0f}) {
    const int32_t tokens = strong < -5 ? 2100 : 4300, after = 150;
    const Config config{.name = "long", .heads = 1, .kv_heads = 1, .head_dim = 4,
                        .page_tokens = 128, .rope_theta = 0, .norm = false, .forgets = true};
    Setting setting(config, {tokens});
    std::vector<float>& forget = setting.sequences[0].forget;
    std::fill(forget.begin(), forget.end() - 2 * after, strong);
    for (float& gate : std::span(forget).last(2 * after)) gate += 5;
    const std::vector<double> expected = Reference(setting, setting.sequences[0]).out(tokens - 100);
    for (const CpuKind& kind : cpu_kinds()) {
      Machine machine(setting, kind.options);
      for (const auto& step : cut_evenly(setting.lengths(), 512)) machine.step(step);
      for (const float one : machine.out(0)) ASSERT_TRUE(std::isfinite(one)) << kind.name;
      const auto from = machine.out(0).end() - int64_t(expected.size());
      EXPECT_LE(relative_error({from, machine.out(0).end()}, expected), 2e-6)
          << kind.name << ", gates of " << strong;
    }
  }
}

// Gates that let everything through are no gates.
TEST(Attention, OpenForgetGatesChangeNothing) {
  Config config{.name = "open", .page_tokens = 5, .norm = false, .forgets = true};
  Setting setting(config, {70});
  std::fill(setting.sequences[0].forget.begin(), setting.sequences[0].forget.end(), 200.0f);
  config.forgets = false;
  const Setting without(config, {70});
  for (const CpuKind& kind : cpu_kinds()) {
    Machine gated(setting, kind.options), plain(without, kind.options);
    gated.step({{0, 0, 70}});
    plain.step({{0, 0, 70}});
    EXPECT_TRUE(same_bits(gated.out(0), plain.out(0))) << kind.name;
  }
}

// Scores that no float32 exponential holds.
TEST(Attention, LargeScoresStayFinite) {
  const Config config{.name = "large", .norm = false};
  Setting setting(config, {100});
  for (float& one : setting.sequences[0].q) one *= 50;
  for (float& one : setting.sequences[0].k) one *= 50;
  Machine plain(setting, {.plain = true});
  plain.step({{0, 0, 100}});
  const std::vector<double> expected(plain.out(0).begin(), plain.out(0).end());
  for (const CpuKind& kind : cpu_kinds()) {
    Machine machine(setting, kind.options);
    machine.step({{0, 0, 100}});
    EXPECT_LE(relative_error(machine.out(0), expected), 1e-2) << kind.name;
  }
}

}  // namespace
}  // namespace weir
