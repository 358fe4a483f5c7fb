// The CUDA kernels of the small ops around a recurrence, and of sampling's filters, against the
// plain CPU ones.
#include "tests/ops/cuda_steps.h"

namespace weir {
namespace {

constexpr int32_t kSlots = 6;

constexpr Activation kActivations[] = {
    Activation::None,       Activation::Silu,        Activation::Sigmoid,
    Activation::Relu,       Activation::EluPlusOne,  Activation::LogSigmoid,
    Activation::ReluSquared, Activation::GeluTanh,   Activation::Tanh};

TEST_F(CudaTest, ConvolutionOfEveryWidth) {
  for (const int width : {1, 2, 3, 4, 7}) {
    for (const Steps& steps : {kDecode, kRagged, kUneven, kPrompts}) {
      for (const bool bias : {false, true}) {
        same("conv1d, width " + std::to_string(width), 1e-6, [&](Side& side) -> Program {
          const int32_t T = steps.tokens(), C = 300;
          Conv1d op{.rows = steps.put(side), .channels = C, .width = width,
                    .taps = side.floats(size_t(C * width)),
                    .activation = bias ? Activation::Silu : kActivations[size_t(width)],
                    .in = side.acts(T, C)};
          if (bias) op.bias = side.floats(size_t(C));
          // Aligned to 16 bytes or not: prompts of width 4 have a kernel that asks for it.
          const int64_t stride = int64_t(width - 1) * C + (steps.tokens() > 100 ? 8 : 9);
          op.history = {side.floats(size_t(kSlots * stride)), stride};
          side.compare(op.history.data, size_t(kSlots * stride), "history");
          op.out = side.out(T, C, "out");
          return {op};
        });
      }
    }
  }
}

TEST_F(CudaTest, TokenShiftOfEveryStep) {
  for (const Steps& steps : {kDecode, kRagged, kUneven}) {
    for (const int mixes : {1, 6}) {
      same("token_shift, mixes " + std::to_string(mixes), 1e-6, [&](Side& side) -> Program {
        const int32_t T = steps.tokens(), dim = 300;
        TokenShift op{.rows = steps.put(side), .dim = dim, .mixes = mixes,
                      .mix = side.floats(size_t(mixes * dim)), .in = side.acts(T, dim)};
        const int64_t stride = dim + 9;
        op.history = {side.floats(size_t(kSlots * stride)), stride};
        side.compare(op.history.data, size_t(kSlots * stride), "history");
        op.out = side.out(T, mixes * dim, "out");
        return {op};
      });
    }
  }
}

TEST_F(CudaTest, DepthAttentionOverAnySources) {
  for (const int count : {1, 2, 9}) {
    for (const int groups : {1, 3}) {
      for (const bool in_place : {false, true}) {
        same("depth_attention of " + std::to_string(count), 2e-6, [&](Side& side) -> Program {
          const int32_t T = 4, dim = 500, all = groups * dim;
          const int64_t stride = all + 4;
          DepthAttention op{.tokens = T, .groups = groups, .dim = dim, .eps = 1e-5f,
                            .count = count,
                            .sources = {side.floats(size_t(count * T * stride)), stride},
                            .source_stride = T * stride};
          if (count > 1) {  // a model's first mix has no query
            op.query = side.floats(size_t(all), 0.1f);
            op.last_bias = {side.floats(size_t(groups)), 0};
          }
          if (in_place) {
            op.out = op.sources;
            side.compare(op.out.data, size_t(count * T * stride), "sources");
          } else {
            op.out = side.out(T, all, "out");
          }
          return {op};
        });
      }
    }
  }
}

TEST_F(CudaTest, RotaryAtLatePositions) {
  for (const int32_t first : {0, 5, 100000}) {
    same("rotary from " + std::to_string(first), 1e-6, [&](Side& side) -> Program {
      const Steps steps{{2, kPadding, 4}, {first, 3, 7}, {0, 5, 8, 70}};
      const Acts x = side.acts(70, 3 * 40);
      side.compare(x.data, size_t(70 * x.stride), "x");
      return {Rotary{.rows = steps.put(side), .heads = 3, .dim = 40, .theta = 10000, .x = x}};
    });
  }
}

TEST_F(CudaTest, EveryElementwiseFunction) {
  using Function = Elementwise::Function;
  const auto check = [](const std::string& what, Elementwise op, bool table, float low,
                        float high) {
    same("elementwise " + what, 2e-6, [&](Side& side) -> Program {
      op.tokens = 5, op.dim = 700;
      std::vector<float> a = side.normal(700);
      for (float& value : a) value = low + (high - low) / (1 + std::exp(-value));
      if (table) a[3] = low, op.a = side.put(a);
      op.b = side.floats(700);
      op.x = side.acts(5, 700, 5);
      op.y = side.acts(5, 700);
      op.z = side.acts(5, 700);
      op.out = side.out(5, 700, "out");
      return {op};
    });
  };
  for (const Activation activation : kActivations) {
    check("activation " + std::to_string(int(activation)), {.activation = activation}, false, 0, 0);
  }
  check("log decay", {.function = Function::LogDecay, .divisor = 16}, false, 0, 0);
  check("log decay above", {.function = Function::LogDecay, .divisor = 2, .floor = -1.5f}, false,
        0, 0);
  check("bounded log decay", {.function = Function::BoundedLogDecay}, true, 0, 1);
  check("one minus exp", {.function = Function::OneMinusExp}, false, 0, 0);
  check("softplus step", {.function = Function::SoftplusStep}, true, -2, 3);
  check("softplus step within", {.function = Function::SoftplusStep, .floor = 0.1f, .ceiling = 4},
        true, -2, 3);
  check("sigmoid decay", {.function = Function::SigmoidDecay, .floor = -0.6f}, false, 0, 0);
  check("softplus decay", {.function = Function::SoftplusDecay}, true, 0.1f, 3);
  for (const Function function : {Function::Scale, Function::AddScaled, Function::Multiply,
                                  Function::ScaleTowards, Function::Blend}) {
    check("function " + std::to_string(int(function)), {.function = function}, true, -2, 2);
  }
}

TEST_F(CudaTest, EveryFeatureMap) {
  using Kind = FeatureMap::Kind;
  for (const int dim : {10, 128}) {
    for (const Kind kind : {Kind::Copy, Kind::Softmax, Kind::RowLinear, Kind::RowProduct,
                            Kind::SoftmaxPair, Kind::Dpfp}) {
      for (const bool normalise : {false, true}) {
        const std::string what = "feature_map " + std::to_string(int(kind)) + " of " +
                                 std::to_string(dim) + (normalise ? ", normalised" : "");
        same(what, 3e-6, [&](Side& side) -> Program {
          const int32_t T = 3, heads = 5;
          FeatureMap op{.tokens = T, .heads = heads, .dim = dim, .kind = kind,
                        .activation = normalise ? Activation::Relu : Activation::None,
                        .normalise = normalise, .in = side.acts(T, heads * dim)};
          const auto square = size_t(dim * dim);
          const float scale = 1 / std::sqrt(float(dim));
          op.weight = side.floats(square, scale);
          op.weight2 = side.floats(square, scale);
          if (normalise) {
            op.bias = side.floats(size_t(dim));
            op.bias2 = side.floats(size_t(dim));
          }
          op.out = side.out(T, heads * dim * FeatureMap::expansion(kind), "out");
          return {op};
        });
      }
    }
  }
}

TEST_F(CudaTest, HeadNormOfEveryKindAndSize) {
  using Kind = HeadNorm::Kind;
  for (const int dim : {20, 128, 512, 1500, 9000}) {
    for (const Kind kind : {Kind::None, Kind::Rms, Kind::Centred, Kind::L2}) {
      for (const int form : {0, 1, 2}) {  // no gate, gate first, gate last and a sum
        const std::string what = "head_norm " + std::to_string(int(kind)) + " of " +
                                 std::to_string(dim) + ", form " + std::to_string(form);
        same(what, 2e-6, [&](Side& side) -> Program {
          const int32_t T = 3, groups = 2, all = groups * dim;
          HeadNorm op{.tokens = T, .groups = groups, .dim = dim, .eps = 1e-5f, .kind = kind,
                      .activation = form == 0 ? Activation::Silu : Activation::None,
                      .weight = side.floats(size_t(all)), .weight_per_group = form == 1};
          if (kind == Kind::Centred) op.bias = side.floats(size_t(all));
          if (form > 0) op.gate = side.acts(T, all);
          op.gate_first = form == 1;
          if (form == 2) op.add = side.acts(T, all);
          op.in = side.acts(T, all);
          op.out = op.in;
          side.compare(op.in.data, size_t(T * op.in.stride), "in place");
          return {op};
        });
      }
    }
  }
}

// Draws of one shape of logits under many filters: the CPU's tokens.
void draws_agree(const std::string& what, int32_t vocab,
                 const std::vector<std::vector<float>>& logits, std::vector<Sampling> how) {
  std::vector<std::vector<Token>> drawn;
  for (const bool on_cuda : {false, true}) {
    std::string error;
    Side side(on_cuda ? make_cuda_backend(0, &error) : make_cpu_backend({.plain = true}), 1);
    const size_t count = how.size();
    std::vector<float> all;
    std::vector<int32_t> position, edit_begin = {0};
    std::vector<LogitEdit> edits;
    std::vector<Token> last;  // in every other row the edits know an earlier one of it
    for (size_t i = 0; i < count; ++i) {
      const std::vector<float>& one = logits[i % logits.size()];
      all.insert(all.end(), one.begin(), one.end());
      position.push_back(int32_t(i) + 3);
      last.push_back(Token(std::ranges::max_element(one) - one.begin()));
      edits.push_back({.token = (last.back() + 1) % vocab, .generated = 3, .seen = true});
      if (i % 2 == 0) edits.push_back({.token = last.back(), .generated = 1});
      edit_begin.push_back(int32_t(edits.size()));
    }
    std::vector<int32_t> counts(count);
    for (size_t i = 0; i < count; ++i) counts[i] = int32_t(i);
    Sample op{.count = int32_t(count), .vocab = vocab, .logits = {side.put(all), vocab},
              .sampling = side.put(how), .position = side.put(position),
              .target = side.put(std::vector<Token>(count, -1)),
              .top = side.put(std::vector<int32_t>(count, 0)),
              .edit_begin = side.put(edit_begin), .edits = side.put(edits),
              .read = side.put(last), .counts = side.put(counts),
              .token = side.put(std::vector<Token>(count)),
              .logprob = side.put(std::vector<float>(count)),
              .top_token = side.put(std::vector<Token>(count * Sample::kTop)),
              .top_logprob = side.put(std::vector<float>(count * Sample::kTop))};
    side.backend().run({op});
    drawn.emplace_back(count);
    side.backend().download(drawn.back().data(), op.token, count * sizeof(Token));
    side.backend().finish();
  }
  size_t different = 0;
  for (size_t i = 0; i < how.size(); ++i) different += drawn[0][i] != drawn[1][i];
  std::printf("sample, %s: %zu of %zu draws differ\n", what.c_str(), different, how.size());
  EXPECT_EQ(drawn[1], drawn[0]) << what;
}

// Filters whose last token lies among many like it: spread and equal logits, outliers, large sets.
TEST_F(CudaTest, SampleFiltersOfAnyLogits) {
  constexpr int32_t kVocab = 32000;
  Side numbers(make_cpu_backend({.plain = true}), 21);
  std::vector<float> plain = numbers.normal(kVocab, 3), flat(kVocab, 0.5f);
  std::vector<float> steps = plain, outliers = plain, narrow = numbers.normal(kVocab, 1e-3f);
  for (float& x : steps) x = std::floor(x);  // many equal ones
  for (int i = 0; i < kVocab; i += 97) outliers[size_t(i)] = i % 2 == 0 ? -1e30f : -INFINITY;
  outliers[77] = 60;
  std::vector<Sampling> how;
  for (uint64_t seed = 0; seed < 24; ++seed) {
    Sampling s{.temperature = 0.5f + float(seed % 5) * 0.3f, .seed = 1000 + seed * 7919};
    if (seed % 3 == 0) s.top_k = seed % 2 == 0 ? 50 : 20000;
    if (seed % 4 != 1) s.top_p = 0.1f + float(seed % 9) * 0.1f;
    if (seed % 5 == 2) s.min_p = 0.02f;
    if (seed % 6 == 3) s.typical_p = 0.6f;
    if (seed % 7 < 3) s.repetition_penalty = 1.3f;
    if (seed % 7 < 2) s.presence_penalty = 2;
    how.push_back(s);
  }
  draws_agree("normal", kVocab, {plain}, how);
  draws_agree("whole numbers", kVocab, {steps}, how);
  draws_agree("outliers", kVocab, {outliers}, how);
  for (const int32_t vocab : {2, 33, 3001}) {
    draws_agree(std::to_string(vocab) + " tokens", vocab,
                {{plain.begin(), plain.begin() + vocab}, {steps.begin(), steps.begin() + vocab}},
                how);
  }
  for (Sampling& s : how) s.typical_p = 1;  // all equally typical, but for rounding
  draws_agree("nearly equal", kVocab, {narrow}, how);
  for (Sampling& s : how) s.top_p = s.top_p < 1 ? 0.37f : 1;
  draws_agree("all equal", kVocab, {flat}, how);
}

// What a Sample that only draws answers: no edits, no alternatives.
struct Draws {
  std::vector<Token> token;
  std::vector<float> logprob;
};
Draws draw_all(Side& side, int32_t vocab, int32_t stride, const std::vector<float>& logits,
               const std::vector<Sampling>& how, const std::vector<Token>& target) {
  const size_t count = how.size();
  std::vector<int32_t> position;
  for (size_t i = 0; i < count; ++i) position.push_back(int32_t(i) + 3);
  Sample op{.count = int32_t(count), .vocab = vocab, .logits = {side.put(logits), stride},
            .sampling = side.put(how), .position = side.put(position),
            .target = side.put(target), .top = side.put(std::vector<int32_t>(count, 0)),
            .edit_begin = side.put(std::vector<int32_t>(count + 1, 0)),
            .edits = side.put(std::vector<LogitEdit>(1)),
            .token = side.put(std::vector<Token>(count, -7)),
            .logprob = side.put(std::vector<float>(count, 7)),
            .top_token = side.put(std::vector<Token>(count * Sample::kTop)),
            .top_logprob = side.put(std::vector<float>(count * Sample::kTop))};
  side.backend().run({op});
  Draws draws{std::vector<Token>(count), side.read(op.logprob, count)};
  side.backend().download(draws.token.data(), op.token, count * sizeof(Token));
  side.backend().finish();
  return draws;
}

// Rows that are drawn from as they come have a kernel of their own up to 32,768 tokens: a warp's
// run that ends elsewhere, tokens left out or twice, equal logits, one far above all others,
// numbers that are none, a draw at a warp's or a group's first and last token.
TEST_F(CudaTest, SampleDrawsFromRowsAsTheyCome) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Side on_cuda(cuda(), 1), on_cpu(make_cpu_backend({.plain = true}), 1);
  for (const int32_t vocab : {1, 2, 31, 32, 33, 1000, 3001, 32000, 32767, 32768, 32769, 50000}) {
    Side numbers(make_cpu_backend({.plain = true}), 22);
    const int32_t stride = vocab + 5;
    const size_t rows = 80;
    std::vector<float> logits;
    std::vector<Sampling> how;
    std::vector<Token> target;
    for (size_t i = 0; i < rows; ++i) {
      std::vector<float> one = numbers.normal(size_t(stride), i % 4 == 0 ? 1e-3f : 3.0f);
      if (i % 5 == 1) {
        for (float& x : one) x = std::floor(x);
      }
      if (i % 7 == 2) one[i * 7919 % size_t(vocab)] = 40;
      if (i % 11 == 3) {
        for (size_t j = 0; j < size_t(vocab); ++j) one[j] = j % 3 == 0 ? one[j] : -kInfinity;
      }
      if (i == 20) one[size_t(vocab) / 2] = std::nanf("");
      if (i == 21) one[size_t(vocab) - 1] = kInfinity;
      if (i == 22) std::fill(one.begin(), one.end(), -kInfinity);
      if (i == 23) std::fill(one.begin(), one.end(), -3e38f), one[size_t(vocab) - 1] = 3e38f;
      one[size_t(vocab)] = 1e9f;  // beyond the row
      logits.insert(logits.end(), one.begin(), one.end());
      Sampling s{.temperature = i % 3 == 0 ? 1.0f : 0.4f + float(i % 8) * 0.2f, .seed = i * 7919};
      if (i % 6 == 4) s.temperature = 0;
      if (i % 9 == 5) s.min_p = 0.03f;
      if (i % 40 == 7) s.temperature = 1e-39f;
      how.push_back(s);
      target.push_back(i % 13 == 6 ? Token(i * 31 % size_t(vocab)) : -1);
    }
    const Draws gpu = draw_all(on_cuda, vocab, stride, logits, how, target),
                cpu = draw_all(on_cpu, vocab, stride, logits, how, target);
    EXPECT_EQ(gpu.token, cpu.token) << vocab;
    for (size_t i = 0; i < rows; ++i) {
      if (gpu.logprob[i] == cpu.logprob[i]) continue;  // -infinity among them
      EXPECT_NEAR(gpu.logprob[i], cpu.logprob[i], 2e-5) << vocab << ", row " << i;
    }
  }
}

}  // namespace
}  // namespace weir
