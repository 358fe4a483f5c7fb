// The CUDA kernels of cross-layer routing against the plain CPU ones.
#include "tests/ops/cuda_delta_case.h"

namespace weir {
namespace {

class CudaRoute : public CudaTest {
 protected:
  void check(const DeltaCase& c) {
    for (const auto& [name, steps] : {std::pair{"decode", kDecode}, {"ragged", kShort},
                                      {"uneven", kUneven}}) {
      same(std::string("delta_mix ") + name + ", " + c.name, 2e-5,
           [&](Side& side) { return delta_program(side, c, steps); });
    }
  }
};

// Fails on values that are convolved twice, a history of another layout, a residual that is not
// the one that is written, an answer that is changed after its norm.
TEST_F(CudaRoute, WhatCrossesLayers) {
  check({.name = "values are ready", .values_ready = true});
  check({.name = "emits", .emits = true});
  check({.name = "adds to its answers", .answer_add = true});
  check({.name = "all, DeltaNet", .decay = Decay::None, .gate = false, .values_ready = true,
         .emits = true, .answer_add = true});
  check({.name = "all, KDA", .decay = Decay::PerChannel, .gate_activation = Activation::Sigmoid,
         .values_ready = true, .emits = true, .answer_add = true});
  check({.name = "all, GDN-2, heads shared", .key_heads = 2, .value_heads = 4,
         .decay = Decay::PerChannel, .decay_heads = 2, .erase = true, .conv_bias = true,
         .values_ready = true, .emits = true, .answer_add = true});
  check({.name = "all, no convolution", .conv = 0, .values_ready = true, .emits = true,
         .answer_add = true});
  check({.name = "all, no norm", .norm_output = false, .values_ready = true, .emits = true,
         .answer_add = true});
}

// Every size that is held, in slices, with one row a thread and two, or streamed.
TEST_F(CudaRoute, EverySize) {
  for (const auto& [K, V] : {std::pair{32, 32}, {32, 64}, {64, 64}, {64, 128}, {128, 256},
                             {256, 512}, {48, 40}, {8, 16}}) {
    for (const int32_t value_heads : {2, 6}) {
      check({.name = std::to_string(K) + "x" + std::to_string(V) + ", " +
                     std::to_string(value_heads) + " heads",
             .value_heads = value_heads, .key_dim = K, .value_dim = V,
             .decay_heads = value_heads, .values_ready = true, .emits = true,
             .answer_add = true});
    }
  }
}

TEST_F(CudaRoute, AdditiveMemoryAndTheOtherNorm) {
  check({.name = "l2_max", .qk_norm = QkNorm::L2Max});
  check({.name = "additive", .decay = Decay::None, .beta = false, .erases = false});
  check({.name = "additive, no norms", .decay = Decay::None, .qk_norm = QkNorm::L2Max,
         .norm_output = false, .erases = false});
  check({.name = "additive, 8x16, emits", .key_dim = 8, .value_dim = 16, .decay = Decay::None,
         .qk_norm = QkNorm::L2Max, .erases = false, .values_ready = true, .emits = true});
}

// Rows so many and so long that another kernel would take them, were they not routed.
TEST_F(CudaRoute, ManyRowsAndLongOnes) {
  Steps many{{}, {}, {0}}, prompts{{1, 0}, {0, 9}, {0, 100, 170}};
  for (int32_t row = 0; row < 70; ++row) {
    many.slot.push_back(row % 7 == 3 ? kPadding : row);
    many.first.push_back(row % 5 == 2 ? 0 : row);
    many.begin.push_back(row + 1);
  }
  const DeltaCase cases[] = {
      {.name = "emits", .value_heads = 4, .decay_heads = 4, .values_ready = true, .emits = true},
      {.name = "l2_max", .value_heads = 4, .decay_heads = 4, .qk_norm = QkNorm::L2Max}};
  for (const DeltaCase& c : cases) {
    same("delta_mix many rows, " + c.name, 5e-6,
         [&](Side& side) { return delta_program(side, c, many); });
    // What is not routed goes through chunks, with half-precision operands.
    same("delta_mix prompts, " + c.name, c.emits ? 2e-5 : 1e-3,
         [&](Side& side) { return delta_program(side, c, prompts); });
  }
}

TEST_F(CudaRoute, ValuesAndAnswersFromResiduals) {
  for (const auto& [tokens, heads, dim] :
       {std::tuple{5, 3, 6}, {1, 16, 128}, {33, 4, 300}, {130, 1, 1}}) {
    for (int32_t kind = 0; kind < 8; ++kind) {
      const bool normalize = kind & 1, gated = kind & 2, in_place = kind & 4;
      const int32_t count = kind < 3 ? 1 : 5;
      same("value_route of " + std::to_string(dim) + ", kind " + std::to_string(kind), 2e-6,
           [&, tokens = tokens, heads = heads, dim = dim](Side& side) {
             const int32_t width = heads * dim;
             ValueRoute op{.tokens = tokens, .heads = heads, .dim = dim, .count = count,
                           .sources = side.acts(tokens, int64_t(count) * width),
                           .source_stride = width, .normalize = normalize, .eps = 1e-2f};
             gated ? void(op.gate = side.acts(tokens, heads))
                   : void(op.gamma = side.floats(size_t(width)));
             if (kind != 6) op.v = side.acts(tokens, width);
             if (in_place && op.v) {
               op.value = op.v;
               side.compare(op.v.data, size_t(tokens * op.v.stride), "value");
             } else if (op.v) {
               op.value = side.out(tokens, width, "value");
             }
             if (kind != 5) op.answer = side.out(tokens, width, "answer");
             return Program{op};
           });
    }
  }
}

TEST_F(CudaRoute, OneNumberAHead) {
  for (const auto& [tokens, heads, dim] : {std::tuple{5, 3, 6}, {1, 16, 128}, {70, 4, 300}}) {
    for (const Activation activation : {Activation::None, Activation::Sigmoid}) {
      same("head_dot of " + std::to_string(dim), 2e-6,
           [&, tokens = tokens, heads = heads, dim = dim](Side& side) {
             const HeadDot op{.tokens = tokens, .heads = heads, .dim = dim,
                              .weight = side.floats(size_t(dim)), .bias = side.floats(1),
                              .activation = activation, .x = side.acts(tokens, heads * dim),
                              .out = side.out(tokens, heads, "out")};
             return Program{op};
           });
    }
  }
}

// With values of nothing among them, whose length is not divided by.
TEST_F(CudaRoute, SignalsOfValuesAndResiduals) {
  for (const auto& [tokens, heads, dim] : {std::tuple{5, 3, 6}, {1, 16, 128}, {70, 4, 300}}) {
    for (const auto kind : {RouteSignal::Kind::GatedValue, RouteSignal::Kind::Both}) {
      const bool both = kind == RouteSignal::Kind::Both;
      same(std::string("route_signal, ") + (both ? "both" : "gated value"), 2e-6,
           [&, tokens = tokens, heads = heads, dim = dim](Side& side) {
             const int32_t width = heads * dim;
             RouteSignal op{.tokens = tokens, .heads = heads, .dim = dim, .kind = kind,
                            .gate = side.floats(2), .v = side.acts(tokens, width),
                            .u = side.acts(tokens, width),
                            .out = side.out(tokens, both ? 2 * width : width, "out")};
             if (tokens > 1) {
               const std::vector<float> none(size_t(width), 0.0f);
               side.backend().upload(op.v.at(1), none.data(), none.size() * sizeof(float));
               side.backend().finish();
             }
             return Program{op};
           });
    }
  }
}

}  // namespace
}  // namespace weir
