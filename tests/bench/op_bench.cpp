// Each op on its own: time, bytes that it cannot avoid, their rate, and its share of a copy's rate
// measured in the same run. An op is repeated over memory that does not fit the cache.
#include "kernels/op.h"
#include "tests/bench/bench_util.h"

namespace weir {
namespace {

class OpBench {
 public:
  explicit OpBench(const BenchOptions& options)
      : options_(options), backend_(bench_backend(options)), cpu_(options.device == "cpu") {
    const DeviceInfo info = backend_->info();
    copy_ = copy_rate(*backend_, size_t(cpu_ ? 256 : 2048) << 20);
    results_["device"] = info.name;
    results_["copy_gb_per_s"] = copy_ / 1e9;
    std::printf("%s: copy %.0f GB/s (read + written)\n", info.name.c_str(), copy_ / 1e9);
    std::printf("%-44s %6s %10s %10s %9s %7s\n", "op", "B", "us", "MB", "GB/s", "% copy");
    pool_ = repeated(random_floats(size_t(1) << 24, 1.0f), pool_floats());
    weights_ = repeated(random_bf16(size_t(1) << 24), weight_count());
  }

  bool cpu() const { return cpu_; }
  bool wanted(const std::string& name) const {
    return options_.only.empty() || name.find(options_.only) != std::string::npos;
  }
  int64_t pool_floats() const { return int64_t(cpu_ ? 16 : 1152) << 20; }
  int64_t weight_count() const { return int64_t(cpu_ ? 64 : 1024) << 20; }
  // The slots' parts of one layer of many, `floats` each, end to end as StatePool lays them out.
  SlotState layer(int64_t number, int64_t slots, int64_t floats) const {
    return {pool_ + number * slots * floats, floats};
  }
  const uint16_t* weights() const { return weights_; }
  template <typename T>
  T* put(const std::vector<T>& values) {
    T* data = static_cast<T*>(backend_->allocate(values.size() * sizeof(T)));
    backend_->upload(data, values.data(), values.size() * sizeof(T));
    backend_->finish();
    return data;
  }
  // `values` again and again, `count` numbers in all: a multiple of their number.
  template <typename T>
  T* repeated(const std::vector<T>& values, int64_t count) {
    const T* once = put(values);
    T* data = static_cast<T*>(backend_->allocate(size_t(count) * sizeof(T)));
    for (int64_t at = 0; at < count; at += int64_t(values.size())) {
      backend_->copy(data + at, once, values.size() * sizeof(T));
    }
    backend_->finish();
    return data;
  }
  Acts acts(int64_t tokens, int64_t dim, float scale = 1) {
    return {put(random_floats(size_t(tokens * dim), scale)), dim};
  }
  Rows rows(int32_t count, int32_t first) {
    std::vector<int32_t> slot, firsts(size_t(count), first), begin{0};
    for (int32_t i = 0; i < count; ++i) {
      slot.push_back(i);
      begin.push_back(i + 1);
    }
    return {.count = count, .tokens = count, .slot = put(slot), .first = put(firsts),
            .begin = put(begin)};
  }

  bool split_vectors() const { return options_.vectors == "split"; }

  void time(const std::string& name, int32_t batch, const Program& program) {
    time(name, batch, program, cost(program.front()));
  }
  // The same of an op whose floor the op alone does not say.
  void time(const std::string& name, int32_t batch, const Program& program, const Cost& floor) {
    const double seconds = median_seconds(3, cpu_ ? 5 : 21, [&] {
      backend_->run(program);
      backend_->finish();
    }) / double(program.size());
    const double rate = double(floor.bytes) / seconds;
    std::printf("%-44s %6d %10.2f %10.2f %9.0f %6.1f%%\n", name.c_str(), batch, seconds * 1e6,
                double(floor.bytes) / 1e6, rate / 1e9, 100 * rate / copy_);
    std::fflush(stdout);
    results_["ops"].push_back({{"op", name}, {"batch", batch}, {"us", seconds * 1e6},
                               {"bytes", floor.bytes}, {"flops", floor.flops},
                               {"gb_per_s", rate / 1e9}, {"of_copy", rate / copy_}});
  }
  void save() const { write_json(options_, results_); }

 private:
  BenchOptions options_;
  std::unique_ptr<Backend> backend_;
  bool cpu_;
  double copy_ = 0;
  nlohmann::json results_;
  float* pool_ = nullptr;
  uint16_t* weights_ = nullptr;
};

struct Mixer {
  const char* name;
  Decay decay;
  bool erase, gate;
  int32_t key_heads = 16, value_heads = 16, key_dim = 128, value_dim = 128;
};

void bench_mixer(OpBench& bench, const Mixer& m, int32_t batch) {
  if (!bench.wanted(m.name)) return;
  const int32_t K = m.key_heads * m.key_dim, V = m.value_heads * m.value_dim;
  const int64_t state = int64_t(V) * m.key_dim, history = 3 * (2 * int64_t(K) + V);
  const int64_t stride = state + history;
  const int64_t copies = std::clamp<int64_t>(bench.pool_floats() / (stride * batch), 1, 128);
  DeltaMix op{.rows = bench.rows(batch, 100), .key_heads = m.key_heads,
              .value_heads = m.value_heads, .key_dim = m.key_dim, .value_dim = m.value_dim,
              .q = bench.acts(batch, K), .k = bench.acts(batch, K), .v = bench.acts(batch, V),
              .conv_width = 4, .conv_q = bench.acts(4, K).data, .conv_k = bench.acts(4, K).data,
              .conv_v = bench.acts(4, V).data, .decay = m.decay, .decay_heads = m.value_heads,
              .norm_weight = bench.acts(1, m.value_dim).data, .norm_eps = 1e-6f,
              .out = bench.acts(batch, V)};
  if (m.decay != Decay::None) {
    const int64_t channels = m.value_heads * (m.decay == Decay::PerHead ? 1 : m.key_dim);
    op.decay_in = bench.acts(batch, channels);
    op.decay_a = bench.put(std::vector<float>(size_t(m.value_heads), 0.5f));
    op.dt_bias = bench.acts(1, channels).data;
  }
  if (m.erase) {
    op.erase = bench.acts(batch, K);
    op.write = bench.acts(batch, V);
  } else {
    op.beta = bench.acts(batch, m.value_heads);
  }
  if (m.gate) op.gate = bench.acts(batch, V);
  Program program;
  for (int64_t i = 0; i < copies; ++i) {
    op.state = bench.layer(i, batch, stride);
    op.history = op.state.from(state);
    program.push_back(op);
  }
  bench.time(m.name, batch, program);
}

struct SwilaKind {
  const char* name;
  bool gated, temporal;
};

// 16 heads of four mixtures of 64x64: a GDN's 16 heads of 128x128 in bytes.
void bench_swila(OpBench& bench, const SwilaKind& kind, int32_t batch) {
  if (!bench.wanted(kind.name)) return;
  const int32_t heads = 16, J = 4, D = 64, channels = heads * D, mixed = channels * J;
  const int64_t state = int64_t(mixed) * D, priors = kind.temporal ? 2 * mixed : 0;
  const int64_t stride = state + priors + 9 * channels;
  const int64_t copies = std::clamp<int64_t>(bench.pool_floats() / (stride * batch), 1, 128);
  SwilaMix op{.rows = bench.rows(batch, 100), .heads = heads, .mixtures = J, .dim = D,
              .q = bench.acts(batch, channels), .k = bench.acts(batch, channels),
              .v = bench.acts(batch, channels), .conv_width = 4,
              .conv_q = bench.acts(4, channels).data, .conv_k = bench.acts(4, channels).data,
              .conv_v = bench.acts(4, channels).data, .key_router = bench.acts(batch, mixed),
              .query_router = bench.acts(batch, mixed), .beta = bench.acts(batch, mixed),
              .norm_weight = bench.acts(1, D).data, .norm_eps = 1e-6f,
              .out = bench.acts(batch, channels)};
  if (kind.temporal) {
    op.key_mix = bench.acts(batch, channels);
    op.query_mix = bench.acts(batch, channels);
  }
  if (kind.gated) {
    op.gated = true;
    op.decay_in = bench.acts(batch, mixed);
    op.decay_a = bench.put(std::vector<float>(size_t(heads * J), 0.5f));
    op.dt_bias = bench.acts(1, mixed).data;
  }
  Program program;
  for (int64_t i = 0; i < copies; ++i) {
    op.state = bench.layer(i, batch, stride);
    op.posterior = op.state.from(state);
    op.prior = op.state.from(state + priors / 2);
    op.history = op.state.from(state + priors);
    program.push_back(op);
  }
  bench.time(kind.name, batch, program);
}

struct OuterKind {
  const char* name;
  int32_t heads, key_heads, key_dim, value_dim;
  OuterStep::Decay decay;
  bool normalise = false;
};

void bench_outer(OpBench& bench, const OuterKind& kind, int32_t batch) {
  if (!bench.wanted(kind.name)) return;
  const int64_t state = int64_t(kind.heads) * kind.value_dim * kind.key_dim;
  const int64_t sums = kind.normalise ? int64_t(kind.heads) * kind.key_dim : 0;
  const int64_t stride = state + sums, keys = int64_t(kind.key_heads) * kind.key_dim;
  const int64_t copies = std::clamp<int64_t>(bench.pool_floats() / (stride * batch), 1, 128);
  OuterStep op{.rows = bench.rows(batch, 100), .heads = kind.heads, .key_heads = kind.key_heads,
               .value_heads = kind.heads, .query_heads = kind.key_heads, .key_dim = kind.key_dim,
               .value_dim = kind.value_dim, .decay = kind.decay, .normalise = kind.normalise,
               .q = bench.acts(batch, keys), .k = bench.acts(batch, keys),
               .v = bench.acts(batch, int64_t(kind.heads) * kind.value_dim)};
  if (kind.decay == OuterStep::Decay::PerKey) op.log_decay = bench.acts(batch, keys, 0.01f);
  if (kind.decay == OuterStep::Decay::PerHead) {
    op.log_decay = bench.acts(batch, kind.heads, 0.01f);
    op.v_scale = bench.acts(batch, kind.heads);
  }
  op.out = bench.acts(batch, int64_t(kind.heads) * kind.value_dim);
  Program program;
  for (int64_t i = 0; i < copies; ++i) {
    op.state = bench.layer(i, batch, stride);
    if (kind.normalise) op.sums = op.state.from(state);
    program.push_back(op);
  }
  bench.time(kind.name, batch, program);
}

// RWKV-7: a decay a channel, directions of their own to read and erase along.
void bench_erase(OpBench& bench, int32_t batch) {
  constexpr int32_t kHeads = 32, kDim = 64;
  constexpr int64_t kKeys = kHeads * kDim, kState = kKeys * kDim;
  const int64_t copies = std::clamp<int64_t>(bench.pool_floats() / (kState * batch), 1, 128);
  const auto acts = [&](float size = 0.1f) { return bench.acts(batch, kKeys, size); };
  EraseStep op{.rows = bench.rows(batch, 100), .heads = kHeads, .key_dim = kDim, .value_dim = kDim,
               .decay = Decay::PerChannel, .decayed_read = false, .q = acts(), .k = acts(),
               .p = acts(), .e = acts(), .v = acts(), .log_decay = acts(0.01f), .beta_scale = 0.01f,
               .bonus = acts().data, .out = acts(), .bonus_out = acts()};
  Program program(size_t(copies), op);
  for (int64_t i = 0; i < copies; ++i) {
    std::get<EraseStep>(program[size_t(i)]).state = bench.layer(i, batch, kState);
  }
  bench.time("erase_step RWKV-7 32x64x64", batch, program);
}

void bench_linear(OpBench& bench, const char* name, int32_t in, std::vector<int32_t> rows,
                  int32_t tokens) {
  if (!bench.wanted(name)) return;
  int64_t all = 0;
  for (const int32_t r : rows) all += r;
  const int64_t copies = std::clamp<int64_t>(bench.weight_count() / (all * in), 1, 64);
  const Acts x = bench.acts(tokens, in), y = bench.acts(tokens, all);
  Program program;
  for (int64_t i = 0; i < copies; ++i) {
    Linear op{.tokens = tokens, .in = in, .x = x, .y = y};
    const uint16_t* at = bench.weights() + i * all * in;
    for (const int32_t r : rows) {
      op.part[size_t(op.parts++)] = {.data = at, .rows = r, .cols = in, .dtype = DType::BF16};
      at += int64_t(r) * in;
    }
    program.push_back(op);
  }
  bench.time(name, tokens, program);
}

// What a prompt's activations take beside the matrices, in bytes moved: out is also left split.
void bench_prompt(OpBench& bench, int32_t tokens) {
  const auto count = size_t(tokens);
  const Acts x = bench.acts(tokens, 2048), h = bench.acts(tokens, 2 * 5632);
  const size_t left = bench.split_vectors() ? 4 : 2;
  if (bench.wanted("prompt's rms_norm 2048")) {
    bench.time("prompt's rms_norm 2048", tokens,
               Program(8, RmsNorm{.tokens = tokens, .dim = 2048, .eps = 1e-6f,
                                  .weight = bench.acts(1, 2048).data, .in = x,
                                  .out = bench.acts(tokens, 2048)}),
               {.bytes = count * 2048 * (8 + left)});
  }
  if (bench.wanted("prompt's swiglu 5632")) {
    bench.time("prompt's swiglu 5632", tokens,
               Program(8, Swiglu{.tokens = tokens, .dim = 5632, .gate = h, .up = h.from(5632),
                                 .out = bench.acts(tokens, 5632)}),
               {.bytes = count * 5632 * (12 + left)});
  }
  if (!bench.wanted("prompt's embed 2048")) return;
  const Matrix table{.data = bench.weights(), .rows = 32000, .cols = 2048, .dtype = DType::BF16};
  std::vector<Token> ids(count);
  for (size_t i = 0; i < count; ++i) ids[i] = Token(i * 7919 % 32000);
  bench.time("prompt's embed 2048", tokens,
             Program(8, Embed{.tokens = tokens, .ids = bench.put(ids), .table = table,
                              .out = x}),
             {.bytes = count * 2048 * 6});
}

void bench_small(OpBench& bench, int32_t batch) {
  const Acts x = bench.acts(batch, 2048), h = bench.acts(batch, 2 * 5632);
  const float* weight = bench.acts(1, 2048).data;
  if (bench.wanted("rms_norm")) {
    bench.time("rms_norm 2048", batch,
               Program(32, RmsNorm{.tokens = batch, .dim = 2048, .eps = 1e-6f, .weight = weight,
                                   .in = x, .out = bench.acts(batch, 2048)}));
  }
  if (bench.wanted("swiglu")) {
    bench.time("swiglu 5632", batch,
               Program(32, Swiglu{.tokens = batch, .dim = 5632, .gate = h, .up = h.from(5632),
                                  .out = bench.acts(batch, 5632)}));
  }
  if (!bench.wanted("sample")) return;
  const auto count = size_t(batch);
  const std::pair<const char*, Sampling> ways[] = {
      {"sample, greedy", {}},
      {"sample, temperature", {.temperature = 0.8f}},
      {"sample, top_k 50, top_p 0.9", {.temperature = 0.8f, .top_k = 50, .top_p = 0.9f}},
      {"sample, top_p 0.9", {.temperature = 0.8f, .top_p = 0.9f}},
      {"sample, typical_p 0.9, min_p", {.temperature = 0.8f, .min_p = 0.02f, .typical_p = 0.9f}}};
  for (const auto& [name, how] : ways) {
    Sample op{.count = batch, .vocab = 32000, .logits = bench.acts(batch, 32000, 4),
              .sampling = bench.put(std::vector<Sampling>(count, how)),
              .position = bench.put(std::vector<int32_t>(count, 5)),
              .target = bench.put(std::vector<Token>(count, -1)),
              .top = bench.put(std::vector<int32_t>(count, 0)),
              .edit_begin = bench.put(std::vector<int32_t>(count + 1, 0)),
              .edits = bench.put(std::vector<LogitEdit>(1)),
              .token = bench.put(std::vector<Token>(count)),
              .logprob = bench.acts(1, batch).data,
              .top_token = bench.put(std::vector<Token>(count * Sample::kTop)),
              .top_logprob = bench.acts(batch, Sample::kTop).data};
    bench.time(name, batch, Program(8, op));
  }
}

struct SoftmaxKind {
  const char* name;
  int32_t heads, kv_heads, head_dim;
};

// A token of each row, which sees 2,112 positions: a prompt of 2,048 and half of 128 new tokens.
void bench_softmax(OpBench& bench, const SoftmaxKind& k, int32_t batch) {
  constexpr int32_t kPositions = 2112, kPage = 64, kPagesEach = kPositions / kPage;
  const int32_t keys = k.kv_heads * k.head_dim, pages = batch * kPagesEach;
  const int64_t stride = 2 * int64_t(keys) * kPage;
  const int64_t copies = std::clamp<int64_t>(bench.pool_floats() / (pages * stride), 1, 32);
  if (!bench.wanted(k.name) || pages * stride > bench.pool_floats()) return;
  std::vector<int32_t> table;
  for (int32_t i = 0; i < pages; ++i) table.push_back(int32_t(int64_t(i) * 7919 % pages));
  Attention op{.rows = bench.rows(batch, kPositions - 1), .heads = k.heads,
               .kv_heads = k.kv_heads, .head_dim = k.head_dim, .rope_theta = 10000,
               .q = bench.acts(batch, k.heads * k.head_dim), .k = bench.acts(batch, keys),
               .v = bench.acts(batch, keys), .out = bench.acts(batch, k.heads * k.head_dim),
               .page_stride = stride, .page_tokens = kPage, .page_table = bench.put(table),
               .pages_per_row = kPagesEach};
  Program program;
  for (int64_t i = 0; i < copies; ++i) {
    op.pages = bench.layer(i, pages, stride).data;
    program.push_back(op);
  }
  const auto floats = size_t(pages * stride);
  bench.time(k.name, batch, program,
             {.bytes = floats * sizeof(float),
              .flops = 4 * size_t(batch) * kPositions * size_t(k.heads * k.head_dim)});
}

void bench_all(OpBench& bench) {
  const std::vector<int32_t> batches =
      bench.cpu() ? std::vector<int32_t>{1, 8} : std::vector<int32_t>{1, 8, 32, 128, 512, 1024};
  for (const int32_t batch : batches) {
    bench_mixer(bench, {"delta_mix DeltaNet 16x128x128", Decay::None, false, false}, batch);
    bench_mixer(bench, {"delta_mix GDN 16x128x128", Decay::PerHead, false, true}, batch);
    bench_mixer(bench, {"delta_mix KDA 16x128x128", Decay::PerChannel, false, true}, batch);
    bench_mixer(bench, {"delta_mix GDN-2 16x128x128", Decay::PerChannel, true, true}, batch);
    bench_mixer(bench, {"delta_mix GDN 16/32x128x128", Decay::PerHead, false, true, 16, 32}, batch);
    bench_mixer(bench, {"delta_mix GDN 6x256x512", Decay::PerHead, false, true, 6, 6, 256, 512},
                batch);
    for (const SwilaKind& kind : {SwilaKind{"swila_mix plain 16x4x64x64", false, false},
                                  {"swila_mix temporal 16x4x64x64", false, true},
                                  {"swila_mix gated 16x4x64x64", true, false},
                                  {"swila_mix gated, temporal 16x4x64x64", true, true}}) {
      bench_swila(bench, kind, batch);
    }
    using By = OuterStep::Decay;
    for (const OuterKind& kind :
         {OuterKind{"outer_step GLA 4x256x512", 4, 4, 256, 512, By::PerKey},
          {"outer_step HGRN2 16x128x128", 16, 16, 128, 128, By::PerKey},
          {"outer_step Mamba-2 64x128x64", 64, 1, 128, 64, By::PerHead},
          {"outer_step linear attention 16x128x128", 16, 16, 128, 128, By::None},
          {"outer_step normalised 16x128x128", 16, 16, 128, 128, By::None, true}}) {
      bench_outer(bench, kind, batch);
    }
    if (bench.wanted("erase_step RWKV-7")) bench_erase(bench, batch);
    for (const SoftmaxKind& kind : {SoftmaxKind{"softmax 32x64", 32, 32, 64},
                                    {"softmax 16x128", 16, 16, 128},
                                    {"softmax 16 (4 kv) x128", 16, 4, 128},
                                    {"softmax 32 (4 kv) x128", 32, 4, 128}}) {
      bench_softmax(bench, kind, batch);
    }
  }
  std::vector<int32_t> tokens = {1, 4, 8, 16, 32, 64, 95, 128, 512};
  if (bench.cpu()) tokens = {1, 8};
  for (const int32_t count : tokens) {
    bench_linear(bench, "linear in-projection 2048 -> 8224", 2048,
                 {2048, 2048, 2048, 16, 16, 2048}, count);
    bench_linear(bench, "linear out-projection 2048 -> 2048", 2048, {2048}, count);
    bench_linear(bench, "linear gate and up 2048 -> 11264", 2048, {5632, 5632}, count);
    bench_linear(bench, "linear down 5632 -> 2048", 5632, {2048}, count);
    bench_linear(bench, "linear head 2048 -> 32000", 2048, {32000}, count);
  }
  for (const int32_t batch : batches) bench_small(bench, batch);
  bench_prompt(bench, bench.cpu() ? 256 : 16384);
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) {
  weir::OpBench bench(weir::bench_options(argc, argv));
  weir::bench_all(bench);
  bench.save();
}
