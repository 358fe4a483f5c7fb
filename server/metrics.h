#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include "engine/observer.h"
#include "server/capacity.h"
#include "server/served_model.h"

namespace weir {

enum class Method : uint8_t { Generate, Tokenize, Detokenize, GetModel };
enum class Outcome : uint8_t { Ok, Stop, Length, Cancelled, Deadline, Rejected, Invalid, Failed };
enum class Phase : uint8_t { Queued, Running };
enum class Rejection : uint8_t { QueueFull, Draining, Loading };

// The Prometheus families of serving. Every series exists from the start, so that the token path
// looks nothing up. Any thread may call any method. Owned by main; outlives engine and server.
class Metrics final : public Observer {
 public:
  // `bandwidth`: bytes a second that the device reads memory at.
  Metrics(const ServedModel& model, const Capacity& capacity, double bandwidth);
  ~Metrics() override;

  void on_step(const StepReport& report) override;
  void on_occupancy(const Occupancy& occupancy) override;

  void request_ended(Method method, Outcome outcome);  // once for each request received
  void rejected(Rejection why);                        // beside request_ended()
  void ended_early(Outcome outcome, Phase phase);      // cancelled and deadline, likewise

  // Of Generate calls.
  void prompt_tokens(int32_t count);     // of a prompt that was read to its end
  void tokens_delivered(int32_t count);
  void queue_seconds(double seconds);
  void time_to_first_token(double seconds);
  void inter_token(double seconds);
  void request_seconds(double seconds);

  std::shared_ptr<prometheus::Registry> registry() const { return registry_; }

 private:
  static constexpr size_t kMethods = 4, kOutcomes = 8, kPhases = 2, kRejections = 3, kSteps = 3;

  void add_requests();
  void add_tokens();
  void add_state(const Capacity& capacity);
  void add_steps();
  void add_latencies();
  void add_info(const ServedModel& model);

  const std::shared_ptr<prometheus::Registry> registry_;
  const StateSize state_;
  const size_t page_bytes_;
  const double bandwidth_;

  std::array<std::array<prometheus::Counter*, kOutcomes>, kMethods> requests_{};
  std::array<prometheus::Counter*, kRejections> rejections_{};
  std::array<std::array<prometheus::Counter*, kPhases>, 2> ended_early_{};
  prometheus::Gauge *running_ = nullptr, *waiting_ = nullptr;
  prometheus::Counter *prompt_tokens_ = nullptr, *reused_tokens_ = nullptr,
                      *generated_tokens_ = nullptr;
  prometheus::Gauge *slots_used_ = nullptr, *slots_free_ = nullptr,
                    *slots_snapshot_ = nullptr;
  prometheus::Gauge *pages_used_ = nullptr, *pages_free_ = nullptr;
  prometheus::Gauge *recurrent_bytes_ = nullptr, *conv_bytes_ = nullptr, *window_bytes_ = nullptr,
                    *kv_bytes_ = nullptr;
  prometheus::Counter *allocated_ = nullptr, *zeroed_ = nullptr, *copied_ = nullptr;
  // By kind of step: decode, prefill, mixed.
  std::array<prometheus::Histogram*, kSteps> step_seconds_{}, step_rows_{}, step_tokens_{};
  prometheus::Counter *step_bytes_ = nullptr, *step_floor_ = nullptr;
  prometheus::Histogram *first_token_ = nullptr, *inter_token_ = nullptr, *request_ = nullptr,
                        *queue_ = nullptr;
};

}  // namespace weir
