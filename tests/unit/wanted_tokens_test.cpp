// Of the last layer only what the head reads is computed: how many tokens each matrix sees.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/lower.h"
#include "engine/read_spec.h"
#include "engine/weights.h"

namespace weir {
namespace {

struct Seen {
  std::vector<int32_t> linear;  // tokens of each Linear, in turn
  int gathers = 0;
};

Seen seen(const std::string& name, const StepShape& shape) {
  const auto spec = read_spec_folder(std::string(WEIR_SOURCE_DIR) + "/tests/vectors/" + name);
  EXPECT_TRUE(spec.ok()) << spec.status();
  Workspace workspace;
  Seen seen;
  for (const Op& op : lower(*spec, weight_shapes(*spec), nullptr, {}, {}, shape, workspace)) {
    if (const auto* linear = std::get_if<Linear>(&op)) seen.linear.push_back(linear->tokens);
    seen.gathers += std::holds_alternative<Gather>(op);
  }
  return seen;
}

// Two layers of in, out, gate with up, down; then the head.
TEST(WantedTokens, OfTheLastLayer) {
  const Seen few = seen("gated-deltanet", {.rows = 2, .tokens = 9, .outputs = 3});
  EXPECT_EQ(few.linear, (std::vector<int32_t>{9, 9, 9, 9, 9, 3, 3, 3, 3}));
  EXPECT_EQ(few.gathers, 2);  // of what the mixer answers, and of the residual stream
  const Seen all = seen("gated-deltanet", {.rows = 9, .tokens = 9, .outputs = 9});
  EXPECT_EQ(all.linear, (std::vector<int32_t>{9, 9, 9, 9, 9, 9, 9, 9, 9}));
  EXPECT_EQ(all.gathers, 0);  // all that there are, in their order
  const Seen none = seen("gated-deltanet", {.rows = 2, .tokens = 9, .outputs = 0});
  EXPECT_EQ(none.linear, (std::vector<int32_t>{9, 9, 9, 9, 9}));
  EXPECT_EQ(none.gathers, 0);
}

// Where a last layer's MLP leaves what the next step reads, every token goes through it.
TEST(WantedTokens, AllWhereTheMlpRemembers) {
  const Seen few = seen("rwkv7", {.rows = 2, .tokens = 9, .outputs = 3});
  EXPECT_EQ(std::count(few.linear.begin(), few.linear.end(), 3), 1);
  EXPECT_EQ(few.linear.back(), 3);
  EXPECT_EQ(few.gathers, 1);
}

}  // namespace
}  // namespace weir
