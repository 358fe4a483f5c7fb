#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "kernels/op.h"
#include "tests/ops/delta_reference.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

constexpr float kNormEps = 1e-5f;
constexpr int32_t kSlots = 31;

// Sequences through one mixer on one backend, each in a slot of its own among others.
class Machine {
 public:
  Machine(const DeltaConfig& config, const DeltaParameters& parameters,
          const std::vector<DeltaSequence>& sequences, const CpuOptions& options)
      : c_(config), p_(parameters), sequences_(sequences), backend_(make_cpu_backend(options)),
        stride_(int64_t(config.state_floats() + config.history_floats()) + 7) {
    const auto count = int32_t(sequences.size());
    for (int32_t s = 0; s < count; ++s) slot_of_.push_back((s * 7 + 3) % kSlots);
    memory_.assign(size_t(kSlots * stride_), kNan);  // a fresh row reads none of it
    for (const DeltaSequence& s : sequences) {
      out_.push_back(std::vector<float>(size_t(s.tokens) * size_t(config.values()), kNan));
    }
    emitted_ = out_;
  }

  void step(const std::vector<Piece>& pieces) {
    const StepRows rows(pieces, slot_of_);
    const int32_t tokens = rows.tokens();
    const auto gathered = [&](int32_t dim, std::vector<float> DeltaSequence::*of) {
      StepActs acts(tokens, dim);
      acts.gather(pieces, [&](int32_t s) -> const std::vector<float>& {
        return sequences_[size_t(s)].*of;
      });
      return acts;
    };
    StepActs q = gathered(c_.keys(), &DeltaSequence::q), k = gathered(c_.keys(), &DeltaSequence::k);
    StepActs v = gathered(c_.values(), &DeltaSequence::v);
    StepActs decay = gathered(c_.decay_channels(), &DeltaSequence::decay);
    StepActs beta = gathered(c_.value_heads, &DeltaSequence::beta);
    StepActs erase = gathered(c_.keys(), &DeltaSequence::erase);
    StepActs write = gathered(c_.values(), &DeltaSequence::write);
    StepActs gate = gathered(c_.values(), &DeltaSequence::gate), out(tokens, c_.values());
    DeltaMix op = base();
    op.rows = rows.rows();
    op.q = q.acts();
    op.k = k.acts();
    op.v = v.acts();
    if (c_.decay != Decay::None) op.decay_in = decay.acts();
    if (c_.beta && !c_.erase) op.beta = beta.acts();
    if (c_.erase) op.erase = erase.acts();
    if (c_.erase) op.write = write.acts();
    if (c_.gate) op.gate = gate.acts();
    op.out = out.acts();
    StepActs add = gathered(c_.routed ? c_.values() : 0, &DeltaSequence::answer_add);
    StepActs emitted(tokens, c_.values());
    if (c_.routed) op.answer_add = add.acts();
    if (c_.routed) op.emitted = emitted.acts();
    backend_->run({op});
    scatter(pieces, out, out_);
    if (c_.routed) scatter(pieces, emitted, emitted_);
  }

  const std::vector<float>& out(size_t sequence) const { return out_[sequence]; }
  const std::vector<float>& emitted(size_t sequence) const { return emitted_[sequence]; }
  std::vector<float> state(size_t sequence) const {
    const float* const at = memory_.data() + slot_of_[sequence] * stride_;
    return {at, at + c_.state_floats()};
  }
  // State, history and what lies behind them.
  std::vector<float> slot(size_t sequence) const {
    const float* const at = memory_.data() + slot_of_[sequence] * stride_;
    return {at, at + stride_};
  }
  std::vector<float>& memory() { return memory_; }

 private:
  DeltaMix base() {
    DeltaMix op{.key_heads = c_.key_heads, .value_heads = c_.value_heads, .key_dim = c_.key_dim,
                .value_dim = c_.value_dim, .conv_width = c_.conv_width,
                .qk_activation = c_.qk_activation, .qk_norm = c_.qk_norm, .decay = c_.decay,
                .decay_heads = c_.decay_heads, .decay_a = p_.decay_a.data(),
                .dt_bias = p_.dt_bias.data(), .lower_bound = c_.lower_bound,
                .beta_scale = c_.beta_scale, .erases = c_.erases,
                .norm_weight = p_.norm.data(), .norm_eps = kNormEps,
                .gate_activation = c_.gate_activation, .values_ready = c_.routed,
                .emits = c_.routed, .state = {memory_.data(), stride_}};
    if (c_.conv_width > 0) {
      op.conv_q = p_.conv_q.data();
      op.conv_k = p_.conv_k.data();
      op.conv_v = p_.conv_v.data();
    }
    if (c_.conv_bias) {
      op.conv_q_bias = p_.bias_q.data();
      op.conv_k_bias = p_.bias_k.data();
      op.conv_v_bias = p_.bias_v.data();
    }
    if (c_.conv_width > 1) op.history = op.state.from(int64_t(c_.state_floats()));
    return op;
  }

  // Outputs to their sequences; padding rows and the gaps must still be NaN.
  void scatter(const std::vector<Piece>& pieces, StepActs& out,
               std::vector<std::vector<float>>& to) {
    int64_t t = 0;
    for (const Piece& piece : pieces) {
      for (int32_t i = 0; i < piece.count; ++i, ++t) {
        const float* const from = out.acts().at(t);
        for (int32_t j = 0; j < c_.values() + StepActs::kGap; ++j) {
          if (piece.sequence < 0 || j >= c_.values()) {
            ASSERT_TRUE(std::isnan(from[j]));
          } else {
            to[size_t(piece.sequence)][size_t((piece.first + i) * c_.values() + j)] = from[j];
          }
        }
      }
    }
  }

  const DeltaConfig c_;
  const DeltaParameters& p_;
  const std::vector<DeltaSequence>& sequences_;
  std::unique_ptr<Backend> backend_;
  int64_t stride_;
  std::vector<Slot> slot_of_;
  std::vector<float> memory_;
  std::vector<std::vector<float>> out_, emitted_;
};

struct Setting {
  DeltaConfig config;
  DeltaParameters parameters;
  std::vector<DeltaSequence> sequences;

  Setting(const DeltaConfig& c, const std::vector<int32_t>& lengths, uint64_t seed = 1)
      : Setting(c, lengths, Random(seed)) {}
  std::vector<int32_t> lengths() const {
    std::vector<int32_t> lengths;
    for (const DeltaSequence& s : sequences) lengths.push_back(s.tokens);
    return lengths;
  }

 private:
  Setting(const DeltaConfig& c, const std::vector<int32_t>& lengths, Random random)
      : config(c), parameters(c, random) {
    for (const int32_t length : lengths) sequences.emplace_back(c, length, random);
  }
};

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
      if (upto(3) > 0) {
        step.push_back({int32_t(s), done[s], count});
        done[s] += count;
      }
    }
    std::shuffle(step.begin(), step.end(), random);
    steps.push_back(step);
  }
  return steps;
}

std::vector<DeltaConfig> configs() {
  return {
      {.name = "GDN"},
      {.name = "DeltaNet", .decay = Decay::None, .gate = false},
      {.name = "KDA", .key_dim = 24, .decay = Decay::PerChannel, .beta_scale = 2,
       .gate_activation = Activation::Sigmoid},
      {.name = "KDA, bounded", .value_dim = 20, .decay = Decay::PerChannel, .lower_bound = -5},
      {.name = "GDN-2", .key_heads = 2, .value_heads = 4, .decay = Decay::PerChannel,
       .decay_heads = 2, .erase = true, .beta_scale = 2, .gate_activation = Activation::Sigmoid},
      {.name = "GVA", .key_heads = 2, .value_heads = 6, .key_dim = 33, .value_dim = 7,
       .decay_heads = 6},
      {.name = "GDN, bounded", .lower_bound = -3, .beta_scale = 2},
      {.name = "no beta, no conv", .conv_width = 0, .decay = Decay::None, .beta = false},
      {.name = "width 1, bias", .key_dim = 5, .conv_width = 1, .conv_bias = true},
      {.name = "width 2", .value_dim = 1, .conv_width = 2},
      {.name = "width 3, elu sum", .conv_width = 3, .conv_bias = true,
       .qk_activation = Activation::EluPlusOne, .qk_norm = QkNorm::Sum, .decay = Decay::None},
      {.name = "width 5, relu", .key_dim = 40, .conv_width = 5,
       .qk_activation = Activation::Relu},
      {.name = "width 11, bias", .key_dim = 1, .conv_width = 11, .conv_bias = true,
       .qk_activation = Activation::None},
      {.name = "additive", .decay = Decay::None, .gate = false, .erases = false},
      {.name = "decaying and additive", .conv_width = 2, .qk_norm = QkNorm::L2Max, .erases = false},
      {.name = "routed GDN", .value_heads = 4, .value_dim = 11, .decay_heads = 4, .routed = true},
      {.name = "routed GDN-2", .value_heads = 4, .decay = Decay::PerChannel, .erase = true,
       .routed = true},
      {.name = "one head", .key_heads = 1, .value_heads = 1, .key_dim = 64, .value_dim = 32,
       .decay_heads = 1},
  };
}

// float32 rounding, summed over some tens of tokens of a recurrence; measured below 2e-6.
constexpr double kTolerance = 1e-5;

void expect_reference(const Setting& setting, const CpuKind& kind, const Machine& machine) {
  for (size_t s = 0; s < setting.sequences.size(); ++s) {
    const DeltaAnswer answer =
        DeltaReference(setting.config, setting.parameters, setting.sequences[s]).answer();
    EXPECT_LE(relative_error(machine.out(s), answer.out), kTolerance)
        << setting.config.name << ", " << kind.name << ", sequence " << s;
    EXPECT_LE(relative_error(machine.state(s), answer.state), kTolerance)
        << setting.config.name << ", " << kind.name << ", state of " << s;
    if (!setting.config.routed) continue;
    EXPECT_LE(relative_error(machine.emitted(s), answer.emitted), kTolerance)
        << setting.config.name << ", " << kind.name << ", residuals of " << s;
  }
}

TEST(DeltaMix, EveryKindOfMixerFollowsTheReference) {
  for (const DeltaConfig& config : configs()) {
    const Setting setting(config, {23, 1, 40, 5, 12});
    for (const CpuKind& kind : cpu_kinds()) {
      Machine machine(config, setting.parameters, setting.sequences, kind.options);
      Random random(7);
      for (const auto& step : random_steps(setting.lengths(), random)) machine.step(step);
      expect_reference(setting, kind, machine);
    }
  }
}

TEST(DeltaMix, EverySizeFollowsTheReference) {
  for (const auto& [K, V] : {std::pair{32, 32}, {64, 128}, {96, 192}, {128, 128}, {256, 40},
                             {20, 256}, {512, 12}, {1, 1}, {3, 512}, {17, 13}}) {
    const DeltaConfig config{.name = std::to_string(K) + " x " + std::to_string(V),
                             .key_heads = 1, .value_heads = 1, .key_dim = K, .value_dim = V,
                             .decay = Decay::PerChannel, .decay_heads = 1};
    const Setting setting(config, {5, 11});
    for (const CpuKind& kind : cpu_kinds()) {
      Machine machine(config, setting.parameters, setting.sequences, kind.options);
      for (const auto& step : cut_evenly(setting.lengths(), 4)) machine.step(step);
      expect_reference(setting, kind, machine);
    }
  }
}

// What a cut at the wrong place loses first: the inputs that the convolution still needs.
TEST(DeltaMix, CutsDoNotShow) {
  for (const DeltaConfig& config : configs()) {
    const Setting setting(config, {22, 3, 37});
    for (const CpuKind& kind : cpu_kinds()) {
      Machine whole(config, setting.parameters, setting.sequences, kind.options);
      for (const auto& step : cut_evenly(setting.lengths(), 1000)) whole.step(step);
      for (const int32_t count : {1, 2, 3, 7, 8, 9, 16}) {
        Machine cut(config, setting.parameters, setting.sequences, kind.options);
        for (const auto& step : cut_evenly(setting.lengths(), count)) cut.step(step);
        for (size_t s = 0; s < setting.sequences.size(); ++s) {
          EXPECT_TRUE(same_bits(cut.out(s), whole.out(s)) &&
                      same_bits(cut.emitted(s), whole.emitted(s)) &&
                      same_bits(cut.slot(s), whole.slot(s)))
              << config.name << ", " << kind.name << ", " << count << " at a time";
        }
      }
    }
  }
}

TEST(DeltaMix, AloneEqualsTogether) {
  for (const DeltaConfig& config : configs()) {
    Setting setting(config, {9, 14, 6, 21});
    std::fill(setting.sequences[2].q.begin(), setting.sequences[2].q.end(), kNan);
    std::fill(setting.sequences[2].v.begin(), setting.sequences[2].v.end(), HUGE_VALF);
    for (const CpuKind& kind : cpu_kinds()) {
      CpuOptions more = kind.options;
      if (!more.plain) more.threads = 3;
      Machine together(config, setting.parameters, setting.sequences, more);
      Random random(3);
      for (const auto& step : random_steps(setting.lengths(), random)) together.step(step);
      CpuOptions one = kind.options;
      one.threads = 1;
      Machine alone(config, setting.parameters, setting.sequences, one);
      for (const int32_t s : {3, 0, 1}) {
        alone.step({{s, 0, setting.sequences[size_t(s)].tokens}});
        EXPECT_TRUE(same_bits(alone.out(size_t(s)), together.out(size_t(s))) &&
                    same_bits(alone.slot(size_t(s)), together.slot(size_t(s))))
            << config.name << ", " << kind.name << ", sequence " << s;
      }
    }
  }
}

TEST(DeltaMix, TouchesTheSlotsOfItsRowsAlone) {
  const DeltaConfig config{.name = "GDN"};
  const Setting setting(config, {8, 8, 8});
  for (const CpuKind& kind : cpu_kinds()) {
    Machine machine(config, setting.parameters, setting.sequences, kind.options);
    Random random(5);
    machine.memory() = normal(random, machine.memory().size());
    const std::vector<float> before = machine.memory();
    machine.step({{-1, 0, 3}, {-1, 4, 0}, {0, 0, 0}, {1, 4, 0}});
    EXPECT_TRUE(same_bits(machine.memory(), before)) << "padding and empty rows, " << kind.name;
    const std::vector<float> slots[] = {machine.slot(0), machine.slot(1), machine.slot(2)};
    machine.step({{1, 0, 5}});
    EXPECT_TRUE(same_bits(machine.slot(0), slots[0])) << kind.name;
    EXPECT_FALSE(same_bits(machine.slot(1), slots[1])) << kind.name;
    EXPECT_TRUE(same_bits(machine.slot(2), slots[2])) << kind.name;
    size_t changed = 0;
    for (size_t i = 0; i < before.size(); ++i) changed += machine.memory()[i] != before[i];
    EXPECT_LE(changed, config.state_floats() + config.history_floats()) << kind.name;
  }
}

TEST(DeltaMix, StrongDecaysStayFinite) {
  DeltaConfig config{.name = "decays", .key_heads = 1, .value_heads = 1, .key_dim = 8,
                     .value_dim = 8, .decay = Decay::PerChannel, .decay_heads = 1};
  Setting setting(config, {4096, 9});
  setting.parameters.decay_a[0] = 1;
  std::fill(setting.parameters.dt_bias.begin(), setting.parameters.dt_bias.end(), 0.0f);
  DeltaSequence &steady = setting.sequences[0], &sudden = setting.sequences[1];
  std::fill(steady.decay.begin(), steady.decay.end(), 5.0f);      // g about -5 a token
  std::fill(sudden.decay.begin(), sudden.decay.end(), -8.0f);
  std::fill_n(sudden.decay.begin() + 4 * 8, 8, 80.0f);            // g = -80 at once
  std::fill_n(sudden.decay.begin() + 7 * 8, 8, 3000.0f);          // and beyond what exp can hold
  for (const CpuKind& kind : cpu_kinds()) {
    Machine machine(config, setting.parameters, setting.sequences, kind.options);
    for (const auto& step : cut_evenly(setting.lengths(), 500)) machine.step(step);
    expect_reference(setting, kind, machine);
  }
}

TEST(DeltaMix, ZeroKeysAreNotDividedByZero) {
  const DeltaConfig config{.name = "zeros", .conv_width = 0};
  Setting setting(config, {4});
  std::fill(setting.sequences[0].q.begin(), setting.sequences[0].q.end(), 0.0f);
  std::fill(setting.sequences[0].k.begin(), setting.sequences[0].k.end(), 0.0f);
  for (const CpuKind& kind : cpu_kinds()) {
    Machine machine(config, setting.parameters, setting.sequences, kind.options);
    machine.step({{0, 0, 4}});
    for (const float one : machine.out(0)) EXPECT_EQ(one, 0.0f) << kind.name;
  }
}

// Runs two mixers over the same sequences and says how far apart their answers are.
double apart(const Setting& a, const DeltaConfig& config_b, const Setting& b, const CpuKind& kind) {
  Machine one(a.config, a.parameters, a.sequences, kind.options);
  Machine other(config_b, b.parameters, b.sequences, kind.options);
  one.step({{0, 0, a.sequences[0].tokens}});
  other.step({{0, 0, a.sequences[0].tokens}});
  return relative_error(one.out(0), {other.out(0).begin(), other.out(0).end()});
}

TEST(DeltaMix, WithoutDecayGdnIsDeltaNet) {
  Setting gdn({.name = "GDN"}, {30});
  std::fill(gdn.parameters.decay_a.begin(), gdn.parameters.decay_a.end(), 0.0f);
  DeltaConfig delta_net = gdn.config;
  delta_net.decay = Decay::None;
  for (const CpuKind& kind : cpu_kinds()) EXPECT_EQ(apart(gdn, delta_net, gdn, kind), 0);
}

TEST(DeltaMix, WithEqualChannelsKdaIsGdn) {
  Setting gdn({.name = "GDN"}, {30}), kda = gdn;
  kda.config.decay = Decay::PerChannel;
  const auto repeat = [&](std::vector<float>& x) {
    std::vector<float> wide;
    for (const float one : x) wide.insert(wide.end(), size_t(gdn.config.key_dim), one);
    x = wide;
  };
  repeat(kda.parameters.dt_bias);
  repeat(kda.sequences[0].decay);
  for (const CpuKind& kind : cpu_kinds()) EXPECT_LE(apart(gdn, kda.config, kda, kind), 1e-6);
}

TEST(DeltaMix, WithEqualGatesGdn2IsKda) {
  Setting kda({.name = "KDA", .decay = Decay::PerChannel}, {30}), gdn2 = kda;
  gdn2.config.erase = true;
  const DeltaConfig& c = kda.config;
  for (int32_t t = 0; t < 30; ++t) {
    for (int32_t head = 0; head < c.value_heads; ++head) {
      const float beta = kda.sequences[0].beta[size_t(t * c.value_heads + head)];
      std::fill_n(&gdn2.sequences[0].erase[size_t(t * c.keys() + head * c.key_dim)], c.key_dim,
                  beta);
      std::fill_n(&gdn2.sequences[0].write[size_t(t * c.values() + head * c.value_dim)],
                  c.value_dim, beta);
    }
  }
  for (const CpuKind& kind : cpu_kinds()) EXPECT_LE(apart(kda, gdn2.config, gdn2, kind), 1e-6);
}

}  // namespace
}  // namespace weir
