// A whole decode step of a random model, by shape and batch: on the device alone (its program, run
// again and again) and through the Runner (arrays up, program, tokens down), beside the floor.
// Then whole prompts through the Runner, and what each kind of op takes of them; and steps in which
// one prompt is read while others decode.
#include <map>

#include "engine/deferred_writes.h"
#include "engine/lower.h"
#include "engine/runner.h"
#include "tests/bench/bench_util.h"
#include "tests/bench/step_models.h"

namespace weir {
namespace {

// The program of a step of `batch` rows of `each` tokens, the first of them at position `first`, on
// arrays of its own. The last token of each row is wanted.
struct Step {
  Step(const Model& model, const StatePool& pool, const Limits& limits, Backend& backend,
       int32_t batch, int32_t each, int32_t first) {
    const auto put = [&](const auto& values) {
      auto* data = backend.allocate(values.size() * sizeof(values[0]));
      backend.upload(data, values.data(), values.size() * sizeof(values[0]));
      backend.finish();
      return static_cast<std::remove_const_t<std::remove_reference_t<decltype(values[0])>>*>(data);
    };
    const auto count = size_t(batch);
    std::vector<int32_t> ids, index, last, begin{0};
    for (int32_t i = 0; i < batch * each; ++i) ids.push_back(i % model.spec.vocab);
    for (int32_t i = 0; i < batch; ++i) {
      index.push_back(i);
      begin.push_back((i + 1) * each);
      last.push_back((i + 1) * each - 1);
    }
    const std::vector<int32_t> firsts(count, first), none(count, -1), zeros(count + 1, 0);
    StepArrays arrays{.ids = put(ids), .slot = put(index), .first = put(firsts),
                      .begin = put(begin), .written = put(std::vector<int32_t>(count, 0)),
                      .output_token = put(last)};
    arrays.sample = {.sampling = put(std::vector<Sampling>(count)),
                     .position = put(std::vector<int32_t>(count, first + each)),
                     .target = put(none), .top = put(zeros), .edit_begin = put(zeros),
                     .edits = put(std::vector<LogitEdit>(1)), .token = put(index),
                     .logprob = put(std::vector<float>(count)),
                     .top_token = put(std::vector<Token>(count * Sample::kTop)),
                     .top_logprob = put(std::vector<float>(count * Sample::kTop))};
    StepShape shape{batch, batch * each, batch};
    if (each > 1) shape.singles = 0, shape.longer = batch;
    Workspace measure;
    lower(model.spec, model.weights, &pool, limits, arrays, shape, measure);
    // Random numbers also where a backend writes none: products with zeros take less power.
    const std::vector<float> block = random_floats(size_t(1) << 20, 1.0f);
    const int64_t peak = measure.peak(), size = int64_t(block.size());
    auto* const floats = static_cast<float*>(backend.allocate(size_t(peak) * sizeof(float)));
    for (int64_t at = 0; at < peak; at += size) {
      backend.upload(floats + at, block.data(), size_t(std::min(size, peak - at)) * sizeof(float));
    }
    Workspace space(floats);
    program = lower(model.spec, model.weights, &pool, limits, arrays, shape, space);
    keep_deferred(program, backend);
  }
  Program program;
};

double runner_seconds(const Model& model, const StatePool& pool, const Limits& limits,
                      Backend& backend, int32_t batch) {
  Runner runner(model, pool, limits, backend);
  StepBatch step;
  for (int32_t i = 0; i < batch; ++i) {
    step.tokens.push_back(i % model.spec.vocab);
    step.rows.push_back({.slot = i, .first = 100, .count = 1, .begin = i});
    step.outputs.push_back({.token = i, .position = 101});
  }
  return median_seconds(4, 31, [&] { runner.step(step); });
}

void bench_shape(const BenchOptions& options, const ModelShape& shape,
                 const std::vector<int32_t>& batches, nlohmann::json& results) {
  if (!options.only.empty() && std::string(shape.name).find(options.only) == std::string::npos) {
    return;
  }
  const auto backend = bench_backend(options);
  const double copy = copy_rate(*backend, size_t(options.device == "cpu" ? 256 : 2048) << 20);
  RandomWeights random(*backend, int64_t(shape.vocab) * shape.dim);
  const Model model = random_model(shape, random);
  const Limits limits{.slots = batches.back(), .step_tokens = batches.back(),
                      .chunk_tokens = batches.back(), .prompt_tokens = 1024, .new_tokens = 1024,
                      .vocab = shape.vocab};
  const StatePool pool(model.spec, limits, *backend);
  std::printf("%s, %s: weights %.2f GB, state %.1f MB a sequence, copy %.0f GB/s\n", shape.name,
              backend->info().name.c_str(), double(random.bytes) / 1e9,
              double(pool.slot_bytes()) / 1e6, copy / 1e9);
  std::printf("%6s %12s %12s %12s %9s %12s\n", "B", "device ms", "runner ms", "floor ms", "% floor",
              "tokens/s");
  for (const int32_t batch : batches) {
    if (!options.most.empty() && batch > std::stoi(options.most)) break;
    const Step decode(model, pool, limits, *backend, batch, 1, 100);
    constexpr int kSteps = 8;
    const double device = median_seconds(1, options.device == "cpu" ? 1 : 15, [&] {
      for (int i = 0; i < kSteps; ++i) backend->run(decode.program);
      backend->finish();
    }) / kSteps;
    const double whole = runner_seconds(model, pool, limits, *backend, batch);
    const double floor = double(cost(decode.program).bytes) / copy;
    std::printf("%6d %12.3f %12.3f %12.3f %8.1f%% %12.0f\n", batch, device * 1e3, whole * 1e3,
                floor * 1e3, 100 * floor / device, batch / whole);
    std::fflush(stdout);
    results.push_back({{"model", shape.name}, {"device", backend->info().name}, {"batch", batch},
                       {"device_ms", device * 1e3}, {"runner_ms", whole * 1e3},
                       {"floor_ms", floor * 1e3}, {"tokens_per_s", batch / whole},
                       {"copy_gb_per_s", copy / 1e9}});
  }
}

// Whole prompts through the Runner, in steps as the scheduler makes them: each unfinished prompt in
// turn gives a chunk, until the step is full. Seconds.
double prompt_seconds(Runner& runner, const Limits& limits, int32_t prompts, int32_t length) {
  return median_seconds(1, 3, [&] {
    std::vector<int32_t> done(size_t(prompts), 0);
    for (int32_t finished = 0; finished < prompts;) {
      StepBatch step;
      for (int32_t p = finished; p < prompts; ++p) {
        const auto used = int32_t(step.tokens.size());
        int32_t& read = done[size_t(p)];
        const int32_t count =
            std::min({limits.chunk_tokens, length - read, limits.step_tokens - used});
        if (count == 0) break;
        step.rows.push_back({.slot = p, .first = read, .count = count, .begin = used});
        for (int32_t i = 0; i < count; ++i) step.tokens.push_back((read + i) % limits.vocab);
        read += count;
        if (read < length) continue;
        step.outputs.push_back({.token = used + count - 1, .position = length});
      }
      runner.step(step);
      while (finished < prompts && done[size_t(finished)] == length) ++finished;
    }
  });
}

// What each kind of op of a step takes, run without the others.
void bench_kinds(const Program& program, Backend& backend, nlohmann::json& row) {
  std::map<std::string, Program> kinds;
  for (const Op& op : program) kinds[name(op)].push_back(op);
  for (const auto& [kind, ops] : kinds) {
    const double seconds = median_seconds(1, 3, [&] {
      backend.run(ops);
      backend.finish();
    });
    const double rate = double(cost(ops).flops) / seconds;
    std::printf("    %-12s %4zu ops %9.3f ms, %6.1f TFLOP/s\n", kind.c_str(), ops.size(),
                seconds * 1e3, rate / 1e12);
    row["ms_by_kind"][kind] = seconds * 1e3;
  }
}

struct Prompts {
  int32_t count, length, step_tokens, chunk_tokens;
  bool kinds = false;
};

void bench_prompts(const BenchOptions& options, const ModelShape& shape,
                   const std::vector<Prompts>& cases, nlohmann::json& results) {
  const std::string title = std::string(shape.name) + ", prompts";
  if (!options.most.empty()) return;
  if (!options.only.empty() && title.find(options.only) == std::string::npos) return;
  const auto backend = bench_backend(options);
  RandomWeights random(*backend, int64_t(shape.vocab) * shape.dim);
  const Model model = random_model(shape, random);
  std::printf("%s, %s\n%8s %8s %8s %8s %10s %12s\n", title.c_str(), backend->info().name.c_str(),
              "prompts", "tokens", "a step", "a chunk", "ms", "tokens/s");
  for (const Prompts& c : cases) {
    const Limits limits{.slots = c.count, .step_tokens = c.step_tokens,
                        .chunk_tokens = c.chunk_tokens, .prompt_tokens = c.length,
                        .new_tokens = 1, .vocab = shape.vocab};
    const StatePool pool(model.spec, limits, *backend);
    Runner runner(model, pool, limits, *backend);
    const double seconds = prompt_seconds(runner, limits, c.count, c.length);
    const double rate = double(c.count) * c.length / seconds;
    std::printf("%8d %8d %8d %8d %10.2f %12.0f\n", c.count, c.length, c.step_tokens,
                c.chunk_tokens, seconds * 1e3, rate);
    nlohmann::json row = {{"model", shape.name}, {"device", backend->info().name},
                          {"vectors", options.vectors}, {"prompts", c.count},
                          {"prompt_tokens", c.length}, {"step_tokens", c.step_tokens},
                          {"chunk_tokens", c.chunk_tokens}, {"ms", seconds * 1e3},
                          {"tokens_per_s", rate}};
    if (c.kinds) {
      const int32_t rows = std::min(c.count, c.step_tokens / c.length);
      const Step step(model, pool, limits, *backend, rows, c.length, 0);
      backend->run(step.program);
      bench_kinds(step.program, *backend, row);
    }
    std::fflush(stdout);
    results.push_back(std::move(row));
  }
}

// A step of `decoding` rows of one token and one chunk of a prompt of `tokens`.
StepBatch mixed_step(int32_t decoding, int32_t tokens, int32_t vocab) {
  StepBatch step;
  for (int32_t i = 0; i < decoding; ++i) {
    step.rows.push_back({.slot = i, .first = 100, .count = 1, .begin = i});
    step.outputs.push_back({.token = i, .position = 101});
  }
  step.rows.push_back({.slot = decoding, .count = tokens, .begin = decoding});
  for (int32_t i = 0; i < decoding + tokens; ++i) step.tokens.push_back(i % vocab);
  return step;
}

// Seconds a step, of steps asked for one ahead as the engine does.
double ahead_seconds(Runner& runner, const std::vector<StepBatch>& steps) {
  const auto start = std::chrono::steady_clock::now();
  size_t out = 0;
  for (const StepBatch& step : steps) {
    runner.begin(step);
    if (++out == runner.steps_out()) {
      runner.finish();
      --out;
    }
  }
  for (; out > 0; --out) runner.finish();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / double(steps.size());
}

// Steps in which some sequences decode while another one's prompt is read: what an answer in
// progress waits for. No two of a run have as many tokens; the second and third run have seen them.
void bench_mixed(const BenchOptions& options, const ModelShape& shape, nlohmann::json& results) {
  const std::string title = std::string(shape.name) + ", mixed";
  if (!options.most.empty()) return;
  if (!options.only.empty() && title.find(options.only) == std::string::npos) return;
  const auto backend = bench_backend(options);
  RandomWeights random(*backend, int64_t(shape.vocab) * shape.dim);
  const Model model = random_model(shape, random);
  const Limits limits{.slots = 129, .step_tokens = 640, .chunk_tokens = 512,
                      .prompt_tokens = 1024, .new_tokens = 1024, .vocab = shape.vocab};
  const StatePool pool(model.spec, limits, *backend);
  Runner runner(model, pool, limits, *backend);
  std::printf("%s, %s: ms a step\n%9s %8s %10s %10s %10s\n", title.c_str(),
              backend->info().name.c_str(), "decoding", "a prompt", "first", "second", "third");
  for (const int32_t decoding : {0, 32, 128}) {
    for (const int32_t tokens : {64, 128, 256, 512}) {
      std::vector<StepBatch> steps;
      for (int32_t i = 0; i < 16; ++i) {
        steps.push_back(mixed_step(decoding, tokens - i, shape.vocab));
      }
      double ms[3];
      for (double& run : ms) run = 1e3 * ahead_seconds(runner, steps);
      std::printf("%9d %8d %10.2f %10.2f %10.2f\n", decoding, tokens, ms[0], ms[1], ms[2]);
      std::fflush(stdout);
      results.push_back({{"model", title}, {"device", backend->info().name},
                         {"vectors", options.vectors}, {"decoding", decoding},
                         {"prompt_tokens", tokens}, {"ms", ms}});
    }
  }
}

void bench_all(const BenchOptions& options) {
  const auto gdn = mixer_of(DecayGate::PerHead, OutputGate::Silu, Strength::Beta, 16);
  nlohmann::json results;
  if (options.device == "cpu") {
    bench_shape(options, {.name = "GDN, 2 layers of the 1.3B shape", .layers = 2, .mixer = gdn},
                {1, 8}, results);
    bench_prompts(options, {.name = "GDN, 2 layers of the 1.3B shape", .layers = 2, .mixer = gdn},
                  {{1, 256, 256, 256, true}}, results);
  } else {
    const std::vector<int32_t> batches{1, 2, 4, 8, 32, 64, 128, 256};
    bench_shape(options, {.name = "GDN 1.3B", .mixer = gdn}, batches, results);
    bench_shape(options,
                {.name = "DeltaNet 1.3B",
                 .mixer = mixer_of(DecayGate::None, OutputGate::None, Strength::Beta, 16)},
                {1, 32, 128}, results);
    bench_shape(options,
                {.name = "KDA 1.3B", .mixer = mixer_of(DecayGate::PerChannel,
                                                       OutputGate::LowRankSigmoid,
                                                       Strength::Beta, 16)},
                {1, 32, 128}, results);
    bench_shape(options, {.name = "SwiLA 1.3B", .mixer = swila_of(false, false, 16)}, {1, 32, 128},
                results);
    bench_shape(options,
                {.name = "SwiLA 1.3B, gated, temporal", .mixer = swila_of(true, true, 16)},
                {1, 32, 128}, results);
    bench_shape(options,
                {.name = "GDN 374M", .dim = 1024, .hidden = 2816,
                 .mixer = mixer_of(DecayGate::PerHead, OutputGate::Silu, Strength::Beta, 8)},
                {1, 32, 128}, results);
    // The last one with the server's defaults.
    bench_prompts(options, {.name = "GDN 1.3B", .mixer = gdn},
                  {{1, 2048, 2048, 2048, true},
                   {8, 2048, 16384, 2048, true},
                   {32, 2048, 16384, 2048},
                   {32, 2048, 8192, 2048},
                   {32, 2048, 2048, 2048},
                   {8, 2048, 512, 256}},
                  results);
    bench_mixed(options, {.name = "GDN 1.3B", .mixer = gdn}, results);
  }
  write_json(options, results);
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) { weir::bench_all(weir::bench_options(argc, argv)); }
