// Device names: a typo that would silently serve on another device, and a missing device that would
// not be named.
#include <gtest/gtest.h>

#include "engine/device.h"

namespace weir {
namespace {

TEST(Device, NamesAreTakenWhole) {
  for (const char* name : {"cpu", "cuda", "cuda:0", "cuda:12"}) {
    EXPECT_TRUE(check_device(name).ok()) << name;
  }
  for (const char* name : {"", "CPU", "cuda:", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:01",
                           "cuda:1x", "cuda1", "gpu", "cuda:99999999999"}) {
    const absl::Status status = check_device(name);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_NE(status.message().find("expected cpu, cuda or cuda:N"), std::string::npos) << status;
  }
}

// A misspelt way of taking vectors would silently serve the other one; on the CPU there is none.
TEST(Device, VectorsAreTakenWhole) {
  for (const char* device : {"cpu", "cuda", "cuda:3"}) {
    EXPECT_TRUE(check_vectors("split", device).ok()) << device;
    for (const char* vectors : {"", "BF16", "bf", "split,bf16", "fp8"}) {
      const absl::Status status = check_vectors(vectors, device);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << vectors;
      EXPECT_EQ(status.message(),
                std::string("vectors: expected split or bf16, found \"") + vectors + "\"");
    }
  }
  EXPECT_TRUE(check_vectors("bf16", "cuda").ok());
  EXPECT_TRUE(check_vectors("bf16", "cuda:3").ok());
  EXPECT_EQ(check_vectors("bf16", "cpu").message(),
            "vectors: expected split on the device cpu, found bf16");
  EXPECT_EQ(open_device("cpu", {}, "bf16").status(), check_vectors("bf16", "cpu"));
}

TEST(Device, AMissingOneIsNamed) {
  const std::string name = "cuda:" + std::to_string(cuda_device_count());
  const auto backend = open_device(name);
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(backend.status().message().rfind(name, 0), 0u) << backend.status();
  EXPECT_TRUE(open_device("cpu").ok());
}

}  // namespace
}  // namespace weir
