// The shapes that steps are padded to: one that does not fit the buffers of a step, a padding row
// without a token, answers that get lost, or so many shapes that their graphs never repeat.
#include "engine/padded_shape.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>

namespace weir {
namespace {

class Chance {
 public:
  int32_t pick(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random_);
  }

 private:
  std::mt19937 random_{11};
};

TEST(PaddedShape, FitsAStepAndLosesNothing) {
  Chance chance;
  int padded_steps = 0;
  for (int i = 0; i < 200'000; ++i) {
    Limits limits{.slots = chance.pick(1, 300)};
    limits.step_tokens = limits.slots + chance.pick(0, chance.pick(0, 2000));
    const int32_t rows = chance.pick(1, limits.slots);
    const int32_t most = std::min(limits.step_tokens, rows + chance.pick(0, 1500));
    const int32_t tokens = chance.pick(rows, most);
    const int32_t longer = tokens > rows ? chance.pick(1, std::min(rows, tokens - rows)) : -1;
    const int32_t singles = tokens > rows ? (longer == rows ? 0 : chance.pick(1, rows)) : -1;
    const StepShape shape{rows, tokens, chance.pick(0, tokens), singles, longer};
    const StepShape padded = padded_shape(shape, limits);
    ASSERT_GE(padded.rows, rows);
    ASSERT_LE(padded.rows, limits.slots + kStepPadding);
    ASSERT_LE(padded.tokens, limits.step_tokens);
    ASSERT_GE(padded.outputs, shape.outputs);
    ASSERT_LE(padded.outputs, padded.tokens);
    ASSERT_GE(padded.tokens - tokens, padded.rows - rows);  // a token a row of padding at least
    ASSERT_TRUE(padded.tokens == tokens || padded.rows > rows);
    ASSERT_TRUE(shape.outputs > 0 || padded.outputs == 0);
    // What is known of the rows stays true, or is forgotten.
    ASSERT_TRUE(padded.longer == -1 || padded.longer >= longer);
    ASSERT_TRUE(padded.singles == -1 || padded.singles >= singles);
    padded_steps += padded == shape ? 0 : 1;
  }
  EXPECT_GT(padded_steps, 50'000);
}

// A server of 128 slots and 512 tokens a step, whatever decodes beside whatever is read.
TEST(PaddedShape, AreFewUnderLoad) {
  const Limits limits{.slots = 128, .step_tokens = 512, .padding = kStepPadding};
  Chance chance;
  std::set<std::tuple<int32_t, int32_t, int32_t, int32_t>> shapes;
  for (int i = 0; i < 100'000; ++i) {
    const int32_t decoding = chance.pick(1, 127), prompts = chance.pick(1, 128 - decoding);
    const int32_t most = limits.step_tokens - limits.padding - decoding;
    const int32_t tokens = chance.pick(std::min(2 * prompts, most), most);
    const int32_t ended = chance.pick(0, prompts);
    const StepShape padded = padded_shape({decoding + prompts, decoding + tokens,
                                           decoding + ended, decoding, prompts}, limits);
    ASSERT_TRUE(padded.longer == -1 || padded.longer >= prompts);
    ASSERT_EQ(padded.singles, -1);
    shapes.emplace(padded.rows, padded.tokens, padded.outputs, padded.longer);
  }
  EXPECT_LE(shapes.size(), 640u);  // 512 graphs are kept; unpadded there are 90,000
}

TEST(PaddedShape, APromptByItselfAndLargeStepsAreLeftAlone) {
  const Limits limits{.slots = 64, .step_tokens = 4096};
  for (const StepShape& shape : {StepShape{1, 300, 1}, {3, 1025, 3}, {2, 5, 5}, {4, 4, 2}}) {
    if (shape.rows == 2) {
      EXPECT_EQ(padded_shape(shape, limits), (StepShape{8, 16, 8}));
    } else {
      EXPECT_EQ(padded_shape(shape, limits), shape);
    }
  }
}

}  // namespace
}  // namespace weir
