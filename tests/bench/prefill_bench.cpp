// Mixers over whole prompts: time, tokens a second, the bytes that each op cannot avoid (its
// activations, which no cache holds, and the state), and what a copy of as many bytes takes.
#include <cmath>
#include <sstream>
#include <string>

#include "kernels/op.h"
#include "tests/bench/bench_util.h"
#include "tests/bench/prompt_mixers.h"

namespace weir {
namespace {

using namespace prompts;

class PrefillBench {
 public:
  explicit PrefillBench(const BenchOptions& options)
      : options_(options), backend_(bench_backend(options)), cpu_(options.device == "cpu") {
    copy_ = copy_rate(*backend_, size_t(cpu_ ? 256 : 2048) << 20);
    results_["device"] = backend_->info().name;
    results_["copy_gb_per_s"] = copy_ / 1e9;
    std::printf("%s: copy %.0f GB/s (read + written)\n", backend_->info().name.c_str(),
                copy_ / 1e9);
    std::printf("%-28s %4s %6s %9s %12s %9s %10s %7s\n", "mixer", "B", "tokens", "ms", "tokens/s",
                "MB", "copy's ms", "% copy");
    fill_pool();
  }

  void time(const Mixer& m, int32_t rows, int32_t tokens) {
    const int64_t each = int64_t(rows) * tokens * m.heads * std::max(m.key_dim, m.value_dim);
    time(m.name, rows, tokens, 8 * each,
         [&](size_t* bytes) { return mix(m, rows, tokens, bytes); });
  }
  template <typename M>
  void time(const M& m, int32_t rows, int32_t tokens) {
    time(m.name, rows, tokens, int64_t(rows) * tokens * 16 * 1024,
         [&](size_t* bytes) { return mix(m, rows, tokens, bytes); });
  }
  // Products counted are those of the pairs that see each other.
  void time(const Softmax& m, int32_t rows, int32_t tokens) {
    if (!chosen(m.name)) return;
    at_ = 0;
    const int32_t keys = m.kv_heads * m.head_dim, queries = m.heads * m.head_dim;
    const Program program{attention(m, rows, tokens)};
    const double seconds = median_seconds(2, cpu_ ? 1 : 9, [&] {
      backend_->run(program);
      backend_->finish();
    });
    const double all = double(rows) * tokens, bytes = 4 * all * (2.0 * queries + 4.0 * keys);
    const double flops = 4.0 * m.heads * m.head_dim * all * (tokens + 1) / 2;
    std::printf("%-28s %4d %6d %9.3f %12.0f %9.1f %10.3f %6.1f%% %5.0f TFLOP/s\n", m.name, rows,
                tokens, seconds * 1e3, all / seconds, bytes / 1e6, bytes / copy_ * 1e3,
                100 * bytes / copy_ / seconds, flops / seconds / 1e12);
    std::fflush(stdout);
    results_["mixers"].push_back({{"mixer", m.name}, {"rows", rows}, {"tokens", tokens},
                                  {"ms", seconds * 1e3}, {"bytes", bytes}, {"flops", flops},
                                  {"copy_ms", bytes / copy_ * 1e3},
                                  {"tflop_per_s", flops / seconds / 1e12}});
  }
  bool cpu() const { return cpu_; }
  void save() const { write_json(options_, results_); }

 private:
  // `floats`: about an op's, of which a program has as many as make its activations leave caches.
  template <typename Make>
  void time(const char* name, int32_t rows, int32_t tokens, int64_t floats, const Make& make) {
    if (!chosen(name)) return;
    at_ = log_decays_at_ = 0;
    const int64_t copies = std::clamp<int64_t>(pool_floats() / floats, 1, 8);
    Program program;
    size_t bytes = 0;
    for (int64_t i = 0; i < copies; ++i) program.push_back(make(&bytes));
    const double seconds = median_seconds(2, cpu_ ? 1 : 9, [&] {
      backend_->run(program);
      backend_->finish();
    }) / double(copies);
    const double all = double(rows) * tokens, floor = double(bytes) / copy_;
    std::printf("%-28s %4d %6d %9.3f %12.0f %9.1f %10.3f %6.1f%%\n", name, rows, tokens,
                seconds * 1e3, all / seconds, double(bytes) / 1e6, floor * 1e3,
                100 * floor / seconds);
    std::fflush(stdout);
    results_["mixers"].push_back({{"mixer", name}, {"rows", rows}, {"tokens", tokens},
                                  {"ms", seconds * 1e3}, {"bytes", bytes},
                                  {"copy_ms", floor * 1e3}});
  }
  // --only names one part of a name, or several with commas between.
  bool chosen(const std::string& name) const {
    std::istringstream parts(options_.only);
    for (std::string part; std::getline(parts, part, ',');) {
      if (name.find(part) != std::string::npos) return true;
    }
    return options_.only.empty();
  }
  template <typename T>
  T* put(const std::vector<T>& values) {
    T* data = static_cast<T*>(backend_->allocate(values.size() * sizeof(T)));
    backend_->upload(data, values.data(), values.size() * sizeof(T));
    backend_->finish();
    return data;
  }
  int64_t pool_floats() const { return int64_t(cpu_ ? 32 : 1472) << 20; }
  void fill_pool() {
    const std::vector<float> some = random_floats(size_t(32) << 20, 1.0f);
    pool_ = static_cast<float*>(backend_->allocate(size_t(pool_floats()) * sizeof(float)));
    for (int64_t at = 0; at < pool_floats(); at += int64_t(some.size())) {
      backend_->upload(pool_ + at, some.data(), some.size() * sizeof(float));
    }
    std::vector<float> logs = random_floats(size_t(8) << 20, 0.1f);
    for (float& g : logs) g = -std::fabs(g);
    log_decays_ = static_cast<float*>(backend_->allocate(size_t(pool_floats())));
    for (int64_t at = 0; at < pool_floats() / 4; at += int64_t(logs.size())) {
      backend_->upload(log_decays_ + at, logs.data(), logs.size() * sizeof(float));
    }
    backend_->finish();
  }
  Acts log_decays(int64_t tokens, int64_t dim) {
    if (log_decays_at_ + tokens * dim > pool_floats() / 4) log_decays_at_ = 0;
    const Acts made{log_decays_ + log_decays_at_, dim};
    log_decays_at_ += tokens * dim;
    return made;
  }
  float* states(int64_t floats) {
    return static_cast<float*>(backend_->allocate(size_t(floats) * sizeof(float)));
  }
  // Random numbers that no other argument of the op lies on.
  Acts acts(int64_t tokens, int64_t dim) {
    if (at_ + tokens * dim > pool_floats()) at_ = 0;
    const Acts made{pool_ + at_, dim};
    at_ += tokens * dim;
    return made;
  }
  float* vector(int64_t count) { return put(random_floats(size_t(count), 1.0f)); }

  // And behind them `decoding` rows of a token.
  Rows rows_of(int32_t count, int32_t tokens, int32_t decoding = 0) {
    std::vector<int32_t> slot, first, begin{0};
    for (int32_t i = 0; i < count + decoding; ++i) {
      slot.push_back(i);
      first.push_back(i < count ? 0 : 1);
      begin.push_back(begin.back() + (i < count ? tokens : 1));
    }
    return {.count = count + decoding, .tokens = begin.back(), .slot = put(slot),
            .first = put(first), .begin = put(begin)};
  }

  Attention attention(const Softmax& m, int32_t count, int32_t tokens) {
    constexpr int32_t kPage = 64;
    const int32_t keys = m.kv_heads * m.head_dim, T = count * tokens;
    Attention op{.rows = rows_of(count, tokens), .heads = m.heads, .kv_heads = m.kv_heads,
                 .head_dim = m.head_dim, .rope_theta = 10000, .q = acts(T, m.heads * m.head_dim),
                 .k = acts(T, keys), .v = acts(T, keys), .forgets = m.forgets};
    if (m.forgets) op.forget = acts(T, m.heads);
    op.out = acts(T, m.heads * m.head_dim);
    op.page_stride = int64_t(kPage) * 2 * (keys + (m.forgets ? m.heads : 0));
    op.page_tokens = kPage;
    op.pages_per_row = (tokens + kPage - 1) / kPage;
    std::vector<int32_t> table;
    for (int32_t i = 0; i < count * op.pages_per_row; ++i) table.push_back(i);
    op.pages = static_cast<float*>(
        backend_->allocate(table.size() * size_t(op.page_stride) * sizeof(float)));
    op.page_table = put(table);
    return op;
  }

  DeltaMix mix(const Mixer& m, int32_t count, int32_t tokens, size_t* bytes) {
    const Rows rows = rows_of(count, tokens, m.decoding);
    count = rows.count;
    const int32_t T = rows.tokens, K = m.heads * m.key_dim, V = m.heads * m.value_dim;
    const int64_t state = int64_t(V) * m.key_dim, history = 3 * (2 * int64_t(K) + V);
    DeltaMix op{.rows = rows, .key_heads = m.heads,
                .value_heads = m.heads, .key_dim = m.key_dim, .value_dim = m.value_dim,
                .q = acts(T, K), .k = acts(T, K), .v = acts(T, V),
                .conv_width = 4, .conv_q = vector(4 * K), .conv_k = vector(4 * K),
                .conv_v = vector(4 * V), .decay = m.decay, .decay_heads = m.heads,
                .norm_weight = vector(m.value_dim), .norm_eps = 1e-6f, .out = acts(T, V)};
    int64_t floats = 2 * int64_t(K) + 2 * V;  // a token's
    if (m.decay != Decay::None) {
      const int64_t channels = m.decay == Decay::PerHead ? m.heads : K;
      op.decay_in = acts(T, channels);
      op.decay_a = put(std::vector<float>(size_t(m.heads), 0.1f));
      op.dt_bias = vector(channels);
      floats += channels;
    }
    if (m.erase) {
      op.erase = acts(T, K);
      op.write = acts(T, V);
      floats += K + V;
    } else {
      op.beta = acts(T, m.heads);
      floats += m.heads;
    }
    if (m.gate) {
      op.gate = acts(T, V);
      floats += V;
    }
    float* const slots = static_cast<float*>(
        backend_->allocate(size_t(count * (state + history)) * sizeof(float)));
    op.state = {slots, state + history};
    op.history = op.state.from(state);
    *bytes = sizeof(float) * size_t(T * floats + count * (state + history));
    return op;
  }

  SwilaMix mix(const SwilaMixer& m, int32_t count, int32_t tokens, size_t* bytes) {
    const Rows rows = rows_of(count, tokens, m.decoding);
    count = rows.count;
    constexpr int32_t J = 4, D = 64;
    const int32_t T = rows.tokens, C = m.heads * D, M = C * J;
    const int64_t state = int64_t(M) * D, mixed = m.temporal ? M : 0, history = 9 * int64_t(C);
    SwilaMix op{.rows = rows, .heads = m.heads, .mixtures = J, .dim = D, .q = acts(T, C),
                .k = acts(T, C), .v = acts(T, C), .conv_width = 4, .conv_q = vector(4 * C),
                .conv_k = vector(4 * C), .conv_v = vector(4 * C), .key_router = acts(T, M),
                .query_router = acts(T, M), .beta = acts(T, M), .norm_weight = vector(D),
                .norm_eps = 1e-6f, .out = acts(T, C)};
    int64_t floats = 4 * int64_t(C) + 3 * int64_t(M);  // a token's
    if (m.temporal) {
      op.key_mix = acts(T, C);
      op.query_mix = acts(T, C);
      floats += 2 * C;
    }
    if (m.gated) {
      op.gated = true;
      op.decay_in = acts(T, M);
      op.decay_a = put(std::vector<float>(size_t(m.heads * J), 0.1f));
      op.dt_bias = vector(M);
      floats += M;
    }
    const int64_t stride = state + 2 * mixed + history;
    float* const slots =
        static_cast<float*>(backend_->allocate(size_t(count * stride) * sizeof(float)));
    op.state = {slots, stride};
    op.posterior = op.state.from(state);
    op.prior = op.state.from(state + mixed);
    op.history = op.state.from(state + 2 * mixed);
    *bytes = sizeof(float) * size_t(T * floats + count * stride);
    return op;
  }

  OuterStep mix(const Adder& m, int32_t count, int32_t tokens, size_t* bytes) {
    const Rows rows = rows_of(count, tokens, m.decoding);
    count = rows.count;
    const int32_t T = rows.tokens, K = m.key_heads * m.key_dim, V = m.heads * m.value_dim;
    const int64_t state = int64_t(V) * m.key_dim;
    OuterStep op{.rows = rows, .heads = m.heads, .key_heads = m.key_heads,
                 .value_heads = m.heads, .query_heads = m.key_heads, .key_dim = m.key_dim,
                 .value_dim = m.value_dim, .decay = m.decay, .scale = 0.1f, .q = acts(T, K),
                 .k = acts(T, K), .v = acts(T, V), .out = acts(T, V),
                 .state = {states(count * state), state}};
    int64_t floats = 2 * int64_t(K) + 2 * V;  // a token's
    if (m.decay == OuterStep::Decay::Constant) {
      op.constant = log_decays(1, m.heads).data;
    } else if (m.decay != OuterStep::Decay::None) {
      const int64_t channels = m.decay == OuterStep::Decay::PerHead    ? m.heads
                               : m.decay == OuterStep::Decay::PerValue ? V
                                                                       : K;
      op.log_decay = log_decays(T, channels);
      floats += channels;
    }
    if (m.scaled) {
      op.v_scale = acts(T, m.heads);
      op.skip = vector(V);
      floats += m.heads;
    }
    *bytes = sizeof(float) * size_t(T * floats + count * state);
    return op;
  }

  EraseStep mix(const Eraser& m, int32_t count, int32_t tokens, size_t* bytes) {
    const Rows rows = rows_of(count, tokens);
    const int32_t T = rows.tokens, K = m.heads * m.key_dim, V = m.heads * m.value_dim;
    const int64_t state = int64_t(V) * m.key_dim;
    EraseStep op{.rows = rows, .heads = m.heads, .key_dim = m.key_dim, .value_dim = m.value_dim,
                 .decay = Decay::PerChannel, .decayed_read = false, .q = acts(T, K),
                 .k = acts(T, K), .p = acts(T, K), .e = acts(T, K), .v = acts(T, V),
                 .log_decay = log_decays(T, K), .beta_scale = 0.01f, .bonus = vector(K),
                 .out = acts(T, V), .bonus_out = acts(T, V),
                 .state = {states(count * state), state}};
    *bytes = sizeof(float) * size_t(int64_t(T) * (5 * K + 3 * V) + count * state);
    return op;
  }

  Conv1d mix(const Convolution& m, int32_t count, int32_t tokens, size_t* bytes) {
    const Rows rows = rows_of(count, tokens);
    const int64_t C = m.channels;
    *bytes = sizeof(float) * size_t((2 * int64_t(rows.tokens) + 3 * count) * C);
    return {.rows = rows, .channels = m.channels, .width = 4, .taps = vector(4 * C),
            .activation = Activation::Silu, .in = acts(rows.tokens, C),
            .out = acts(rows.tokens, C), .history = {states(count * 3 * C), 3 * C}};
  }

  BenchOptions options_;
  std::unique_ptr<Backend> backend_;
  bool cpu_;
  double copy_ = 0;
  nlohmann::json results_;
  float* pool_ = nullptr;
  int64_t at_ = 0;
  float* log_decays_ = nullptr;  // a quarter of the pool's size
  int64_t log_decays_at_ = 0;
};

void bench_vectors(PrefillBench& bench, const std::vector<int32_t>& batches) {
  using By = OuterStep::Decay;
  const Adder adders[] = {{"linear attention 16x128x128", By::None, 16, 16, 128, 128},
                          {"RetNet 8x256x512", By::Constant, 8, 8, 256, 512},
                          {"GLA 4x256x512", By::PerKey, 4, 4, 256, 512},
                          {"HGRN2 16x128x128", By::PerKey, 16, 16, 128, 128},
                          {"Mamba-2 64x(128x64)", By::PerHead, 64, 1, 128, 64, true},
                          {"slot attention 4x256x64 keys", By::PerValue, 4, 4, 256, 64}};
  const auto time = [&](const auto& mixer) {
    for (const int32_t rows : batches) bench.time(mixer, rows, bench.cpu() ? 64 : 2048);
  };
  for (const Adder& adder : adders) time(adder);
  for (const Adder& adder : adders) {  // one long prompt
    if (!bench.cpu()) bench.time(adder, 1, 32768);
  }
  for (Adder adder : {Adder{"linear attention among 128", By::None, 16, 16, 128, 128},
                      {"GLA among 128", By::PerKey, 4, 4, 256, 512}}) {
    adder.decoding = 128;
    for (const int32_t tokens : {512, 2048}) bench.time(adder, 1, bench.cpu() ? 64 : tokens);
  }
  time(Eraser{"RWKV-7 32x64x64", 32, 64, 64});
  time(Convolution{"conv1d 4352 channels", 4352});
}

// Prompts among rows that decode.
void bench_mixed(PrefillBench& bench) {
  for (const int32_t tokens : {512, 2048}) {
    for (const Mixer& mixer :
         {Mixer{"GDN among 128", Decay::PerHead, false, true, 16, 128, 128, 128},
          {"KDA among 128", Decay::PerChannel, false, true, 16, 128, 128, 128}}) {
      bench.time(mixer, 1, bench.cpu() ? 64 : tokens);
    }
    bench.time(SwilaMixer{"SwiLA among 128", false, false, 16, 128}, 1, bench.cpu() ? 64 : tokens);
  }
  const Mixer few{"GDN among 32", Decay::PerHead, false, true, 16, 128, 128, 32};
  bench.time(few, 1, bench.cpu() ? 64 : 224);
}

void bench_all(PrefillBench& bench) {
  const Mixer mixers[] = {{"DeltaNet 16x128x128", Decay::None, false, false},
                          {"GDN 16x128x128", Decay::PerHead, false, true},
                          {"KDA 16x128x128", Decay::PerChannel, false, true},
                          {"GDN-2 16x128x128", Decay::PerChannel, true, true}};
  const std::vector<int32_t> batches =
      bench.cpu() ? std::vector<int32_t>{1} : std::vector<int32_t>{1, 8, 32};
  for (const Mixer& mixer : mixers) {
    for (const int32_t rows : batches) {
      bench.time(mixer, rows, bench.cpu() ? 64 : 2048);
    }
  }
  const SwilaMixer swila[] = {{"SwiLA 16x4x64x64", false, false},
                              {"SwiLA temporal 16x4x64x64", false, true},
                              {"SwiLA gated 16x4x64x64", true, false},
                              {"SwiLA gated temporal 16x4x64x64", true, true}};
  for (const SwilaMixer& mixer : swila) {
    for (const int32_t rows : batches) {
      bench.time(mixer, rows, bench.cpu() ? 64 : 2048);
      bench.time(mixer, rows, 32);
    }
  }
  for (const Softmax& mixer : {Softmax{"softmax 32x64", 32, 32, 64},
                               {"softmax 16x128", 16, 16, 128},
                               {"softmax 16 (4 kv) x128", 16, 4, 128},
                               {"softmax that forgets 32x64", 32, 32, 64, true}}) {
    for (const int32_t rows : batches) bench.time(mixer, rows, bench.cpu() ? 64 : 2048);
  }
  bench_vectors(bench, batches);
  bench_mixed(bench);
  if (bench.cpu()) return;
  for (const int32_t tokens : {32768, 131072}) bench.time(mixers[1], 1, tokens);  // one long prompt
}

}  // namespace
}  // namespace weir

int main(int argc, char** argv) {
  weir::PrefillBench bench(weir::bench_options(argc, argv));
  weir::bench_all(bench);
  bench.save();
}
