#include "engine/config_reader.h"

#include <gtest/gtest.h>

namespace weir {
namespace {

// -1e30 - 1 is -1e30: what stands for "no number" must lie outside of every range.
TEST(ConfigReader, WhatIsNoNumberIsInNoRange) {
  const std::string path = "C";
  for (const char* value : {R"("-1")", "false", "null", "[]", "{}", "NaN", "-Infinity"}) {
    const auto object = parse_json(absl::StrCat("{\"clamp_min\":", value, "}"), path);
    ASSERT_TRUE(object.ok());
    absl::Status status;
    ConfigReader reader(*object, path, "", status);
    EXPECT_EQ(reader.number("clamp_min", 7, -1e30, 1e30), 7) << value;
    EXPECT_EQ(status.message(),
              "C: clamp_min: expected a number from -1e+30 to 1e+30, found " +
                  describe((*object)["clamp_min"]));
  }
}

}  // namespace
}  // namespace weir
