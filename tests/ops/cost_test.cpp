// Floors that are not plain from the op's sizes.
#include <gtest/gtest.h>

#include "kernels/op.h"

namespace weir {
namespace {

// On average over a head's turns, and of rows of one token alone.
TEST(Cost, DeferredWritesMoveLess) {
  float memory = 0;
  DeltaMix op{.rows = {.count = 4, .tokens = 4}, .key_heads = 3, .value_heads = 3, .key_dim = 128,
              .value_dim = 128};
  const size_t each = 2 * 128 * 128, deferred = 128 * 128 + (128 * 128 + 27 * 128) / 4;
  EXPECT_EQ(cost(op).bytes, sizeof(float) * 4 * 3 * each);
  op.pending = {&memory, 0};
  EXPECT_EQ(cost(op).bytes, sizeof(float) * 4 * 3 * deferred);
  op.rows.tokens = 5;  // one row has two
  EXPECT_EQ(cost(op).bytes, sizeof(float) * 3 * (3 * deferred + each));
}

}  // namespace
}  // namespace weir
