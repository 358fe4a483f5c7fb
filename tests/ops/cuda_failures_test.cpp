// A device that is missing, full or broken: a program that went on would give wrong answers.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "tests/ops/cuda_compare.h"

namespace weir {
namespace {

class CudaFailures : public CudaTest {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // a child of its own, with its own context
    CudaTest::SetUp();
  }
};

TEST(CudaBackend, MissingDevicesAreNamed) {
  for (const int device : {-1, cuda_device_count(), 1 << 20}) {
    std::string error;
    EXPECT_EQ(make_cuda_backend(device, &error), nullptr);
#if defined(WEIR_HAVE_CUDA)
    const std::string expected = "CUDA device " + std::to_string(device) +
                                 ": expected one of the " + std::to_string(cuda_device_count()) +
                                 " that the driver shows";
    EXPECT_EQ(error.rfind(expected, 0), 0u) << error;
#else
    EXPECT_EQ(error, "this program was built without CUDA");
#endif
  }
}

// Sizes that a configuration may have and no kernel has are refused when a model is loaded, not in
// its first step.
TEST_F(CudaFailures, SizesWithoutAKernelAreNamed) {
  const auto backend = cuda();
  const auto refused = [&](const Op& op, const std::string& what) {
    const char* const found = backend->unserved({op});
    EXPECT_EQ(found == nullptr ? "none" : found, what);
  };
  DeltaMix delta{.key_heads = 1, .value_heads = 1, .key_dim = 256, .value_dim = 1024,
                 .conv_width = 4};
  refused(delta, "none");
  delta.conv_width = 64;
  refused(delta, "delta_mix of heads whose vectors and histories take more than 96 KiB");
  delta.value_dim = 1040;
  refused(delta, "delta_mix of heads with more than 1,024 values");
  refused(Attention{.heads = 1, .kv_heads = 1, .head_dim = 256}, "none");
  refused(Attention{.heads = 1, .kv_heads = 1, .head_dim = 258},
          "attention of heads with more than 256 numbers");
  refused(SwilaMix{.heads = 1, .mixtures = 8, .dim = 1024}, "none");
  refused(SwilaMix{.heads = 1, .mixtures = 16, .dim = 1024},
          "swila_mix of heads whose vectors take more than 200 KiB");
  refused(OuterStep{.heads = 1, .key_dim = 12288}, "none");
  refused(OuterStep{.heads = 1, .key_dim = 12289},
          "outer_step of keys with more than 12,288 numbers");
  refused(FeatureMap{.heads = 1, .dim = 1 << 14}, "feature_map of more than 47 KiB a head");
}

// Memory that is not there ends a start as other failures of it do, naming both numbers.
TEST_F(CudaFailures, MoreThanIsFreeEndsTheStart) {
  EXPECT_EXIT(
      {
        const auto backend = cuda();
        backend->allocate(backend->info().free_bytes + (size_t(1) << 30));
      },
      testing::ExitedWithCode(1),
      "CUDA: no room for [0-9.]+ MiB .[0-9]+ bytes., [0-9.]+ MiB of [0-9.]+ MiB are free: out of "
      "memory");
}

// The same when weights fill the device, and when it is full before. Others may use the device and
// leave it meanwhile: both ask for more until there is no more.
TEST_F(CudaFailures, AFullDeviceEndsTheStart) {
  constexpr size_t kPieces = 8192, kPiece = size_t(64) << 20;  // more than any device has
  const auto filled = [] {
    auto backend = cuda();
    backend->allocate(backend->info().free_bytes - kPiece / 4);
    return backend;
  };
  const auto adopt_weights = [&] {
    const auto backend = filled();
    const std::vector<std::byte> weights(kPiece);
    for (size_t i = 0; i < kPieces; ++i) backend->adopt(weights.data(), kPiece - i);
    std::exit(0);
  };
  const auto start_others = [&] {
    std::vector<std::unique_ptr<Backend>> all;
    all.push_back(filled());
    for (size_t i = 0; i < kPieces; ++i) all.push_back(cuda());
    std::exit(0);
  };
  const char* const expected = "CUDA: no room for .* MiB are free: out of memory";
  EXPECT_EXIT(adopt_weights(), testing::ExitedWithCode(1), expected);
  EXPECT_EXIT(start_others(), testing::ExitedWithCode(1), expected);
}

// What comes later finds no room either: cuBLASLt's workspace, what kernels keep, steps' graphs. It
// may be that there is just enough for all of it; an abort is for broken code and broken devices.
TEST_F(CudaFailures, NoRoomBesideThePoolIsNoAbort) {
  const auto run_programs = [] {
    const auto backend = cuda();
    const auto vectors = [&] {
      return Acts{static_cast<float*>(backend->allocate(256 * 256 * sizeof(float))), 256};
    };
    Linear linear{.in = 256, .parts = 1, .x = vectors(), .y = vectors()};
    linear.part[0] = {backend->allocate(256 * 256 * 2), 256, 256, DType::BF16};
    for (size_t piece = size_t(1) << 30; piece >= size_t(2) << 20; piece /= 2) {
      while (backend->info().free_bytes > 2 * piece) backend->allocate(piece);
    }
    std::fprintf(stderr, "the device is full\n");
    for (int32_t tokens = 256; tokens > 0; --tokens) {
      linear.tokens = tokens;
      const Program program(64, linear);
      for (int32_t run = 0; run < 3; ++run) backend->run(program);
    }
    backend->finish();
    std::exit(0);
  };
  EXPECT_EXIT(run_programs(), [](int status) { return WIFEXITED(status); },
              "the device is full");
}

// An access that is not allowed leaves a device of which nothing can be used any more, as one that
// is lost does: the process ends, in CUDA's words, before an answer is read.
TEST_F(CudaFailures, ABrokenDeviceEndsTheProcess) {
  const auto write_nowhere = [] {
    const auto backend = cuda();
    const Acts nowhere{reinterpret_cast<float*>(uintptr_t(256)), 64};
    backend->run({Elementwise{.tokens = 1, .dim = 64, .x = nowhere, .out = nowhere}});
    backend->finish();
    std::exit(0);
  };
  EXPECT_EXIT(write_nowhere(), testing::KilledBySignal(SIGABRT),
              "CUDA: an illegal memory access was encountered");
}

}  // namespace
}  // namespace weir
