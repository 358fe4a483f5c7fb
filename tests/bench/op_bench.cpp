// Each op on its own: time, bytes that it cannot avoid, their rate, and its share of a copy's rate
// measured in the same run. An op is repeated over memory that does not fit the cache.
#include "tests/bench/op_bench.h"

namespace weir {
namespace {

struct Mixer {
  const char* name;
  Decay decay;
  bool erase, gate;
  int32_t key_heads = 16, value_heads = 16, key_dim = 128, value_dim = 128;
};

// With writes deferred, where the backend does so.
void bench_mixer(OpBench& bench, const Mixer& m, int32_t batch, bool defers) {
  const std::string name = m.name + std::string(defers ? ", deferred" : "");
  if (!bench.wanted(name)) return;
  const int32_t K = m.key_heads * m.key_dim, V = m.value_heads * m.value_dim;
  const int64_t state = int64_t(V) * m.key_dim, history = 3 * (2 * int64_t(K) + V);
  const PendingLayout layout{.values = m.value_dim, .key_dim = m.key_dim};
  const int64_t waiting = defers ? m.value_heads * layout.floats() : 0;
  const int64_t stride = state + history + waiting;
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
  if (defers && !bench.defers(op)) return;
  Program program;
  for (int64_t i = 0; i < copies; ++i) {
    op.state = bench.layer(i, batch, stride);
    op.history = op.state.from(state);
    if (defers) op.pending = op.state.from(state + history);
    program.push_back(op);
  }
  bench.time(name, batch, program);
}

struct SwilaKind {
  const char* name;
  bool gated, temporal;
};

// 16 heads of four mixtures of 64x64: a GDN's 16 heads of 128x128 in bytes. As bench_mixer().
void bench_swila(OpBench& bench, const SwilaKind& kind, int32_t batch, bool defers) {
  const std::string name = kind.name + std::string(defers ? ", deferred" : "");
  if (!bench.wanted(name)) return;
  const int32_t heads = 16, J = 4, D = 64, channels = heads * D, mixed = channels * J;
  const int64_t state = int64_t(mixed) * D, priors = kind.temporal ? 2 * mixed : 0;
  const PendingLayout layout =
      pending_layout(SwilaMix{.mixtures = J, .dim = D, .gated = kind.gated});
  const int64_t kept = state + priors + 9 * channels;
  const int64_t stride = kept + (defers ? heads * layout.floats() : 0);
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
  if (defers && !bench.defers(op)) return;
  Program program;
  for (int64_t i = 0; i < copies; ++i) {
    op.state = bench.layer(i, batch, stride);
    op.posterior = op.state.from(state);
    op.prior = op.state.from(state + priors / 2);
    op.history = op.state.from(state + priors);
    if (defers) op.pending = op.state.from(kept);
    program.push_back(op);
  }
  bench.time(name, batch, program);
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
    for (const bool defers : {false, true}) {
      for (const Mixer& m :
           {Mixer{"delta_mix DeltaNet 16x128x128", Decay::None, false, false},
            {"delta_mix GDN 16x128x128", Decay::PerHead, false, true},
            {"delta_mix KDA 16x128x128", Decay::PerChannel, false, true},
            {"delta_mix GDN-2 16x128x128", Decay::PerChannel, true, true},
            {"delta_mix GDN 16/32x128x128", Decay::PerHead, false, true, 16, 32},
            {"delta_mix GDN 6x256x512", Decay::PerHead, false, true, 6, 6, 256, 512}}) {
        bench_mixer(bench, m, batch, defers);
      }
      for (const SwilaKind& kind : {SwilaKind{"swila_mix plain 16x4x64x64", false, false},
                                    {"swila_mix temporal 16x4x64x64", false, true},
                                    {"swila_mix gated 16x4x64x64", true, false},
                                    {"swila_mix gated, temporal 16x4x64x64", true, true}}) {
        bench_swila(bench, kind, batch, defers);
      }
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
