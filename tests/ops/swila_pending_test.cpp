// SwilaMix with deferred writes (pending.h) against itself without.
#include <gtest/gtest.h>

#include "kernels/op.h"
#include "tests/ops/mixer_step.h"

namespace weir {
namespace {

constexpr int32_t kHeads = 5, J = 3, D = 6, kWidth = 3;  // more heads than there are turns
constexpr int32_t kChannels = kHeads * D, kMixed = kChannels * J;
constexpr int32_t kSequences = 4, kTokens = 60, kSlots = kSequences + 1;
constexpr double kRounding = 1e-5;

struct Kind {
  bool gated = false, temporal = false;
};
constexpr Kind kKinds[] = {{}, {.temporal = true}, {.gated = true}, {true, true}};

// What all sequences are fed, and the weights.
struct Inputs {
  // Acts of the op, each with its vectors' dim.
  static constexpr std::pair<Acts SwilaMix::*, int32_t> kActs[] = {
      {&SwilaMix::q, kChannels}, {&SwilaMix::k, kChannels}, {&SwilaMix::v, kChannels},
      {&SwilaMix::key_router, kMixed}, {&SwilaMix::query_router, kMixed},
      {&SwilaMix::beta, kMixed}, {&SwilaMix::key_mix, kChannels},
      {&SwilaMix::query_mix, kChannels}, {&SwilaMix::decay_in, kMixed}};
  static constexpr size_t kCount = std::size(kActs);

  std::vector<float> vectors[kCount][kSequences];
  std::vector<float> taps = normal(size_t(kChannels * kWidth), 1), norm = normal(D, 2);
  std::vector<float> a = normal(kHeads * J, 3), dt_bias = normal(kMixed, 4);

  Inputs() {
    for (size_t i = 0; i < kCount; ++i) {
      for (uint64_t s = 0; s < kSequences; ++s) {
        vectors[i][s] = normal(size_t(kTokens * kActs[i].second), 10 + i * kSequences + s);
      }
    }
    for (float& one : a) one = std::exp(one - 2);
  }
};

// Slots of all sequences, and what is said of the tokens that are in their states.
struct Memory {
  static constexpr int32_t kState = kMixed * D, kHistory = 3 * kChannels * (kWidth - 1);

  explicit Memory(const Kind& kind)
      : waits(pending_layout(SwilaMix{.mixtures = J, .dim = D, .gated = kind.gated}).floats()),
        stride(kState + 2 * kMixed + kHistory + kHeads * waits + 3),
        floats(size_t(kSlots * stride), kNan) {}

  int32_t waits, stride;
  std::vector<float> floats;
  std::vector<int32_t> written = std::vector<int32_t>(kSequences, 0);

  SlotState part(int64_t offset) { return {floats.data() + offset, stride}; }
  SlotState pending() { return part(kState + 2 * kMixed + kHistory); }
  Slot slot(int32_t sequence) const { return kSlots - 1 - sequence; }
  std::vector<float> kept(int32_t sequence) const {
    const auto at = floats.begin() + slot(sequence) * stride;
    return {at, at + kState};
  }
};

double apart(const std::vector<float>& x, const std::vector<float>& y) {
  double most = 0, largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) != std::isnan(y[i])) return HUGE_VAL;
    if (std::isnan(x[i])) continue;
    most = std::max(most, std::fabs(double(x[i]) - double(y[i])));
    largest = std::max(largest, std::fabs(double(y[i])));
  }
  return largest > 0 ? most / largest : 0;
}

class Runner {
 public:
  Runner(const Kind& kind, const CpuOptions& options)
      : kind_(kind), backend_(make_cpu_backend(options)) {}

  // The answers of a step.
  std::vector<float> step(const std::vector<Piece>& pieces, Memory& memory, bool defers) {
    Placed placed(pieces, memory);
    SwilaMix op{.rows = placed.rows(), .heads = kHeads, .mixtures = J, .dim = D,
                .conv_width = kWidth, .conv_q = in_.taps.data(), .conv_k = in_.taps.data(),
                .conv_v = in_.taps.data(), .gated = kind_.gated, .decay_a = in_.a.data(),
                .dt_bias = in_.dt_bias.data(), .norm_weight = in_.norm.data(), .norm_eps = 1e-5f,
                .state = memory.part(0), .history = memory.part(Memory::kState + 2 * kMixed)};
    std::vector<StepActs> acts;
    for (size_t i = 0; i < Inputs::kCount; ++i) {
      const auto& [member, dim] = Inputs::kActs[i];
      acts.emplace_back(op.rows.tokens, dim);
      acts.back().gather(pieces, [&](int32_t s) -> const auto& { return in_.vectors[i][s]; });
      const bool mixes = member == &SwilaMix::key_mix || member == &SwilaMix::query_mix;
      if (!mixes || kind_.temporal) op.*member = acts.back().acts();
    }
    if (kind_.temporal) {
      op.posterior = memory.part(Memory::kState);
      op.prior = memory.part(Memory::kState + kMixed);
    }
    StepActs out(op.rows.tokens, kChannels);
    op.out = out.acts();
    if (defers) op.pending = memory.pending();
    backend_->run({op});
    backend_->finish();
    for (const Piece& piece : pieces) {
      if (piece.count > 1) memory.written[size_t(piece.sequence)] = piece.first + piece.count;
    }
    return out.values();
  }

  void flush(const std::vector<Piece>& pieces, Memory& memory) {
    Placed placed(pieces, memory);
    backend_->run({FlushPending{
        .rows = placed.rows(), .heads = kHeads,
        .layout = pending_layout(SwilaMix{.mixtures = J, .dim = D, .gated = kind_.gated}),
        .state = memory.part(0), .pending = memory.pending()}});
    backend_->finish();
    for (const Piece& piece : pieces) memory.written[size_t(piece.sequence)] = piece.first;
  }

 private:
  struct Placed {
    Placed(const std::vector<Piece>& pieces, const Memory& memory)
        : all(pieces, {memory.slot(0), memory.slot(1), memory.slot(2), memory.slot(3)}) {
      for (const Piece& piece : pieces) written.push_back(memory.written[size_t(piece.sequence)]);
    }
    Rows rows() const {
      Rows rows = all.rows();
      rows.written = written.data();
      return rows;
    }
    StepRows all;
    std::vector<int32_t> written;
  };

  Kind kind_;
  std::unique_ptr<Backend> backend_;
  Inputs in_;
};

// Random steps: some sequences, most by a token. Those with more are flushed before, others at
// times.
class Steps {
 public:
  explicit Steps(uint64_t seed) : random_(seed) {}

  bool next(std::vector<Piece>& pieces, std::vector<Piece>& flushed) {
    pieces.clear();
    flushed.clear();
    bool left = false;
    for (int32_t s = 0; s < kSequences; ++s) {
      int32_t& first = first_[s];
      left = left || first < kTokens;
      const int32_t count = std::min(upto(8) > 1 ? 1 : upto(7), kTokens - first);
      if (count == 0 || upto(4) == 1) continue;
      pieces.push_back({s, first, count});
      if (first > 0 && (count > 1 || upto(9) == 1)) flushed.push_back(pieces.back());
      first += count;
    }
    return left;
  }
  const int32_t* ends() const { return first_; }

 private:
  int32_t upto(int32_t most) { return 1 + int32_t(random_() % uint64_t(most)); }

  std::mt19937_64 random_;
  int32_t first_[kSequences] = {};
};

TEST(SwilaPending, AnswersAsIfEachStepWrote) {
  for (const CpuOptions& options : {CpuOptions{.plain = true}, CpuOptions{.threads = 2}}) {
    for (const Kind& kind : kKinds) {
      for (uint64_t seed = 1; seed <= 10; ++seed) {
        Runner runner(kind, options);
        Memory waiting(kind), all(kind);
        Steps steps(seed);
        for (std::vector<Piece> pieces, flushed; steps.next(pieces, flushed);) {
          if (pieces.empty()) continue;
          const std::vector<float> expected = runner.step(pieces, all, false);
          if (!flushed.empty()) runner.flush(flushed, waiting);
          EXPECT_LE(apart(runner.step(pieces, waiting, true), expected), kRounding)
              << "gated " << kind.gated << ", temporal " << kind.temporal << ", seed " << seed;
        }
        std::vector<Piece> last;
        for (int32_t s = 0; s < kSequences; ++s) last.push_back({s, steps.ends()[s], 1});
        runner.flush(last, waiting);
        for (int32_t s = 0; s < kSequences; ++s) {
          EXPECT_LE(apart(waiting.kept(s), all.kept(s)), kRounding);
        }
      }
    }
  }
}

// Of each head, three steps of four leave the state in memory as it was.
TEST(SwilaPending, AFourthOfTheHeadsIsWritten) {
  Runner runner({}, {.plain = true});
  Memory memory({});
  runner.step({{0, 0, 1}}, memory, true);
  for (int32_t position = 1; position < 20; ++position) {
    const std::vector<float> before = memory.kept(0);
    runner.step({{0, position, 1}}, memory, true);
    const std::vector<float> after = memory.kept(0);
    constexpr int32_t kHead = J * D * D;
    for (int32_t h = 0; h < kHeads; ++h) {
      const bool same = std::equal(&before[size_t(h * kHead)], &before[size_t(h * kHead)] + kHead,
                                   &after[size_t(h * kHead)]);
      EXPECT_EQ(same, (position + h) % 4 != 3) << position << ", head " << h;
    }
  }
}

}  // namespace
}  // namespace weir
