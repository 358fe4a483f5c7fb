// The CUDA kernels of the mixers and of sampling against the plain CPU ones.
#include "tests/ops/cuda_delta_case.h"

namespace weir {
namespace {

constexpr int32_t kSlots = 6;

class CudaDeltaMix : public CudaTest {
 protected:
  void check(DeltaCase c) {
    same("delta_mix decode, " + c.name, 5e-6,
         [&](Side& side) { return delta_program(side, c, kDecode); });
    same("delta_mix ragged, " + c.name, 2e-5,
         [&](Side& side) { return delta_program(side, c, kShort); });
  }
};

TEST_F(CudaDeltaMix, EveryDecayAndGate) {
  check({.name = "GDN"});
  check({.name = "DeltaNet", .decay = Decay::None, .gate = false});
  check({.name = "KDA", .decay = Decay::PerChannel, .gate_activation = Activation::Sigmoid});
  check({.name = "KDA, bounded gate", .decay = Decay::PerChannel, .lower_bound = -5});
  check({.name = "GDN-2", .decay = Decay::PerChannel, .erase = true});
  check({.name = "no beta", .beta = false});
}

TEST_F(CudaDeltaMix, EverySize) {
  for (const auto& [K, V] : {std::pair{32, 32}, {32, 64}, {64, 64}, {64, 128}, {128, 256},
                             {256, 512}, {48, 40}, {20, 12}}) {
    check({.name = std::to_string(K) + "x" + std::to_string(V), .key_dim = K, .value_dim = V});
  }
}

TEST_F(CudaDeltaMix, SharedKeyHeadsAndDecays) {
  check({.name = "2 key heads, 6 value heads", .key_heads = 2, .value_heads = 6, .decay_heads = 6});
  check({.name = "GDN-2, 2 and 4 heads", .key_heads = 2, .value_heads = 4,
         .decay = Decay::PerChannel, .decay_heads = 2, .erase = true});
}

TEST_F(CudaDeltaMix, EveryConvolutionAndNorm) {
  check({.name = "no convolution", .conv = 0});
  check({.name = "width 1", .conv = 1});
  check({.name = "width 2, bias", .conv = 2, .conv_bias = true});
  check({.name = "width 7, bias", .conv = 7, .conv_bias = true});
  check({.name = "elu + 1, sum norm", .qk_activation = Activation::EluPlusOne,
         .qk_norm = QkNorm::Sum});
  check({.name = "sigmoid", .qk_activation = Activation::Sigmoid});
}

// So many heads that blocks stay and go from one to the next: more than one for each of them, with
// padding and fresh rows between.
Steps many_rows() {
  Steps many{{}, {}, {0}};
  for (int32_t row = 0; row < 75; ++row) {
    many.slot.push_back(row % 7 == 3 ? kPadding : row);
    many.first.push_back(row % 5 == 2 ? 0 : row);
    many.begin.push_back(row + 1);
  }
  return many;
}

TEST_F(CudaDeltaMix, ManyRows) {
  for (const auto& [K, V] : {std::pair{32, 32}, {32, 64}, {64, 64}, {128, 128}}) {
    for (const int32_t value_heads : {2, 4, 6, 8}) {
      const DeltaCase c{.name = std::to_string(K) + "x" + std::to_string(V),
                        .value_heads = value_heads, .key_dim = K, .value_dim = V,
                        .decay_heads = value_heads};
      same("delta_mix many rows, " + c.name, 5e-6,
           [&](Side& side) { return delta_program(side, c, many_rows()); });
    }
  }
}

// More heads of 256x512 than run at one time: a kernel that stayed waited forever here. Fewer ones
// are cut into slices, the blocks of clusters of every size; but not where six share two key heads.
TEST_F(CudaDeltaMix, ManyRowsOfLargeHeads) {
  struct Heads {
    int32_t keys, values, dim;
  };
  for (const Heads& h : {Heads{6, 6, 512}, {2, 2, 512}, {2, 6, 256}, {2, 2, 256}, {2, 16, 64},
                         {1, 2, 64}, {2, 2, 64}}) {
    const DeltaCase c{.key_heads = h.keys, .value_heads = h.values, .key_dim = 256,
                      .value_dim = h.dim, .decay_heads = h.values};
    same("delta_mix many rows, " + std::to_string(h.values) + " heads of 256x" +
             std::to_string(h.dim),
         5e-6, [&](Side& side) { return delta_program(side, c, many_rows()); });
  }
}

TEST_F(CudaDeltaMix, ManyRowsOfSlicesOfEveryKind) {
  for (DeltaCase c : {
           DeltaCase{.name = "KDA", .decay = Decay::PerChannel},
           {.name = "GDN-2, bias", .decay = Decay::PerChannel, .erase = true, .conv_bias = true},
           {.name = "DeltaNet, elu + 1, sum norm", .decay = Decay::None, .gate = false,
            .qk_activation = Activation::EluPlusOne, .qk_norm = QkNorm::Sum}}) {
    c.key_dim = 256;
    c.value_dim = 128;
    same("delta_mix many rows, slices, " + c.name, 5e-6,
         [&](Side& side) { return delta_program(side, c, many_rows()); });
  }
}

// Heads of 128x128, more than run at one time.
TEST_F(CudaDeltaMix, ManyRowsOfManyHeads) {
  for (const auto& [keys, values] : {std::pair{16, 16}, {4, 16}, {6, 18}}) {
    DeltaCase c{.name = "KDA, " + std::to_string(keys) + " and " + std::to_string(values) +
                        " heads",
                .key_heads = keys, .value_heads = values, .decay = Decay::PerChannel,
                .decay_heads = values};
    same("delta_mix many heads, " + c.name, 5e-6,
         [&](Side& side) { return delta_program(side, c, many_rows()); });
  }
  same("delta_mix many heads, GDN-2", 5e-6, [&](Side& side) {
    return delta_program(side, {.key_heads = 14, .value_heads = 14, .decay = Decay::PerChannel,
                                .decay_heads = 14, .erase = true},
                         many_rows());
  });
}

class CudaManyRows : public CudaDeltaMix {
 protected:
  void run(std::vector<DeltaCase> cases) {
    for (DeltaCase& c : cases) {
      for (const int32_t size : {64, 128}) {
        c.key_dim = c.value_dim = size;
        same("delta_mix many rows, " + c.name + ", " + std::to_string(size), 5e-6,
             [&](Side& side) { return delta_program(side, c, many_rows()); });
      }
    }
  }
};

TEST_F(CudaManyRows, EveryDecayAndGate) {
  run({{.name = "DeltaNet", .decay = Decay::None, .gate = false},
       {.name = "KDA", .decay = Decay::PerChannel, .gate_activation = Activation::Sigmoid},
       {.name = "KDA, bounded gate", .decay = Decay::PerChannel, .lower_bound = -5},
       {.name = "GDN-2", .decay = Decay::PerChannel, .erase = true},
       {.name = "no beta", .beta = false}});
}

TEST_F(CudaManyRows, EverySharing) {
  run({{.name = "GDN-2, 2, 4 and 2 heads", .value_heads = 4, .decay = Decay::PerChannel,
        .erase = true},
       {.name = "GDN, 2, 6 and 2 heads", .value_heads = 6},
       {.name = "2 key heads, 12 value heads", .value_heads = 12, .decay_heads = 12},
       {.name = "1 key head, 8 value heads", .key_heads = 1, .value_heads = 8}});
}

TEST_F(CudaManyRows, EveryConvolutionAndNorm) {
  run({{.name = "no convolution", .conv = 0},
       {.name = "width 1", .conv = 1},
       {.name = "width 2, bias", .conv = 2, .conv_bias = true},
       {.name = "width 4, bias", .conv_bias = true},
       {.name = "width 7, bias", .conv = 7, .conv_bias = true},
       {.name = "elu + 1, sum norm", .qk_activation = Activation::EluPlusOne,
        .qk_norm = QkNorm::Sum},
       {.name = "sigmoid", .qk_activation = Activation::Sigmoid},
       {.name = "l2_max norm", .qk_norm = QkNorm::L2Max}});
}

// The mixer's answer is left split for the Linear that follows, by each of its kernels.
TEST_F(CudaDeltaMix, LinearReadsWhatItLeftSplit) {
  for (const int32_t rows : {1, 90}) {
    Steps steps{{}, {}, {0}};
    for (int32_t row = 0; row < rows; ++row) {
      steps.slot.push_back(row);
      steps.first.push_back(row);
      steps.begin.push_back(row + 1);
    }
    same("delta_mix, linear, rows " + std::to_string(rows), 2e-5, [&](Side& side) {
      Program program = delta_program(side, {.name = "GDN"}, steps);
      const Acts answer = std::get<DeltaMix>(program.front()).out;
      const Matrix weights = side.matrix(300, 256, DType::BF16);
      program.push_back(Linear{.tokens = rows, .in = 256, .parts = 1, .part = {weights},
                               .x = answer, .y = side.out(rows, 300, "y")});
      return program;
    });
  }
}

// A row of few tokens computes what they one by one compute, bit for bit.
TEST_F(CudaDeltaMix, ChunkEqualsSteps) {
  const DeltaCase c{.name = "GDN"};
  const int32_t T = 8;
  Side whole(cuda(), 11), apart(cuda(), 11);
  const Steps chunk{{2}, {0}, {0, T}};
  Program program = delta_program(whole, c, chunk);
  whole.backend().run(program);
  program = delta_program(apart, c, chunk);
  const DeltaMix op = std::get<DeltaMix>(program.front());
  for (int32_t t = 0; t < T; ++t) {
    DeltaMix one = op;
    one.rows = Steps{{2}, {t}, {0, 1}}.put(apart);
    for (Acts DeltaMix::*acts : {&DeltaMix::q, &DeltaMix::k, &DeltaMix::v, &DeltaMix::decay_in,
                                 &DeltaMix::beta, &DeltaMix::gate, &DeltaMix::out}) {
      (one.*acts).data += t * (one.*acts).stride;
    }
    apart.backend().run({one});
  }
  for (size_t i = 0; i < whole.outputs().size(); ++i) {
    const auto &a = whole.outputs()[i], &b = apart.outputs()[i];
    const std::vector<float> x = whole.read(a.data, a.count), y = apart.read(b.data, b.count);
    EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(float)), 0) << a.name;
  }
}

struct AttentionCase {
  std::string name;
  int32_t heads = 4, kv_heads = 2, head_dim = 64, window = 0;
  float rope = 10000;
  bool norm = true;
};

Program attention_program(Side& side, const AttentionCase& c, const Steps& steps) {
  const int32_t T = steps.tokens(), keys = c.kv_heads * c.head_dim;
  Attention op{.rows = steps.put(side), .heads = c.heads, .kv_heads = c.kv_heads,
               .head_dim = c.head_dim, .window = c.window, .rope_theta = c.rope, .norm_eps = 1e-5f,
               .q = side.acts(T, c.heads * c.head_dim), .k = side.acts(T, keys),
               .v = side.acts(T, keys)};
  if (c.norm) {
    op.q_norm = side.floats(size_t(c.head_dim));
    op.k_norm = side.floats(size_t(c.head_dim));
  }
  op.out = side.out(T, c.heads * c.head_dim, "out");
  if (c.window > 0) {
    const int64_t stride = 2 * int64_t(keys) * c.window + 32;
    op.ring = {side.floats(size_t(kSlots * stride)), stride};
    side.compare(op.ring.data, size_t(kSlots * stride), "ring");
    return {op};
  }
  constexpr int32_t kPage = 8, kPagesPerRow = 16;
  const int32_t pages = int32_t(steps.slot.size()) * kPagesPerRow;
  op.page_stride = 2 * int64_t(keys) * kPage + 64;
  op.pages = side.floats(size_t(pages * op.page_stride));
  side.compare(op.pages, size_t(pages * op.page_stride), "pages");
  op.page_tokens = kPage;
  op.pages_per_row = kPagesPerRow;
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (size_t i = 0; i < table.size(); ++i) table[i] = int32_t(i * 37 % table.size());
  op.page_table = side.put(table);
  return {op};
}

// Heads of sizes that cuda_attention_test does not have.
TEST_F(CudaTest, AttentionOverPagesAndRings) {
  const AttentionCase cases[] = {
      {"pages", 4, 2, 48}, {"pages, no norm, no positions", 3, 3, 40, 0, 0, false},
      {"pages, 96, one kv head", 8, 1, 96}, {"pages, 256", 2, 2, 256},
      {"ring of 6", 4, 2, 48, 6}, {"ring of 200, 256", 4, 4, 256, 200},
      {"ring of 5, 32", 4, 1, 32, 5, 500, false}};
  for (const AttentionCase& c : cases) {
    same("attention decode, " + c.name, 2e-5,
         [&](Side& side) { return attention_program(side, c, kDecode); });
    same("attention ragged, " + c.name, 2e-5,
         [&](Side& side) { return attention_program(side, c, kRagged); });
  }
}

// Tokens and counts as floats, so that they can be compared like the rest.
struct Drawing {
  std::vector<Token> token, top_token;
  std::vector<float> logprob, top_logprob;
};

Drawing draw(Side& side, const std::vector<Sampling>& how, int32_t vocab,
             const std::vector<Token>& target) {
  const auto count = int32_t(how.size());
  std::vector<int32_t> position, top, edit_begin{0};
  std::vector<LogitEdit> edits;
  for (int32_t i = 0; i < count; ++i) {
    position.push_back(10 + i);
    top.push_back(i % 3 == 0 ? 0 : i % 3 == 1 ? 5 : Sample::kTop);
    for (int32_t j = 0; j < i % 4; ++j) {
      edits.push_back({.token = (7 * j + i) % vocab, .bias = j == 2 ? -INFINITY : 1.5f,
                       .generated = j, .seen = true});
    }
    edit_begin.push_back(int32_t(edits.size()));
  }
  edits.push_back({});
  Sample op{.count = count, .vocab = vocab, .logits = side.acts(count, vocab, 2),
            .sampling = side.put(how), .position = side.put(position), .target = side.put(target),
            .top = side.put(top), .edit_begin = side.put(edit_begin), .edits = side.put(edits)};
  op.token = side.put(std::vector<Token>(how.size(), -7));
  op.logprob = side.put(std::vector<float>(how.size(), 7));
  op.top_token = side.put(std::vector<Token>(how.size() * Sample::kTop, -7));
  op.top_logprob = side.put(std::vector<float>(how.size() * Sample::kTop, 7));
  side.backend().run({op});
  Drawing answer{target, std::vector<Token>(how.size() * Sample::kTop),
                 side.read(op.logprob, how.size()),
                 side.read(op.top_logprob, how.size() * Sample::kTop)};
  side.backend().download(answer.token.data(), op.token, how.size() * sizeof(Token));
  side.backend().download(answer.top_token.data(), op.top_token,
                          answer.top_token.size() * sizeof(Token));
  side.backend().finish();
  for (size_t i = 0; i < how.size(); ++i) {  // what was not asked for has no meaning
    for (size_t j = size_t(top[i]); j < Sample::kTop; ++j) {
      answer.top_token[i * Sample::kTop + j] = -1;
      answer.top_logprob[i * Sample::kTop + j] = 0;
    }
  }
  return answer;
}

TEST_F(CudaTest, SampleDrawsWhatTheCpuDraws) {
  std::vector<Sampling> how;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Sampling s{.seed = seed * 77};
    s.temperature = seed % 5 == 0 ? 0.0f : 0.3f + float(seed % 7) * 0.2f;
    if (seed % 2 == 1) s.top_k = int32_t(seed % 60);
    if (seed % 3 == 1) s.top_p = 0.8f;
    if (seed % 4 == 1) s.min_p = 0.05f;
    if (seed % 6 == 1) s.typical_p = 0.7f;
    if (seed % 7 == 1) s.repetition_penalty = 1.3f;
    if (seed % 7 == 2) s.frequency_penalty = 0.4f;
    if (seed % 7 == 3) s.presence_penalty = 0.6f;
    how.push_back(s);
  }
  std::vector<Token> target(how.size(), -1);
  target[3] = 17;
  target[10] = 0;
  for (const int32_t vocab : {64, 3001}) {
    Side plain(make_cpu_backend({.plain = true}), 9), gpu(cuda(), 9);
    const Drawing a = draw(gpu, how, vocab, target), b = draw(plain, how, vocab, target);
    EXPECT_EQ(a.token, b.token) << vocab;
    EXPECT_EQ(a.top_token, b.top_token) << vocab;
    double worst = 0;
    for (size_t i = 0; i < a.logprob.size(); ++i) {
      worst = std::max(worst, std::fabs(double(a.logprob[i]) - b.logprob[i]));
    }
    for (size_t i = 0; i < a.top_logprob.size(); ++i) {
      if (a.top_logprob[i] == b.top_logprob[i]) continue;  // -inf among them
      worst = std::max(worst, std::fabs(double(a.top_logprob[i]) - b.top_logprob[i]));
    }
    std::printf("sample, vocab %d: log-probabilities differ by at most %.2e\n", vocab, worst);
    EXPECT_LE(worst, 2e-5);
  }
}

}  // namespace
}  // namespace weir
