// The CUDA kernels of the dense ops against the plain CPU ones, and the backend's replay.
#include "tests/ops/cuda_compare.h"

namespace weir {
namespace {

TEST_F(CudaTest, EmbedWidensEveryDtype) {
  for (const DType dtype : {DType::F32, DType::BF16, DType::F16}) {
    same("embed dtype " + std::to_string(int(dtype)), 0, [&](Side& side) -> Program {
      const Matrix table = side.matrix(50, 300, dtype);
      const Token* ids = side.put(std::vector<Token>{3, 49, 0, ~1, 3, ~0, ~2});
      const Token* drawn = side.put(std::vector<Token>{17, 48, -1});
      return {Embed{.tokens = 7, .ids = ids, .drawn = drawn, .table = table,
                    .out = side.out(7, 300, "out")}};
    });
  }
}

TEST_F(CudaTest, GatherTakesTheAskedTokens) {
  same("gather", 0, [](Side& side) -> Program {
    const int32_t* index = side.put(std::vector<int32_t>{6, 0, 3});
    return {Gather{.count = 3, .dim = 1000, .index = index, .in = side.acts(7, 1000),
                   .out = side.out(3, 1000, "out")}};
  });
}

TEST_F(CudaTest, RmsNormOfShortAndLongVectors) {
  const auto check = [&](int tokens, int dim) {
    same("rms_norm " + std::to_string(dim), 1e-6, [&](Side& side) -> Program {
      return {RmsNorm{.tokens = tokens, .dim = dim, .eps = 1e-6f,
                      .weight = side.floats(size_t(dim)), .in = side.acts(tokens, dim),
                      .out = side.out(tokens, dim, "out")}};
    });
  };
  for (const int dim : {32, 2048, 5000}) check(3, dim);
  for (const int dim : {96, 2048}) check(2100, dim);  // small blocks
}

TEST_F(CudaTest, SwigluInPlaceAndBeside) {
  same("swiglu", 1e-6, [](Side& side) -> Program {
    const Acts gate = side.acts(5, 700), up = side.acts(5, 700);
    const Acts out = side.out(5, 700, "out");
    return {Swiglu{.tokens = 5, .dim = 700, .gate = gate, .up = up, .out = out}};
  });
}

struct LinearCase {
  int in;
  std::vector<int> rows;
  DType dtype = DType::BF16;
};

// With a bias on every other part; y is an input too when it accumulates.
Program linear_of(Side& side, const LinearCase& c, int tokens, bool accumulate) {
  Linear op{.tokens = tokens, .in = c.in, .accumulate = accumulate};
  int rows = 0;
  for (const int r : c.rows) {
    if (op.parts % 2 == 1) op.bias[size_t(op.parts)] = side.floats(size_t(r));
    op.part[size_t(op.parts++)] = side.matrix(r, c.in, c.dtype);
    rows += r;
  }
  op.x = side.acts(tokens, c.in);
  op.y = accumulate ? side.acts(tokens, rows) : side.out(tokens, rows, "y");
  if (accumulate) side.compare(op.y.data, size_t(tokens * op.y.stride), "y");
  return {op};
}

// Odd numbers of rows and columns, parts that end inside a tile, several dtypes, every kernel.
class LinearTest : public CudaTest {
 protected:
  void every_kernel(bool accumulate) {
    const LinearCase cases[] = {{2048, {512, 16, 16, 256}}, {5632, {256}}, {40, {30, 7, 300}},
                                {32, {128}}, {37, {19, 300}}, {256, {64, 30}, DType::F16},
                                {256, {64, 30}, DType::F32}};
    for (const LinearCase& c : cases) {
      for (const int tokens : {1, 5, 8, 13, 32, 50, 64, 70, 128, 200}) {
        const std::string what = "linear " + std::to_string(c.in) + " dtype " +
                                 std::to_string(int(c.dtype)) + " tokens " +
                                 std::to_string(tokens) + (accumulate ? " accumulate" : "");
        same(what, 2e-5, [&](Side& side) { return linear_of(side, c, tokens, accumulate); });
      }
    }
  }
};
TEST_F(LinearTest, OfEveryKernel) { every_kernel(false); }
TEST_F(LinearTest, OfEveryKernelAddsToWhatIsThere) { every_kernel(true); }

// Every width of tile, and every number of blocks that share the columns.
TEST_F(CudaTest, LinearOfEveryTiling) {
  const LinearCase cases[] = {{2048, {2048, 2048, 2048, 16, 16, 2048}}, {2048, {2048}},
                              {2048, {5632, 5632}}, {5632, {2048}},
                              {2048, {6144, 128, 16, 128}}, {2816, {1024}}, {128, {2048}},
                              {1024, {5000}}, {512, {9999}}};
  for (const LinearCase& c : cases) {
    for (const int tokens : {2, 66}) {
      if (tokens > 2 && c.in > 1024) continue;  // the CPU's share of the time
      same("linear " + std::to_string(c.in) + " to " + std::to_string(c.rows[0]) + " tokens " +
               std::to_string(tokens),
           2e-5, [&](Side& side) { return linear_of(side, c, tokens, false); });
    }
  }
}

TEST_F(LinearTest, OfEveryWideTile) {
  for (const int rows : {18900, 23000, 27000, 32000}) {
    same("linear 64 to " + std::to_string(rows), 2e-5,
         [&](Side& side) { return linear_of(side, {64, {rows}}, 66, false); });
  }
}

// With vectors rounded to bf16: 2^-9 of each number at most, about 2e-3 of a random vector's.
TEST_F(CudaTest, LinearOfBf16Vectors) {
  const LinearCase cases[] = {{2048, {512, 16, 16, 256}}, {40, {30, 7, 300}}};
  for (const LinearCase& c : cases) {
    for (const int tokens : {1, 32, 128, 200}) {
      same("linear " + std::to_string(c.in) + ", bf16 vectors, tokens " + std::to_string(tokens),
           3e-3, [&](Side& side) { return linear_of(side, c, tokens, false); },
           {.bf16_vectors = true});
    }
  }
}

// A norm and a gate leave their output split for the Linear after them: the same numbers as when it
// splits them itself, also when the one after next reads other vectors.
TEST_F(CudaTest, LinearReadsWhatTheOpBeforeLeftSplit) {
  for (const int tokens : {1, 13, 70, 150}) {
    same("norm, linear, gate, linear, tokens " + std::to_string(tokens), 2e-5,
         [&](Side& side) -> Program {
           const Acts x = side.acts(tokens, 512), normed = side.out(tokens, 512, "normed");
           const Acts hidden = side.out(tokens, 1200, "hidden"), y = side.out(tokens, 512, "y");
           const Acts again = side.out(tokens, 300, "again");
           const Matrix up = side.matrix(1200, 512, DType::BF16);
           const Matrix down = side.matrix(512, 600, DType::BF16);
           const Matrix other = side.matrix(300, 512, DType::BF16);
           return {RmsNorm{.tokens = tokens, .dim = 512, .eps = 1e-6f,
                           .weight = side.floats(512), .in = x, .out = normed},
                   Linear{.tokens = tokens, .in = 512, .parts = 1, .part = {up}, .x = normed,
                          .y = hidden},
                   Swiglu{.tokens = tokens, .dim = 600, .gate = hidden, .up = hidden.from(600),
                          .out = hidden},
                   Linear{.tokens = tokens, .in = 600, .parts = 1, .part = {down}, .x = hidden,
                          .y = y},
                   Linear{.tokens = tokens, .in = 512, .parts = 1, .part = {other}, .x = normed,
                          .y = again}};
         });
  }
}

// The kernel for prompts: as many tiles of 256 tokens x 192 rows as a card has multiprocessors, so
// few columns; a last tile of tokens and one of rows that are not full, columns that end inside a
// stage, and a second part with a bias.
TEST_F(CudaTest, LinearOfPrompts) {
  struct Case {
    LinearCase linear;
    int tokens;
    bool accumulate, bf16_vectors;
  };
  for (const Case& c : {Case{{64, {2556, 2560}}, 3228, false, false},
                        {{64, {2556, 2560}}, 3228, false, true},
                        {{200, {2560}}, 3300, true, false},
                        {{320, {256}}, 16540, false, true}}) {
    same("linear " + std::to_string(c.linear.in) + ", tokens " + std::to_string(c.tokens),
         c.bf16_vectors ? 3e-3 : 2e-5,
         [&](Side& side) { return linear_of(side, c.linear, c.tokens, c.accumulate); },
         {.bf16_vectors = c.bf16_vectors});
  }
}

struct MlpCase {
  int dim, hidden;
};

// A norm, gate and up, SwiGLU, down, as a layer has them: nobody else reads what passes between.
Program mlp_of(Side& side, const MlpCase& c, int tokens) {
  const Acts x = side.acts(tokens, c.dim), normed = side.acts(tokens, c.dim);
  const Acts hidden = side.acts(tokens, 2 * int64_t(c.hidden));
  const Acts y = side.acts(tokens, c.dim);
  side.compare(y.data, size_t(tokens * y.stride), "y");
  return {RmsNorm{.tokens = tokens, .dim = c.dim, .eps = 1e-6f,
                  .weight = side.floats(size_t(c.dim)), .in = x, .out = normed, .read_once = true},
          Linear{.tokens = tokens, .in = c.dim, .parts = 2,
                 .part = {side.matrix(c.hidden, c.dim, DType::BF16),
                          side.matrix(c.hidden, c.dim, DType::BF16)},
                 .x = normed, .y = hidden},
          Swiglu{.tokens = tokens, .dim = c.hidden, .gate = hidden,
                 .up = hidden.from(c.hidden), .out = hidden, .read_once = true},
          Linear{.tokens = tokens, .in = c.hidden, .parts = 1,
                 .part = {side.matrix(c.dim, c.hidden, DType::BF16)}, .accumulate = true,
                 .x = hidden, .y = y}};
}

// Two of them, one after the other.
Program mlp_twice(Side& side, const MlpCase& c, int tokens) {
  Program both = mlp_of(side, c, tokens), second = mlp_of(side, c, tokens);
  const Acts residual = std::get<Linear>(both.back()).y;
  std::get<RmsNorm>(second.front()).in = std::get<Linear>(second.back()).y = residual;
  both.insert(both.end(), second.begin(), second.end());
  return both;
}

// The gate in the epilogue of its matrices: sizes of several tilings, rows that end inside a tile,
// some that do not fit (36 is no multiple of eight, 200 tokens are too many).
TEST_F(CudaTest, SwigluWithTheLinearsAroundIt) {
  for (const MlpCase& c :
       {MlpCase{2048, 5632}, {1024, 2816}, {512, 600}, {64, 36}, {64, 8}, {64, 11000}}) {
    for (const int tokens : {1, 8, 13, 64, 70, 128, 200}) {
      // The CPU's share of the time.
      if (tokens != 13 && (c.dim > 512 || c.hidden > 600)) continue;
      same("mlp " + std::to_string(c.dim) + " x " + std::to_string(c.hidden) + " tokens " +
               std::to_string(tokens),
           2e-5, [&](Side& side) { return mlp_of(side, c, tokens); });
    }
  }
}

TEST_F(CudaTest, SwigluWithTheLinearsAroundItInBf16) {
  same("mlp, bf16 vectors", 5e-3, [&](Side& side) { return mlp_of(side, {512, 600}, 70); },
       {.bf16_vectors = true});
  // Gate and up rounded on the way; 36 is no multiple of eight.
  for (const MlpCase& c : {MlpCase{512, 600}, {1024, 2816}, {512, 36}}) {
    for (const int tokens : {129, 200}) {
      same("mlp, bf16 vectors, " + std::to_string(c.hidden) + ", tokens " + std::to_string(tokens),
           5e-3, [&](Side& side) { return mlp_of(side, c, tokens); }, {.bf16_vectors = true});
    }
  }
}

// The norm between two of them in what comes before and after: its input is what the Linear before
// it has made.
TEST_F(CudaTest, NormBetweenTwoMlps) {
  for (const int tokens : {1, 9, 64, 100, 128}) {
    same("mlp twice, tokens " + std::to_string(tokens), 2e-5,
         [&](Side& side) { return mlp_twice(side, {512, 600}, tokens); });
  }
}

// The gate by the kernel for prompts, and with split vectors the matrix after it.
TEST_F(CudaTest, MlpOfPrompts) {
  for (const bool bf16 : {false, true}) {
    same(bf16 ? "mlp, bf16 vectors, a prompt" : "mlp, a prompt", bf16 ? 5e-3 : 2e-5,
         [&](Side& side) { return mlp_twice(side, {256, 136}, 16540); }, {.bf16_vectors = bf16});
  }
}

// The same numbers for a token among few others and among many, fused gate and norm and all. (Up to
// four tokens are the resident kernel's.)
TEST_F(CudaTest, MlpOfATokenInAnyCompany) {
  Side side(cuda(), 3);
  Program program = mlp_of(side, {1024, 2816}, 128), again = program;
  const Acts y = std::get<Linear>(program.back()).y;
  std::get<RmsNorm>(again.front()).in = y;  // the norm between two of them
  program.insert(program.end(), again.begin(), again.end());
  const auto floats = size_t(128 * y.stride);
  const std::vector<float> before = side.read(y.data, floats);
  std::vector<float> alone;
  for (const int tokens : {5, 9, 16, 33, 64, 65, 100, 128}) {
    for (Op& op : program) {
      std::visit([&](auto& o) {
        if constexpr (requires { o.tokens; }) o.tokens = tokens;
      }, op);
    }
    side.backend().upload(y.data, before.data(), floats * sizeof(float));
    side.backend().run(program);
    const std::vector<float> first = side.read(y.data, 1024);
    if (alone.empty()) alone = first;
    EXPECT_EQ(alone, first) << tokens;
  }
}

// Parts adopted one after the other are one matrix to the library.
TEST_F(CudaTest, LinearOfAdoptedNeighbours) {
  std::vector<std::vector<uint16_t>> kept;
  same("linear, adopted parts, 160 tokens", 2e-5, [&](Side& side) -> Program {
    Linear op{.tokens = 160, .in = 512, .parts = 3};
    for (size_t p = 0; p < 3; ++p) {
      const size_t rows = p == 1 ? 64 : 512;
      const std::vector<float> values = side.normal(rows * 512, 0.04f);
      kept.emplace_back();
      for (const float value : values) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        kept.back().push_back(uint16_t(bits >> 16));
      }
      op.part[p] = {.data = side.backend().adopt(kept.back().data(), rows * 512 * 2),
                    .rows = int32_t(rows), .cols = 512, .dtype = DType::BF16};
    }
    op.x = side.acts(160, 512);
    op.y = side.out(160, 512 + 64 + 512, "y");
    return {op};
  });
}

// A token's numbers must not change with the tokens beside it: bit for bit up to 128 tokens, beyond
// which the library takes over.
TEST_F(CudaTest, LinearOfATokenAloneAndInCompany) {
  Side side(cuda(), 3);
  const Matrix matrix = side.matrix(700, 2048, DType::BF16);
  const Acts x = side.acts(128, 2048);
  std::vector<float> alone;
  for (const int tokens : {1, 2, 8, 11, 16, 33, 64, 65, 128}) {
    const Acts y = side.out(tokens, 700, "y");
    const Program program{
        Linear{.tokens = tokens, .in = 2048, .parts = 1, .part = {matrix}, .x = x, .y = y}};
    side.backend().run(program);
    const std::vector<float> first = side.read(y.data, 700);
    if (alone.empty()) alone = first;
    EXPECT_EQ(alone, first) << tokens;
  }
}

// The first run launches, the second records, the third replays; a changed op is seen.
TEST_F(CudaTest, ReplayComputesWhatTheFirstRunDid) {
  Side side(cuda(), 5);
  const Acts x = side.acts(4, 256), h = side.out(4, 512, "h"), y = side.acts(4, 256);
  const std::vector<float> before = side.read(y.data, size_t(4 * y.stride));
  const float* weight = side.floats(256);
  const Matrix up = side.matrix(512, 256, DType::BF16), down = side.matrix(256, 256, DType::BF16);
  Program program{
      RmsNorm{.tokens = 4, .dim = 256, .eps = 1e-6f, .weight = weight, .in = x, .out = x},
      Linear{.tokens = 4, .in = 256, .parts = 1, .part = {up}, .x = x, .y = h},
      Swiglu{.tokens = 4, .dim = 256, .gate = h, .up = h.from(256), .out = h},
      Linear{.tokens = 4, .in = 256, .parts = 1, .part = {down}, .x = h, .y = y}};
  const std::vector<float> input = side.read(x.data, size_t(4 * x.stride));
  std::vector<float> results[4];
  for (auto& result : results) {
    side.backend().upload(x.data, input.data(), input.size() * sizeof(float));
    side.backend().upload(y.data, before.data(), before.size() * sizeof(float));
    side.backend().run(program);
    result = side.read(y.data, before.size());
  }
  EXPECT_NE(results[0], before);
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
  std::get<Linear>(program.back()).accumulate = true;
  side.backend().upload(x.data, input.data(), input.size() * sizeof(float));
  side.backend().run(program);
  EXPECT_NE(side.read(y.data, before.size()), results[0]);
}

TEST_F(CudaTest, CopiesOfEverySize) {
  Side side(cuda(), 1);
  for (const size_t count : {size_t(1), size_t(1000), size_t(3) << 20, size_t(9) << 20}) {
    const std::vector<float> values = side.normal(count);
    float* a = side.put(values);
    auto* b = static_cast<float*>(side.backend().allocate(count * sizeof(float)));
    EXPECT_EQ(side.read(b, count), std::vector<float>(count, 0.0f));
    side.backend().copy(b, a, count * sizeof(float));
    EXPECT_EQ(side.read(b, count), values);
  }
}

TEST(CudaBackend, AbsentDeviceIsNamed) {
  std::string error;
  EXPECT_EQ(make_cuda_backend(1000, &error), nullptr);
  EXPECT_NE(error, "");
}

}  // namespace
}  // namespace weir
