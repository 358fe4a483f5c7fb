// How a prompt is cut across steps must not show in the answer.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/serve/client.h"

namespace weir::testing {
namespace {

constexpr float kLogprobTolerance = 1e-4f;  // float32 sums in another order

class Case02 : public ::testing::TestWithParam<const char*> {};

TEST_P(Case02, ChunkSizesDoNotShow) {
  v1::GenerateRequest request = greedy(random_ids(700, 4), 64);
  request.mutable_output()->set_prompt_logprobs(true);
  Answer first;
  // The last one takes the whole prompt at once.
  for (const std::string chunk : {"1", "7", "63", "64", "65", "256", "1024"}) {
    TestServer server(vectors(GetParam()),
                         {"--slots=2", "--step_tokens=1024", "--chunk_tokens=" + chunk});
    ASSERT_TRUE(server.serving()) << server.output();
    const Answer answer = Client(server).generate(request);
    ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
    ASSERT_EQ(answer.ids.size(), 64u);
    ASSERT_EQ(answer.prompt_logprobs.size(), 699u) << "chunk " << chunk;
    if (first.ids.empty()) first = answer;
    EXPECT_EQ(answer.ids, first.ids) << "chunk " << chunk;
    for (size_t i = 0; i < first.prompt_logprobs.size(); ++i) {
      ASSERT_NEAR(answer.prompt_logprobs[i], first.prompt_logprobs[i], kLogprobTolerance)
          << "chunk " << chunk << ", position " << i + 1;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Case02, ::testing::Values("gated-deltanet", "hybrid-kda"),
                         [](const auto& info) {
                           return std::string(info.param) == "hybrid-kda" ? "hybrid" : "recurrent";
                         });

}  // namespace
}  // namespace weir::testing
