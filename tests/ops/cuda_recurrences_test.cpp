// The CUDA kernels of SwiLA and of the recurrences over vectors that are ready, the one that only
// adds and the one that also erases, against the plain CPU ones.
#include <array>

#include "tests/ops/cuda_outer_case.h"
#include "tests/ops/cuda_swila_case.h"

namespace weir {
namespace {

constexpr int32_t kSlots = 6;

class CudaSwila : public CudaTest {
 protected:
  void check(const SwilaCase& c) {
    const auto make = [&c](const Steps& steps) {
      return [&c, &steps](Side& side) { return swila_program(side, c, steps); };
    };
    same("swila_mix decode, " + c.name(), 1e-5, make(kDecode));
    same("swila_mix ragged, " + c.name(), 3e-5, make(kShort));
    same("swila_mix uneven, " + c.name(), 3e-5, make(kUneven));
  }
};

TEST_F(CudaSwila, EveryVariantAndSize) {
  for (const bool temporal : {false, true}) {
    for (const bool gated : {false, true}) {
      for (const auto& [mixtures, dim] : {std::pair{4, 64}, {4, 32}, {2, 64}, {8, 64}, {3, 10},
                                          {1, 64}, {5, 40}}) {
        check({.mixtures = mixtures, .dim = dim, .temporal = temporal, .gated = gated});
      }
      check({.conv = 2, .temporal = temporal, .gated = gated});
      check({.mixtures = 2, .dim = 24, .conv = 1, .temporal = temporal, .gated = gated});
    }
  }
}

// So many heads that blocks hold one each, two on a multiprocessor, from more than a thousand on
// through shared memory; padding and fresh rows between.
Steps many_rows() {
  Steps many{{}, {}, {0}};
  for (int32_t row = 0; row < 120; ++row) {
    many.slot.push_back(row % 7 == 3 ? kPadding : row);
    many.first.push_back(row % 5 == 2 ? 0 : row);
    many.begin.push_back(row + 1);
  }
  return many;
}

TEST_F(CudaSwila, ManyRows) {
  const Steps many = many_rows();
  for (const bool temporal : {false, true}) {
    for (const bool gated : {false, true}) {
      for (const int32_t heads : {3, 9}) {
        const SwilaCase c{.heads = heads, .temporal = temporal, .gated = gated};
        same("swila_mix many rows, " + std::to_string(heads) + " heads, " + c.name(), 1e-5,
             [&](Side& side) { return swila_program(side, c, many); });
      }
    }
  }
}

// Every turn of the heads' writes, and every number of updates that wait.
TEST_F(CudaSwila, DeferredWrites) {
  const Steps many = many_rows();
  for (const bool temporal : {false, true}) {
    for (const bool gated : {false, true}) {
      for (const int32_t heads : {4, 9}) {
        const SwilaCase c{.heads = heads, .temporal = temporal, .gated = gated, .defers = true};
        const std::string name = std::to_string(heads) + " heads, " + c.name();
        same("swila_mix decode, " + name, 1e-5,
             [&](Side& side) { return swila_program(side, c, kDecode); });
        same("swila_mix many rows, " + name, 1e-5,
             [&](Side& side) { return swila_program(side, c, many); });
      }
    }
  }
}

// Rows of one token defer their writes, longer ones beside them do not. Those of more than eight
// tokens are computed from operands of half precision.
TEST_F(CudaSwila, DeferredWritesAmongLongerRows) {
  const std::vector<int32_t> shorter = {1, 4, 0, 1, 1, 8, 2, 1, 1};
  for (const bool temporal : {false, true}) {
    for (const bool gated : {false, true}) {
      const SwilaCase c{.heads = 4, .temporal = temporal, .gated = gated, .value_scale = 1,
                        .defers = true};
      for (const bool known : {false, true}) {
        const std::string name = c.name() + (known ? ", known rows" : "");
        same("swila_mix shorter rows, " + name, 3e-5,
             [&](Side& side) { return swila_program(side, c, rows_of(shorter, known)); });
        same("swila_mix longer rows, " + name, 1e-3,
             [&](Side& side) { return swila_program(side, c, rows_of(kMixed, known)); });
      }
    }
  }
}

// A short row computes what its tokens one by one compute, bit for bit.
TEST_F(CudaSwila, ChunkEqualsSteps) {
  for (const auto& [mixtures, dim, T] : {std::array{4, 64, 8}, {2, 64, 9}, {4, 24, 9}}) {
    const SwilaCase c{.mixtures = mixtures, .dim = dim, .temporal = true, .gated = true};
    const Steps chunk{{2}, {0}, {0, T}};
    Side whole(cuda(), 11), apart(cuda(), 11);
    const Program program = swila_program(whole, c, chunk);
    whole.backend().run(program);
    const Program other = swila_program(apart, c, chunk);
    for (int32_t t = 0; t < T; ++t) {
      auto one = std::get<SwilaMix>(other.front());
      one.rows = Steps{{2}, {t}, {0, 1}}.put(apart);
      for (Acts SwilaMix::*acts :
           {&SwilaMix::q, &SwilaMix::k, &SwilaMix::v, &SwilaMix::key_router,
            &SwilaMix::query_router, &SwilaMix::beta, &SwilaMix::key_mix, &SwilaMix::query_mix,
            &SwilaMix::decay_in, &SwilaMix::out}) {
        (one.*acts).data += t * (one.*acts).stride;
      }
      apart.backend().run({one});
    }
    for (size_t i = 0; i < whole.outputs().size(); ++i) {
      const auto &a = whole.outputs()[i], &b = apart.outputs()[i];
      const std::vector<float> x = whole.read(a.data, a.count), y = apart.read(b.data, b.count);
      EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(float)), 0) << a.name << dim;
    }
  }
}

TEST_F(CudaTest, OuterStepOfEveryDecayHeadAndSize) {
  using Decay = OuterStep::Decay;
  std::vector<OuterCase> cases;
  for (const auto& [K, V] : {std::pair{32, 32}, {64, 40}, {128, 64}, {128, 7}, {256, 512},
                             {512, 96}, {48, 24}, {10, 6}}) {
    for (const Decay decay :
         {Decay::None, Decay::Constant, Decay::PerHead, Decay::PerKey, Decay::PerValue}) {
      cases.push_back({.name = std::to_string(K) + "x" + std::to_string(V) + ", decay " +
                               std::to_string(int(decay)),
                       .key_dim = K, .value_dim = V, .decay = decay});
    }
    cases.push_back({.name = std::to_string(K) + "x" + std::to_string(V) + ", normalised",
                     .key_dim = K, .value_dim = V, .normalise = true});
  }
  cases.push_back({.name = "normalised, decaying", .decay = Decay::PerKey, .normalise = true});
  for (const int32_t dim : {64, 24}) {
    cases.push_back({.name = "Mamba-2, 4 heads of one group", .heads = 4, .key_heads = 1,
                     .value_heads = 4, .query_heads = 1, .key_dim = 128, .value_dim = dim,
                     .decay = Decay::PerHead, .v_scale = true, .skip = true});
    cases.push_back({.name = "6 queries of 2 heads", .query_heads = 6, .key_dim = dim,
                     .decay = Decay::PerKey});
    cases.push_back({.name = "6 queries of 2 heads, normalised", .query_heads = 6, .key_dim = dim,
                     .normalise = true});
  }
  for (const OuterCase& c : cases) {
    const auto make = [&c](const Steps& steps) {
      return [&c, &steps](Side& side) { return outer_program(side, c, steps); };
    };
    same("outer_step decode, " + c.name, 2e-6, make(kDecode));
    same("outer_step ragged, " + c.name, 5e-6, make(kRagged));
    same("outer_step uneven, " + c.name, 5e-6, make(kUneven));
  }
}

struct EraseCase {
  std::string name;
  int32_t key_dim = 64, value_dim = 64, updates = 1;
  Decay decay = Decay::PerChannel;
  bool decayed_read = true, directions = false, beta = true, bonus = false;
};

Program erase_program(Side& side, const EraseCase& c, const Steps& steps) {
  const int32_t T = steps.tokens(), heads = 3, keys = heads * c.key_dim,
                values = heads * c.value_dim;
  const float scale = 1 / std::sqrt(float(c.key_dim));  // no update may let the state grow
  EraseStep op{.rows = steps.put(side), .heads = heads, .key_dim = c.key_dim,
               .value_dim = c.value_dim, .updates = c.updates, .decay = c.decay,
               .decayed_read = c.decayed_read, .scale = 0.3f, .q = side.acts(T, keys),
               .k = side.acts(T, c.updates * keys, scale),
               .v = side.acts(T, c.updates * values), .beta_scale = 1.2f};
  if (c.directions) {
    op.p = side.acts(T, c.updates * keys, scale);
    op.e = side.acts(T, c.updates * keys, scale);
  }
  const int64_t decays = c.decay == Decay::PerHead ? heads : keys;
  std::vector<float> log_decay = side.normal(size_t(T * (decays + 4)));
  for (float& g : log_decay) g = -std::fabs(g) / 2;
  op.log_decay = {side.put(log_decay), decays + 4};
  if (c.beta) op.beta = side.acts(T, c.updates * heads);
  const int64_t state = int64_t(values) * c.key_dim, stride = state + 32;
  const auto slots = size_t(std::max(kSlots, steps.slots()) * stride);
  op.state = {side.floats(slots, 0.3f), stride};
  side.compare(op.state.data, slots, "slots");
  if (c.bonus) {
    op.bonus = side.floats(size_t(keys));
    op.bonus_out = side.out(T, values, "bonus");
  }
  op.out = side.out(T, values, "out");
  return {op};
}

class CudaErase : public CudaTest,
                  public testing::WithParamInterface<std::pair<int32_t, int32_t>> {
 protected:
  static std::string size() {
    return std::to_string(GetParam().first) + "x" + std::to_string(GetParam().second);
  }
};
INSTANTIATE_TEST_SUITE_P(Sizes, CudaErase,
                         testing::Values(std::pair{32, 40}, std::pair{64, 64}, std::pair{128, 128},
                                         std::pair{256, 24}, std::pair{20, 12}, std::pair{7, 5}));

// The more rows there are, the more values a thread takes: all three numbers of them, with rows
// that end inside what is fetched together, and at its end.
TEST_P(CudaErase, ManyRows) {
  const auto [K, V] = GetParam();
  for (const int32_t rows : {1, 6, 20, 40}) {
    std::vector<int32_t> lengths;
    for (int32_t i = 0; i < rows; ++i) lengths.push_back(i % 7 == 3 ? 0 : 1 + i * 5 % 17);
    lengths.front() = 24;
    const std::string name = size() + ", " + std::to_string(rows) + " rows";
    for (const EraseCase& c :
         {EraseCase{.name = "Gated DeltaProduct " + name, .key_dim = K, .value_dim = V,
                    .updates = 3, .decay = Decay::PerHead},
          EraseCase{.name = "RWKV-7 " + name, .key_dim = K, .value_dim = V,
                    .decayed_read = false, .directions = true, .beta = false, .bonus = true}}) {
      same("erase_step, " + c.name, 1e-5,
           [&](Side& side) { return erase_program(side, c, rows_of(lengths)); });
    }
  }
}

TEST_P(CudaErase, EveryKind) {
  const auto [K, V] = GetParam();
  const std::vector<EraseCase> cases = {
      {.name = "Gated DeltaProduct " + size(), .key_dim = K, .value_dim = V, .updates = 3,
       .decay = Decay::PerHead},
      {.name = "RWKV-7 " + size(), .key_dim = K, .value_dim = V, .decayed_read = false,
       .directions = true, .beta = false, .bonus = true},
      {.name = "Comba " + size(), .key_dim = K, .value_dim = V, .decay = Decay::PerHead,
       .decayed_read = false, .directions = true},
      {.name = "no decay " + size(), .key_dim = K, .value_dim = V, .updates = 2,
       .decay = Decay::None}};
  for (const EraseCase& c : cases) {
    const auto make = [&c](const Steps& steps) {
      return [&c, &steps](Side& side) { return erase_program(side, c, steps); };
    };
    same("erase_step decode, " + c.name, 2e-6, make(kDecode));
    same("erase_step ragged, " + c.name, 1e-5, make(kRagged));
    same("erase_step uneven, " + c.name, 1e-5, make(kUneven));
    same("erase_step prompts, " + c.name, 1e-5, make(kPrompts));
  }
}

}  // namespace
}  // namespace weir
