// Deferred writes of states, through the Runner: an update that is lost between two steps, added
// twice, or left beside a state when a step of another kind, or a copy of the slot, needs it; a row
// that reads what waits of the sequence that had its slot before.
#include "engine/deferred_writes.h"

#include <gtest/gtest.h>

#include "tests/bench/random_model.h"
#include "tests/unit/forwarding_backend.h"
#include "tests/unit/golden_bench.h"
#include "tests/unit/random_days.h"

namespace weir::test {
namespace {

std::unique_ptr<Backend> plain_cpu() { return make_cpu_backend({.plain = true}); }

// The CPU, which defers the writes of steps of at least `least` rows; `remembers`: and wants shapes
// padded.
class Deferring final : public ForwardingBackend {
 public:
  Deferring(int32_t least, bool remembers)
      : ForwardingBackend(plain_cpu()), least_(least), remembers_(remembers) {}
  int deferred = 0, flushes = 0, others = 0;  // ops run so far, by kind

  void run(const Program& program) override {
    for (const Op& op : program) {
      const bool deferring = std::visit(
          [](const auto& one) {
            if constexpr (requires { one.pending.data; }) return one.pending.data != nullptr;
            return false;
          },
          op);
      ++(std::holds_alternative<FlushPending>(op) ? flushes : deferring ? deferred : others);
    }
    inner().run(program);
  }
  bool defers_writes(const Program& program) const override {
    bool any = false;
    for (const Op& op : program) {
      std::visit(
          [&](const auto& one) {
            if constexpr (requires { pending_layout(one); }) any = one.rows.count >= least_;
          },
          op);
    }
    return any;
  }
  bool remembers_programs() const override { return remembers_; }

 private:
  int32_t least_;
  bool remembers_;
};

constexpr int32_t kSlots = 5;

Served served(const std::string& name, std::unique_ptr<Backend> on, int32_t slots = kSlots) {
  Model model = *load_model(golden_path(name), *on);
  return {std::move(on), std::move(model), slots};
}

class DeferredWrites : public testing::TestWithParam<const char*> {};

TEST_P(DeferredWrites, AnswerAsWritesOfEachToken) {
  Served each = served(GetParam(), plain_cpu());
  ASSERT_FALSE(each.pool.defers_writes());
  for (const bool padded : {false, true}) {
    auto deferring = std::make_unique<Deferring>(padded ? 4 : 1, padded);
    const Deferring& seen = *deferring;
    Served deferred = served(GetParam(), std::move(deferring));
    ASSERT_TRUE(deferred.pool.defers_writes());
    constexpr int kDays = 70;
    const uint32_t seed = padded ? 2 : 1;
    const std::vector<float> expected = RandomDays(each, seed).logits(kDays);
    EXPECT_LE(difference(RandomDays(deferred, seed).logits(kDays), expected), 2e-5) << padded;
    EXPECT_GT(seen.deferred, 0);
    EXPECT_GT(seen.flushes, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Mixers, DeferredWrites,
                         testing::Values("gated-deltanet", "delta-net", "kda", "gdn2",
                                         "random-gdn-groups", "random-kda-bounded-groups",
                                         "hybrid-gdn", "random-swila", "swila-gated-temporal",
                                         "hybrid-swila-temporal"),
                         [](const auto& info) { return test_name(info.param); });

// A slot has room for what waits where writes are deferred, and only there.
TEST(DeferredWrites, TakeTheRoomTheySay) {
  const Served each = served("gated-deltanet", plain_cpu());
  const Served deferred = served("gated-deltanet", std::make_unique<Deferring>(3, false));
  EXPECT_EQ(deferred.pool.slot_bytes(), each.pool.slot_bytes() + waiting_bytes(each.model.spec));
  EXPECT_EQ(each.pool.layer_pending(0).data, nullptr);
  EXPECT_NE(deferred.pool.layer_pending(0).data, nullptr);
  const Served few = served("gated-deltanet", std::make_unique<Deferring>(3, false), 2);
  EXPECT_EQ(few.pool.layer_pending(0).data, nullptr);
}

// Heads of the sizes that CUDA's kernels defer, which no checkpoint here has.
const RandomModel kCudaModels[] = {
    {.dim = 256, .heads = 2, .head_dim = 128},
    {.model_type = "kda", .dim = 256, .heads = 2, .head_dim = 128},
    {.model_type = "delta_net", .dim = 256, .heads = 2, .head_dim = 128},
    {.model_type = "swila", .dim = 128, .heads = 2, .head_dim = 64,
     .more = {{"num_mixtures", 4}, {"router_low_rank_dim", 64}, {"beta_low_rank_dim", 64},
              {"gate_low_rank_dim", 64}, {"temporal", true}, {"gated", true}}}};

class CudaDeferredWrites : public testing::TestWithParam<int> {};

// With steps that the resident kernel takes, steps that defer, prompts among both, graphs.
TEST_P(CudaDeferredWrites, AnswerAsWritesOfEachToken) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "skipped: no CUDA device";
  const RandomModel& shape = kCudaModels[GetParam()];
  const auto on_cuda = [&](bool defers, int32_t slots) {
    std::string error;
    auto backend = make_cuda_backend(0, &error, {.defer_writes = defers});
    WEIR_CHECK(backend != nullptr);
    Model model = random_model(shape, 5, *backend);
    return Served(std::move(backend), std::move(model), slots);
  };
  for (const int32_t slots : {9, 24}) {
    Served each = on_cuda(false, slots), deferred = on_cuda(true, slots);
    ASSERT_FALSE(each.pool.defers_writes());
    ASSERT_TRUE(deferred.pool.defers_writes()) << shape.model_type;
    const std::vector<float> expected = RandomDays(each, 3).logits(160);
    const double worst = difference(RandomDays(deferred, 3).logits(160), expected);
    std::printf("%s, %d slots: logits differ by at most %.2e\n", shape.model_type.c_str(), slots,
                worst);
    EXPECT_LE(worst, 2e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Mixers, CudaDeferredWrites, testing::Range(0, 4));

}  // namespace
}  // namespace weir::test
