// Whole layers of few tokens, which CUDA runs as one kernel: against the plain CPU ops.
#include "tests/ops/cuda_delta_case.h"
#include "tests/ops/cuda_swila_case.h"

namespace weir {
namespace {

struct Shape {
  DeltaCase mix;
  int32_t dim = 256, hidden = 704, vocab = 1000, layers = 3;
  bool low_rank = false;  // the decay and the gate come through two matrices each
  const SwilaCase* swila = nullptr;  // instead of `mix`
};

// The parts of an in-projection and where each one's output lies.
struct Parts {
  Linear op;
  int32_t rows = 0;

  Acts add(Side& side, int32_t count) {
    op.part[size_t(op.parts++)] = side.matrix(count, op.in, DType::BF16);
    return op.y.from(std::exchange(rows, rows + count));
  }
};

void add_mixer(Side& side, const Shape& shape, const Steps& steps, Acts normed, Acts projected,
               Acts residual, Program& program) {
  const DeltaCase& c = shape.mix;
  const int32_t T = steps.tokens(), keys = c.key_heads * c.key_dim,
                values = c.value_heads * c.value_dim;
  auto mix = std::get<DeltaMix>(delta_program(side, c, steps)[0]);
  Parts in{.op = {.tokens = T, .in = shape.dim, .x = normed, .y = projected}};
  mix.q = in.add(side, keys);
  mix.k = in.add(side, keys);
  mix.v = in.add(side, values);
  mix.out = side.acts(T, values);
  Program low;
  const auto through = [&](Acts& gate, int32_t count, bool biased) {
    if (!gate) return;
    if (!shape.low_rank) {
      gate = in.add(side, count);
      return;
    }
    Linear op{.tokens = T, .in = 64, .parts = 1, .part = {side.matrix(count, 64, DType::BF16)},
              .x = in.add(side, 64), .y = side.acts(T, count)};
    if (biased) op.bias[0] = side.floats(size_t(count));
    gate = op.y;
    low.push_back(op);
  };
  through(mix.decay_in, c.decay_heads * (c.decay == Decay::PerHead ? 1 : c.key_dim), false);
  through(mix.gate, values, true);
  if (mix.beta) mix.beta = in.add(side, c.value_heads);
  if (mix.erase) {
    mix.erase = in.add(side, keys);
    mix.write = in.add(side, values);
  }
  program.push_back(in.op);
  program.insert(program.end(), low.begin(), low.end());
  program.push_back(mix);
  program.push_back(Linear{.tokens = T, .in = values, .parts = 1,
                           .part = {side.matrix(shape.dim, values, DType::BF16)},
                           .accumulate = true, .x = mix.out, .y = residual});
}

void add_swila(Side& side, const Shape& shape, const Steps& steps, Acts normed, Acts projected,
               Acts residual, Program& program) {
  const SwilaCase& c = *shape.swila;
  const int32_t T = steps.tokens(), channels = c.heads * c.dim, rank = 64;
  auto mix = std::get<SwilaMix>(swila_program(side, c, steps)[0]);
  Parts in{.op = {.tokens = T, .in = shape.dim, .x = normed, .y = projected}};
  Program up;
  for (Acts* logits : {&mix.key_router, &mix.query_router, &mix.beta, &mix.decay_in}) {
    if (!*logits) continue;
    const int32_t mixed = channels * c.mixtures;
    Linear op{.tokens = T, .in = rank, .parts = 1,
              .part = {side.matrix(mixed, rank, DType::BF16)}, .x = in.add(side, rank),
              .y = side.acts(T, mixed)};
    *logits = op.y;
    up.push_back(op);
  }
  for (Acts* vectors : {&mix.q, &mix.k, &mix.v}) *vectors = in.add(side, channels);
  program.push_back(in.op);
  if (c.temporal) {  // more parts than a Linear has
    Parts more{.op = {.tokens = T, .in = shape.dim, .x = normed, .y = side.acts(T, 2 * channels)}};
    mix.key_mix = more.add(side, channels);
    mix.query_mix = more.add(side, channels);
    more.op.bias[0] = side.floats(size_t(channels));
    program.push_back(more.op);
  }
  program.insert(program.end(), up.begin(), up.end());
  mix.out = side.acts(T, channels);
  program.push_back(mix);
  program.push_back(Linear{.tokens = T, .in = channels, .parts = 1,
                           .part = {side.matrix(shape.dim, channels, DType::BF16)},
                           .accumulate = true, .x = mix.out, .y = residual});
}

// The last `padding` rows are compared nowhere: what passes through them is left over.
Program layers(Side& side, const Shape& shape, const Steps& steps, int32_t padding) {
  const int32_t T = steps.tokens(), real = T - padding;
  Program program;
  const Acts residual = side.acts(T, shape.dim), normed = side.acts(T, shape.dim),
             projected = side.acts(T, 8320), hidden = side.acts(T, 2 * shape.hidden),
             picked = side.acts(T, shape.dim);
  side.compare(residual.data, size_t(real * residual.stride), "residual");
  const auto norm = [&](int32_t tokens, Acts in, Acts out) {
    program.push_back(RmsNorm{.tokens = tokens, .dim = shape.dim, .eps = 1e-6f,
                              .weight = side.floats(size_t(shape.dim)), .in = in, .out = out});
  };
  for (int32_t i = 0; i < shape.layers; ++i) {
    norm(T, residual, normed);
    (shape.swila == nullptr ? add_mixer : add_swila)(side, shape, steps, normed, projected,
                                                     residual, program);
    norm(T, residual, normed);
    program.push_back(Linear{.tokens = T, .in = shape.dim, .parts = 2,
                             .part = {side.matrix(shape.hidden, shape.dim, DType::BF16),
                                      side.matrix(shape.hidden, shape.dim, DType::BF16)},
                             .x = normed, .y = hidden});
    program.push_back(Swiglu{.tokens = T, .dim = shape.hidden, .gate = hidden,
                             .up = hidden.from(shape.hidden), .out = hidden});
    program.push_back(Linear{.tokens = T, .in = shape.hidden, .parts = 1,
                             .part = {side.matrix(shape.dim, shape.hidden, DType::BF16)},
                             .accumulate = true, .x = hidden, .y = residual});
  }
  std::vector<int32_t> index;
  for (int32_t i = real; i-- > 0;) index.push_back(i);
  program.push_back(Gather{.count = real, .dim = shape.dim, .index = side.put(index),
                           .in = residual, .out = picked});
  norm(real, picked, picked);
  program.push_back(Linear{.tokens = real, .in = shape.dim, .parts = 1,
                           .part = {side.matrix(shape.vocab, shape.dim, DType::BF16)},
                           .x = picked, .y = side.out(real, shape.vocab, "logits")});
  return program;
}

// One token of each of so many sequences, in slots out of order, one of them at its start.
Steps decode(int32_t rows, int32_t padding) {
  Steps steps{.begin = {0}};
  for (int32_t r = 0; r < rows + padding; ++r) {
    steps.slot.push_back(r < rows ? (r * 5 + 3) % 11 : kPadding);
    steps.first.push_back(r == 1 ? 0 : r + 1);
    steps.begin.push_back(r + 1);
  }
  return steps;
}

class CudaResident : public CudaTest {
 protected:
  using Sizes = std::vector<std::pair<int32_t, int32_t>>;  // rows and padding rows
  static void all_sizes(const Shape& shape, double tolerance = 5e-5,
                        const CudaOptions& options = {},
                        const Sizes& sizes = {{1, 0}, {2, 0}, {3, 1}, {4, 0}, {5, 0}}) {
    for (const auto& [rows, padding] : sizes) {
      const Steps steps = decode(rows, padding);
      const int32_t without = padding;
      const std::string name = shape.swila != nullptr ? shape.swila->name() : shape.mix.name;
      same(name + ", rows " + std::to_string(rows), tolerance,
           [&](Side& side) { return layers(side, shape, steps, without); }, options);
    }
  }
};

TEST_F(CudaResident, EveryMixer) {
  all_sizes({.mix = {.name = "GDN"}});
  all_sizes({.mix = {.name = "DeltaNet", .decay = Decay::None, .gate = false}});
  all_sizes({.mix = {.name = "KDA, low rank", .decay = Decay::PerChannel,
                     .gate_activation = Activation::Sigmoid},
             .low_rank = true});
  all_sizes({.mix = {.name = "GDN-2", .decay = Decay::PerChannel, .erase = true}});
}

TEST_F(CudaResident, EverySize) {
  all_sizes({.mix = {.name = "no convolution", .conv = 0}});
  all_sizes({.mix = {.name = "biased convolution", .conv_bias = true}});
  all_sizes({.mix = {.name = "keys of 64, values of 32", .key_dim = 64, .value_dim = 32}});
}

TEST_F(CudaResident, EveryHead) {
  all_sizes({.mix = {.name = "keys of 256, values of 512", .key_dim = 256, .value_dim = 512}}, 5e-5,
            {}, {{1, 0}, {3, 1}});
  all_sizes({.mix = {.name = "one head", .key_heads = 1, .value_heads = 1, .decay_heads = 1}});
  all_sizes({.mix = {.name = "2 key heads, 6 value heads", .value_heads = 6, .decay_heads = 6}});
  all_sizes({.mix = {.name = "sums of keys", .qk_activation = Activation::EluPlusOne,
                     .qk_norm = QkNorm::Sum}});
}

// Four mixtures of 64 are two parts of a lane; with others, and a norm that two Linears read.
TEST_F(CudaResident, Swila) {
  const SwilaCase plain{.heads = 4}, gated{.heads = 4, .temporal = true, .gated = true},
      small{.mixtures = 4, .dim = 32, .heads = 2, .temporal = true},
      two{.mixtures = 2, .heads = 4, .gated = true};
  for (const SwilaCase* c : {&plain, &gated, &small, &two}) {
    all_sizes({.swila = c}, 2e-4, {}, {{1, 0}, {3, 1}});
  }
}

// More columns than one stage of a row, and more tiles than blocks.
TEST_F(CudaResident, WideLayers) {
  all_sizes({.mix = {.name = "2048 -> 5632 -> 2048", .key_heads = 16, .value_heads = 16,
                     .decay_heads = 16},
             .dim = 2048, .hidden = 5632, .vocab = 2000, .layers = 1},
            5e-5, {}, {{1, 0}, {3, 1}});
}

// Phases beyond one launch's table.
TEST_F(CudaResident, ManyLayers) {
  all_sizes({.mix = {.name = "70 layers", .key_dim = 32, .value_dim = 32},
             .dim = 64, .hidden = 64, .vocab = 100, .layers = 70}, 1e-3, {}, {{2, 0}});
}

TEST_F(CudaResident, Bf16Vectors) {
  all_sizes({.mix = {.name = "bf16 vectors"}}, 3e-2, {.bf16_vectors = true});
}

}  // namespace
}  // namespace weir
