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

TEST(Device, AMissingOneIsNamed) {
  const std::string name = "cuda:" + std::to_string(cuda_device_count());
  const auto backend = open_device(name);
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(backend.status().message().rfind(name, 0), 0u) << backend.status();
  EXPECT_TRUE(open_device("cpu").ok());
}

}  // namespace
}  // namespace weir
