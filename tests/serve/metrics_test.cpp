// What the metrics say is what was told.
#include "server/metrics.h"

#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <sstream>

#include "server/process_metrics.h"

namespace weir {
namespace {

class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() {
    auto opened = Tokenizer::open_folder(WEIR_SOURCE_DIR "/models/demo");
    EXPECT_TRUE(opened.ok()) << opened.status();
    tokenizer_.emplace(*std::move(opened));
    spec_.model_type = "gated_deltanet";
    const ServedModel model{.name = "demo",
                            .spec = spec_,
                            .tokenizer = *tokenizer_,
                            .weights_bytes = 1234,
                            .weights_fingerprint = "f00d",
                            .device = "CPU"};
    const Capacity capacity{.limits = {.slots = 4, .pages = 10},
                            .size = {.recurrent = 100, .conv = 10, .ring = 1},
                            .page_bytes = 7};
    metrics_.emplace(model, capacity, 1000.0);
  }

  std::string text() const {
    return prometheus::TextSerializer().Serialize(metrics_->registry()->Collect());
  }
  // The value of one series, as it is written.
  std::string value(const std::string& series) const {
    std::istringstream lines(text());
    for (std::string line; std::getline(lines, line);) {
      const size_t space = line.rfind(' ');
      if (line.compare(0, space, series) == 0) return line.substr(space + 1);
    }
    return "absent";
  }

  std::optional<Tokenizer> tokenizer_;
  ModelSpec spec_;
  std::optional<Metrics> metrics_;
};

// A series that appears only with its first event looks like a server that does not count it.
TEST_F(MetricsTest, EverySeriesIsThereFromTheStart) {
  EXPECT_EQ(value("weir_requests_total{method=\"Generate\",outcome=\"deadline\"}"), "0");
  EXPECT_EQ(value("weir_requests_rejected_total{reason=\"queue_full\"}"), "0");
  EXPECT_EQ(value("weir_requests_ended_early_total{outcome=\"deadline\",phase=\"queued\"}"), "0");
  EXPECT_EQ(value("weir_generated_tokens_total"), "0");
  EXPECT_EQ(value("weir_state_slots{kind=\"total\"}"), "4");
  EXPECT_EQ(value("weir_state_slots{kind=\"free\"}"), "4");
  EXPECT_EQ(value("weir_kv_pages{kind=\"total\"}"), "10");
  EXPECT_EQ(value("weir_weights_bytes"), "1234");
  EXPECT_EQ(value("weir_inter_token_seconds_count"), "0");
}

TEST_F(MetricsTest, OccupancyIsTheGauges) {
  metrics_->on_occupancy({.waiting = 5, .running = 3, .slots = 4, .free_slots = 1, .pages = 10,
                          .free_pages = 4, .snapshots = 3, .free_snapshots = 1});
  EXPECT_EQ(value("weir_requests_waiting"), "5");
  EXPECT_EQ(value("weir_requests_running"), "3");
  EXPECT_EQ(value("weir_state_slots{kind=\"used\"}"), "3");
  EXPECT_EQ(value("weir_state_slots{kind=\"snapshot\"}"), "2");
  EXPECT_EQ(value("weir_state_bytes{kind=\"recurrent\"}"), "300");
  EXPECT_EQ(value("weir_state_bytes{kind=\"kv\"}"), "42");
}

TEST_F(MetricsTest, StepsByKind) {
  metrics_->on_step({.seconds = 0.5, .decode_rows = 2, .decode_tokens = 2, .bytes = 3000});
  metrics_->on_step({.seconds = 0.5, .prompt_rows = 1, .prompt_tokens = 70, .admitted = 1,
                     .zeroed = 1, .restored = 1, .kept = 2});
  metrics_->on_step(
      {.seconds = 0.5, .decode_rows = 2, .prompt_rows = 1, .decode_tokens = 2, .prompt_tokens = 9});
  for (const char* kind : {"decode", "prefill", "mixed"}) {
    EXPECT_EQ(value(std::string("weir_step_seconds_count{kind=\"") + kind + "\"}"), "1");
  }
  EXPECT_EQ(value("weir_step_tokens_sum{kind=\"mixed\"}"), "11");
  EXPECT_EQ(value("weir_step_bytes_total"), "3000");
  EXPECT_EQ(value("weir_step_floor_seconds_total"), "3");
  EXPECT_EQ(value("weir_state_events_total{event=\"allocate\"}"), "1");
  EXPECT_EQ(value("weir_state_events_total{event=\"zero\"}"), "1");
  EXPECT_EQ(value("weir_state_events_total{event=\"copy\"}"), "3");
}

TEST_F(MetricsTest, Requests) {
  metrics_->request_ended(Method::Tokenize, Outcome::Ok);
  metrics_->request_ended(Method::Generate, Outcome::Deadline);
  metrics_->ended_early(Outcome::Deadline, Phase::Queued);
  metrics_->tokens_delivered(12);
  EXPECT_EQ(value("weir_requests_total{method=\"Tokenize\",outcome=\"ok\"}"), "1");
  EXPECT_EQ(value("weir_requests_total{method=\"Generate\",outcome=\"deadline\"}"), "1");
  EXPECT_EQ(value("weir_requests_ended_early_total{outcome=\"deadline\",phase=\"queued\"}"), "1");
  EXPECT_EQ(value("weir_requests_ended_early_total{outcome=\"cancelled\",phase=\"queued\"}"), "0");
  EXPECT_EQ(value("weir_generated_tokens_total"), "12");
}

TEST_F(MetricsTest, TheProcessItself) {
  const auto families = ProcessMetrics().Collect();
  const std::string all = prometheus::TextSerializer().Serialize(families);
  for (const char* name : {"process_cpu_seconds_total", "process_resident_memory_bytes",
                           "process_open_fds", "process_start_time_seconds"}) {
    EXPECT_NE(all.find(name), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace weir
