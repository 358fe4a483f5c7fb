// A whole decode step of a random model, by shape and batch: on the device alone (its program, run
// again and again) and through the Runner (arrays up, program, tokens down), beside the floor.
// Then whole prompts through the Runner, and what each kind of op takes of them.
#include <filesystem>
#include <map>

#include "engine/lower.h"
#include "engine/runner.h"
#include "tests/bench/bench_util.h"

namespace weir {
namespace {

struct ModelShape {
  const char* name;
  int32_t layers = 24, dim = 2048, hidden = 5632, vocab = 32000;
  Mixer mixer;
};

DeltaMixer mixer_of(DecayGate decay, OutputGate gate, Strength strength, int32_t heads) {
  return {.key_heads = heads, .value_heads = heads, .key_dim = 128, .value_dim = 128,
          .decay = decay, .strength = strength, .output_gate = gate};
}

// Weights at changing places of one random block, so that no two tensors are the same.
class RandomWeights {
 public:
  RandomWeights(Backend& backend, int64_t largest)
      : backend_(backend), block_(random_bf16(size_t(largest) + (size_t(1) << 20))),
        floats_(random_floats(size_t(1) << 20, 0.5f)) {}

  Matrix matrix(int32_t rows, int32_t cols) {
    Matrix m{.rows = rows, .cols = cols, .dtype = DType::BF16};
    at_ = (at_ + 64 * 1031) % ((size_t(1) << 20) - 64);
    m.data = backend_.adopt(block_.data() + at_, m.bytes());
    bytes += m.bytes();
    return m;
  }
  const float* vector(int64_t size) {
    float_at_ = (float_at_ + 1600) % (floats_.size() / 2);
    return static_cast<const float*>(
        backend_.adopt(floats_.data() + float_at_, size_t(size) * sizeof(float)));
  }
  size_t bytes = 0;

 private:
  Backend& backend_;
  std::vector<uint16_t> block_;
  std::vector<float> floats_;
  size_t at_ = 0, float_at_ = 0;
};

DeltaWeights random_mixer(const DeltaMixer& m, int32_t dim, RandomWeights& random) {
  const int32_t keys = m.key_heads * m.key_dim, values = m.value_heads * m.value_dim;
  DeltaWeights w{.q = random.matrix(keys, dim), .k = random.matrix(keys, dim),
                 .v = random.matrix(values, dim), .conv_q = random.vector(4 * keys),
                 .conv_k = random.vector(4 * keys), .conv_v = random.vector(4 * values)};
  if (m.decay == DecayGate::PerHead) w.a = random.matrix(m.value_heads, dim);
  if (m.decay == DecayGate::PerChannel) {
    w.f0 = random.matrix(m.value_dim, dim);
    w.f1 = random.matrix(keys, m.value_dim);
  }
  w.b = random.matrix(m.value_heads, dim);
  w.decay_a = random.vector(m.value_heads);
  w.dt_bias = random.vector(keys);
  if (m.output_gate == OutputGate::Silu) w.g = random.matrix(values, dim);
  if (m.output_gate == OutputGate::LowRankSigmoid) {
    w.g0 = random.matrix(m.value_dim, dim);
    w.g1 = random.matrix(values, m.value_dim);
    w.g1_bias = random.vector(values);
  }
  w.norm = random.vector(m.value_dim);
  w.o = random.matrix(dim, values);
  return w;
}

// Four mixtures of 64x64 a head: the state of as many heads of 128x128.
SwilaMixer swila_of(bool gated, bool temporal, int32_t heads) {
  return {.heads = heads, .mixtures = 4, .head_dim = 64, .router_rank = 64, .beta_rank = 64,
          .gate_rank = 64, .temporal = temporal, .gated = gated, .conv = {.width = 4}};
}

SwilaWeights random_mixer(const SwilaMixer& m, int32_t dim, RandomWeights& random) {
  const int32_t channels = m.heads * m.head_dim, mixed = channels * m.mixtures;
  const auto low_rank = [&](int32_t rank) {
    return LowRank{random.matrix(rank, dim), random.matrix(mixed, rank)};
  };
  SwilaWeights w{.q = random.matrix(channels, dim), .k = random.matrix(channels, dim),
                 .v = random.matrix(channels, dim), .conv_q = random.vector(4 * channels),
                 .conv_k = random.vector(4 * channels), .conv_v = random.vector(4 * channels)};
  if (m.temporal) {
    w.key_mix = random.matrix(channels, dim);
    w.query_mix = random.matrix(channels, dim);
    w.key_mix_bias = random.vector(channels);
    w.query_mix_bias = random.vector(channels);
  }
  w.key_router = low_rank(m.router_rank);
  w.query_router = low_rank(m.router_rank);
  w.beta = low_rank(m.beta_rank);
  if (m.gated) {
    w.decay = low_rank(m.gate_rank);
    w.decay_a = random.vector(m.heads * m.mixtures);
    w.dt_bias = random.vector(mixed);
  }
  w.norm = random.vector(m.head_dim);
  w.o = random.matrix(dim, channels);
  return w;
}

MixerWeights random_mixer(const Mixer& mixer, int32_t dim, RandomWeights& random) {
  if (const auto* swila = std::get_if<SwilaMixer>(&mixer)) return random_mixer(*swila, dim, random);
  return random_mixer(std::get<DeltaMixer>(mixer), dim, random);
}

// A Model owns a checkpoint's files; this one has a single number in them.
Safetensors no_files() {
  const std::string path = std::filesystem::temp_directory_path() / "weir_step_bench.safetensors";
  const std::string header = R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  )";
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length) << header;
  file.write("\0\0\0\0", 4);
  file.close();
  absl::StatusOr<Safetensors> files = Safetensors::open_file(path);
  std::filesystem::remove(path);
  return std::move(files).value();
}

Model random_model(const ModelShape& shape, RandomWeights& random) {
  Model model{.files = no_files()};
  model.spec = {.model_type = shape.name, .dim = shape.dim, .vocab = shape.vocab};
  model.weights.embedding = random.matrix(shape.vocab, shape.dim);
  for (int32_t i = 0; i < shape.layers; ++i) {
    model.spec.layers.push_back({shape.mixer, Mlp{shape.hidden}});
    LayerWeights layer{.mixer_norm = random.vector(shape.dim)};
    layer.mixer = random_mixer(shape.mixer, shape.dim, random);
    layer.mlp_norm = random.vector(shape.dim);
    layer.gate = random.matrix(shape.hidden, shape.dim);
    layer.up = random.matrix(shape.hidden, shape.dim);
    layer.down = random.matrix(shape.dim, shape.hidden);
    model.weights.layers.push_back(std::move(layer));
  }
  model.weights.norm = random.vector(shape.dim);
  model.weights.head = random.matrix(shape.vocab, shape.dim);
  return model;
}

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
                      .begin = put(begin), .output_token = put(last)};
    arrays.sample = {.sampling = put(std::vector<Sampling>(count)),
                     .position = put(std::vector<int32_t>(count, first + each)),
                     .target = put(none), .top = put(zeros), .edit_begin = put(zeros),
                     .edits = put(std::vector<LogitEdit>(1)), .token = put(index),
                     .logprob = put(std::vector<float>(count)),
                     .top_token = put(std::vector<Token>(count * Sample::kTop)),
                     .top_logprob = put(std::vector<float>(count * Sample::kTop))};
    const StepShape shape{batch, batch * each, batch};
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
  }
  write_json(options, results);
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) { weir::bench_all(weir::bench_options(argc, argv)); }
