#include "server/metrics.h"

#include <vector>

namespace weir {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Registry;
using Buckets = Histogram::BucketBoundaries;

const char* const kMethodNames[] = {"Generate", "Tokenize", "Detokenize", "GetModel"};
const char* const kOutcomeNames[] = {"ok",       "stop",     "length",  "cancelled",
                                     "deadline", "rejected", "invalid", "failed"};
const char* const kPhaseNames[] = {"queued", "running"};
const char* const kRejectionNames[] = {"queue_full", "draining", "loading"};
const char* const kStepNames[] = {"decode", "prefill", "mixed"};

Family<Counter>& counters(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}
Family<Gauge>& gauges(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}
Family<Histogram>& histograms(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

// 1-2-5 steps from `first` up to `last`.
Buckets one_two_five(double first, double last) {
  Buckets buckets;
  for (double decade = first; decade <= last * 1.001; decade *= 10) {
    for (const double step : {1.0, 2.0, 5.0}) {
      if (decade * step <= last * 1.001) buckets.push_back(decade * step);
    }
  }
  return buckets;
}

size_t step_kind(const StepReport& report) {
  if (report.prompt_rows == 0) return 0;
  return report.decode_rows == 0 ? 1 : 2;
}

}  // namespace

Metrics::Metrics(const ServedModel& model, const Capacity& capacity, double bandwidth)
    : registry_(std::make_shared<Registry>()),
      state_(capacity.size),
      page_bytes_(capacity.page_bytes),
      bandwidth_(bandwidth) {
  add_requests();
  add_tokens();
  add_state(capacity);
  add_steps();
  add_latencies();
  add_info(model);
}

Metrics::~Metrics() = default;

void Metrics::add_requests() {
  auto& requests = counters(*registry_, "weir_requests_total",
                            "Requests that ended; every request received ends exactly once.");
  for (size_t method = 0; method < kMethods; ++method) {
    for (size_t outcome = 0; outcome < kOutcomes; ++outcome) {
      requests_[method][outcome] = &requests.Add(
          {{"method", kMethodNames[method]}, {"outcome", kOutcomeNames[outcome]}});
    }
  }
  auto& rejections = counters(*registry_, "weir_requests_rejected_total",
                              "Requests with outcome rejected, by reason.");
  for (size_t why = 0; why < kRejections; ++why) {
    rejections_[why] = &rejections.Add({{"reason", kRejectionNames[why]}});
  }
  auto& early = counters(*registry_, "weir_requests_ended_early_total",
                         "Generate calls cancelled or past their deadline once the engine had "
                         "them, by where they were.");
  for (size_t phase = 0; phase < kPhases; ++phase) {
    ended_early_[0][phase] =
        &early.Add({{"outcome", "cancelled"}, {"phase", kPhaseNames[phase]}});
    ended_early_[1][phase] = &early.Add({{"outcome", "deadline"}, {"phase", kPhaseNames[phase]}});
  }
  running_ = &gauges(*registry_, "weir_requests_running", "Sequences that hold a slot.").Add({});
  waiting_ = &gauges(*registry_, "weir_requests_waiting", "Sequences waiting for one.").Add({});
}

void Metrics::add_tokens() {
  prompt_tokens_ = &counters(*registry_, "weir_prompt_tokens_total",
                             "Prompt tokens of sequences that reached their first token.")
                        .Add({});
  reused_tokens_ = &counters(*registry_, "weir_prompt_tokens_reused_total",
                             "Prompt tokens whose state was reused.")
                        .Add({});
  generated_tokens_ = &counters(*registry_, "weir_generated_tokens_total",
                                "Generated tokens delivered to clients.")
                           .Add({});
}

void Metrics::add_state(const Capacity& capacity) {
  auto& slots = gauges(*registry_, "weir_state_slots", "Slots for the states of sequences.");
  slots.Add({{"kind", "total"}}).Set(capacity.limits.slots);
  slots_used_ = &slots.Add({{"kind", "used"}});
  slots_free_ = &slots.Add({{"kind", "free"}}, double(capacity.limits.slots));
  slots_snapshot_ = &slots.Add({{"kind", "snapshot"}});
  auto& pages = gauges(*registry_, "weir_kv_pages", "Pages of keys and values.");
  pages.Add({{"kind", "total"}}).Set(capacity.limits.pages);
  pages_used_ = &pages.Add({{"kind", "used"}});
  pages_free_ = &pages.Add({{"kind", "free"}}, double(capacity.limits.pages));
  auto& bytes = gauges(*registry_, "weir_state_bytes", "Bytes of state that sequences hold.");
  recurrent_bytes_ = &bytes.Add({{"kind", "recurrent"}});
  conv_bytes_ = &bytes.Add({{"kind", "conv"}});
  window_bytes_ = &bytes.Add({{"kind", "window"}});
  kv_bytes_ = &bytes.Add({{"kind", "kv"}});
  auto& events = counters(*registry_, "weir_state_events_total", "What happened to slots.");
  allocated_ = &events.Add({{"event", "allocate"}});
  zeroed_ = &events.Add({{"event", "zero"}});
  copied_ = &events.Add({{"event", "copy"}});
}

void Metrics::add_steps() {
  auto& seconds = histograms(*registry_, "weir_step_seconds", "Time of one step.");
  auto& rows = histograms(*registry_, "weir_step_rows", "Sequences that moved in one step.");
  auto& tokens = histograms(*registry_, "weir_step_tokens", "Tokens read in one step.");
  for (size_t kind = 0; kind < kSteps; ++kind) {
    const prometheus::Labels labels = {{"kind", kStepNames[kind]}};
    step_seconds_[kind] = &seconds.Add(labels, one_two_five(1e-4, 50));
    step_rows_[kind] =
        &rows.Add(labels, Buckets{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024});
    step_tokens_[kind] =
        &tokens.Add(labels, Buckets{1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384});
  }
  step_bytes_ = &counters(*registry_, "weir_step_bytes_total",
                          "Bytes that steps had to move at least.")
                     .Add({});
  step_floor_ = &counters(*registry_, "weir_step_floor_seconds_total",
                          "Time those bytes take at the memory bandwidth measured at start; a "
                          "model that fits in a cache can be faster.")
                     .Add({});
  gauges(*registry_, "weir_memory_bandwidth_bytes_per_second", "As measured at start.")
      .Add({})
      .Set(bandwidth_);
}

void Metrics::add_latencies() {
  first_token_ = &histograms(*registry_, "weir_time_to_first_token_seconds",
                             "From a Generate call's arrival to its first token.")
                      .Add({}, one_two_five(1e-3, 500));
  inter_token_ = &histograms(*registry_, "weir_inter_token_seconds",
                             "Between two tokens of one answer.")
                      .Add({}, one_two_five(1e-4, 10));
  request_ = &histograms(*registry_, "weir_request_seconds",
                         "From a Generate call's arrival to its end, whatever the outcome of "
                         "those that the engine accepted.")
                  .Add({}, one_two_five(1e-3, 1000));
  queue_ = &histograms(*registry_, "weir_queue_seconds",
                       "From a Generate call's arrival to the first step that worked on it.")
                .Add({}, one_two_five(1e-4, 500));
}

void Metrics::add_info(const ServedModel& model) {
  gauges(*registry_, "weir_weights_bytes", "Bytes of weights in use.")
      .Add({})
      .Set(double(model.weights_bytes));
  gauges(*registry_, "weir_build_info", "Version of the server.")
      .Add({{"version", WEIR_VERSION}})
      .Set(1);
  gauges(*registry_, "weir_model_info", "The model served.")
      .Add({{"name", model.name},
            {"model_type", model.spec.model_type},
            {"device", model.device},
            {"fingerprint", model.weights_fingerprint}})
      .Set(1);
}

void Metrics::on_step(const StepReport& report) {
  const size_t kind = step_kind(report);
  step_seconds_[kind]->Observe(report.seconds);
  step_rows_[kind]->Observe(report.decode_rows + report.prompt_rows);
  step_tokens_[kind]->Observe(report.decode_tokens + report.prompt_tokens);
  step_bytes_->Increment(double(report.bytes));
  step_floor_->Increment(double(report.bytes) / bandwidth_);
  allocated_->Increment(report.admitted);
  zeroed_->Increment(report.zeroed);
  copied_->Increment(report.restored + report.kept);
}

void Metrics::on_occupancy(const Occupancy& occupancy) {
  const double used = occupancy.slots - occupancy.free_slots;
  const double pages = occupancy.pages - occupancy.free_pages;
  running_->Set(occupancy.running);
  waiting_->Set(occupancy.waiting);
  slots_used_->Set(used);
  slots_free_->Set(occupancy.free_slots);
  slots_snapshot_->Set(occupancy.snapshots - occupancy.free_snapshots);
  pages_used_->Set(pages);
  pages_free_->Set(occupancy.free_pages);
  recurrent_bytes_->Set(used * double(state_.recurrent));
  conv_bytes_->Set(used * double(state_.conv));
  window_bytes_->Set(used * double(state_.ring));
  kv_bytes_->Set(pages * double(page_bytes_));
}

void Metrics::request_ended(Method method, Outcome outcome) {
  requests_[size_t(method)][size_t(outcome)]->Increment();
}
void Metrics::rejected(Rejection why) { rejections_[size_t(why)]->Increment(); }
void Metrics::ended_early(Outcome outcome, Phase phase) {
  ended_early_[outcome == Outcome::Cancelled ? 0 : 1][size_t(phase)]->Increment();
}

void Metrics::prompt_tokens(int32_t count) { prompt_tokens_->Increment(count); }
void Metrics::tokens_delivered(int32_t count) { generated_tokens_->Increment(count); }
void Metrics::queue_seconds(double seconds) { queue_->Observe(seconds); }
void Metrics::time_to_first_token(double seconds) { first_token_->Observe(seconds); }
void Metrics::inter_token(double seconds) { inter_token_->Observe(seconds); }
void Metrics::request_seconds(double seconds) { request_->Observe(seconds); }

}  // namespace weir
