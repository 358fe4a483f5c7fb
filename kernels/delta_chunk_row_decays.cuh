#pragma once
#include "kernels/delta_chunk_row_part.cuh"

// Chunks whose channels each have their own decay, or erase gate, in the one kernel for whole rows.
//
// What a query at t sees of a key at s is their product in each channel times the decays of the
// tokens s + 1 .. t. No factor of it may be the inverse of a decay, which may be as good as zero.
// So keys are kept decayed until the end of their warp's eight tokens, and queries and keys that
// erase since the start of theirs: what lies between two runs of eight is a factor of the channel
// alone. Within a run the same holds for its two halves, and within a half each pair's product is
// made of the decays themselves, in float32, by the warp that has its tokens in registers. So each
// number takes one exponential, and what is left to do is products of halves.
namespace weir::cuda::chunk {

__device__ inline float dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
// Where (t, s), s <= t, is in a triangle, and the two bits of t and s of its first ten places.
__device__ constexpr int triangle_at(int t, int s) { return t * (t + 1) / 2 + s; }
constexpr uint32_t kTriangleRows = 0xffa94, kTriangleColumns = 0xe4910;

// By all warps that prepare: what no chunk changes.
__device__ inline void clear_once(RowShared<true>& shared) {
  auto& image = shared.stage[0].image;
  constexpr int kWords = sizeof(image.p) / 16;
  for (int i = threadIdx.x; i < kWords; i += kPreparers) {
    reinterpret_cast<uint4*>(image.p)[i] = {0, 0, 0, 0};
  }
  for (int i = threadIdx.x; i < 4 * kBlock * kBlock; i += kPreparers) shared.diagonal[0][i] = 0;
  if (threadIdx.x < 128) shared.runs.factors[kFactors - 1][threadIdx.x] = __float2half(1.0f);
}

// Of chunk n: decays, keys and queries by the warps that prepare, a run of eight tokens each, which
// never meet; what lies between runs, and the products, by those that have the state.
template <typename Preparer>
struct RowDecays {
  static constexpr int kRun = 8, kHalf = 4;  // tokens
  using Numbers = float4[kHalf];
  using Chunk = Image<128, true>;
  static constexpr uint2 kOnes{0x3c003c00, 0x3c003c00};
  const DeltaMix& op;
  RowShared<true>& shared;
  const Preparer& preparer;
  int n;
  int thread = thread_again(), warp = thread / 32 % kRowWarps;
  int lane = thread % 32, channel = lane * 4;

  __device__ Chunk& image() const { return shared.stage[0].image; }
  __device__ float* decays_of(int t) const { return &shared.logs[0][t * 128 + channel]; }
  __device__ float* logs_of(int run) const { return &shared.runs.logs[run][channel]; }

  // Of the run's tokens, the logarithms of their decays, in powers of two.
  __device__ void logs(float4 (&g)[kRun]) const {
    const int from = kRun * warp;
#pragma unroll
    for (int i = 0; i < kRun; ++i) g[i] = zero4();
    if (op.decay == Decay::None) return;
    const int head = preparer.place.decay_head;
    float4 shift;
    if (op.decay == Decay::PerChannel) {
      preparer.source.template decays<kRun>(from, channel, g);
      shift = load4(&shared.runs.shift[channel]);
    } else {
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int t = min(preparer.first + from + i, preparer.place.count - 1);
        const float logit = at(op.decay_in, preparer.place.begin + t)[head];
        g[i] = {logit, logit, logit, logit};
      }
      shift.x = shift.y = shift.z = shift.w = op.dt_bias[head];
    }
    preparer.template log2_decays<kRun>(op.decay_a[head], shift, g);
    if (preparer.first + kTokens <= preparer.place.count) return;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (!preparer.valid(from + i)) g[i] = zero4();
    }
  }
  // The decays, in place of their logits, and the sum of their logarithms.
  __device__ void make() const {
    float4 g[kRun], sum = zero4();
    logs(g);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      sum = plus(sum, g[i]);
      *reinterpret_cast<float4*>(decays_of(kRun * warp + i)) = each(g[i], exp2_fast);
    }
    *reinterpret_cast<float4*>(logs_of(warp)) = sum;
  }

  // What decays between run c and block b of two runs is row (b - 1)^2 + c of shared.runs.factors,
  // and in the first run of block b row 8 + b; ones are the last row. A lane's channels of a
  // fragment, {p, p + 1, p + 8, p + 9}, lie side by side. A channel for each of 128 threads, with
  // the rows of b = 3, and for as many others.
  __device__ void keep_factors() const {
    const int own = thread % 128;
    float sum[7];  // of the runs from one on, up to that before block b
#pragma unroll
    for (int run = 1; run < 7; ++run) sum[run] = shared.runs.logs[run][own];
    half* const to = &shared.runs.factors[0][own / 16 * 16 + own % 8 / 2 * 4 + own / 8 % 2 * 2 +
                                             own % 2];
    const auto keep = [&](int row, float x) { to[row * 128] = __float2half(exp2_fast(x)); };
    if (warp < kRowWarps / 2) {
      keep(0, sum[1]);
#pragma unroll
      for (int run = 5; run > 0; --run) {
        if (run < 5) sum[run] += sum[run + 1];
        keep(3 + run, sum[run]);
      }
    } else {
      keep(9, sum[2]);
      keep(10, sum[4]);
      keep(11, sum[6]);
#pragma unroll
      for (int run = 3; run > 0; --run) {
        if (run < 3) sum[run] += sum[run + 1];
        keep(run, sum[run]);
      }
    }
  }

  // Where the warp's queries (0) or keys (1) are kept, 256 bytes each: over what they are made of,
  // but for its last three tokens, which another warp's convolution needs too.
  __device__ half* kept(int which) const {
    return reinterpret_cast<half*>(shared.raw_of(which) + (kRun * warp + 3) * 128) + channel;
  }
  // Convolved, activated, normalised.
  __device__ void normalise(int which) const {
    float4 x[kRun + 3];
    float scale[kRun];
    const float whole = which == 0 ? 0.08838834764831845f : 1.0f;  // 1 / sqrt(128)
    preparer.source.template convolved<kRun>(which, kRun * warp, channel, x);
    activate<kRun, true>(op.qk_activation, x);
    norm_scales<128>(op.qk_norm, x, scale);
#pragma unroll
    for (int i = 0; i < kRun; ++i) x[i] = scaled(x[i], scale[i] * whole);
    preparer.drop_others(kRun * warp, x);
    __syncwarp();  // all have read what is overwritten from here on
#pragma unroll
    for (int i = 0; i < kRun; ++i) store_halves(kept(which) + i * 128, x[i]);
  }

  // Operands of the products of a run's later half with its earlier one, in place of the warp's
  // decays: four keys decayed until the half's end, then four keys that erase and four queries
  // decayed since the half's start. Rows of 256 bytes, 16-byte pieces permuted by the row.
  __device__ unsigned char* halves() const {
    return reinterpret_cast<unsigned char*>(&shared.logs[0][kRun * warp * 128]);
  }
  static constexpr int kLater = 1024;  // bytes to the second part
  __device__ void keep_half(int at, int row, uint2 x) const {
    *reinterpret_cast<uint2*>(halves() + at + row * 256 + (lane / 2 ^ row) * 16 + lane % 2 * 8) = x;
  }

  // Sums over all lanes of products in half a run, to where they belong: those of keys that erase,
  // below the diagonal, are the first six.
  __device__ void keep_pairs(int from, float (&sum)[16]) const {
    scatter_sums<8>(sum);
    const float all = sum[0] + __shfl_xor_sync(0xffffffffu, sum[0], 1);
    if (lane % 2 != 0) return;
    const bool erases = lane < 12;
    const int i = erases ? lane / 2 : lane / 2 - 6;
    const int t = from + (kTriangleRows >> 2 * i & 3) + (erases ? 1 : 0);
    const int s = from + (kTriangleColumns >> 2 * i & 3);
    if (erases) {
      shared.diagonal[t / kBlock][s % kBlock * kBlock + t % kBlock] = all;
    } else {
      image().p[panel_at(t, s)] = __float2half(all);
    }
  }

  // Keys of four tokens times the gates that erase, or beta.
  __device__ void erase(int from, Numbers& k) const {
    if (op.erase.data == nullptr) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) k[i] = scaled(k[i], shared.beta[n % 2][from + i]);
      return;
    }
    Numbers gate;
    const bool later = from % kRun != 0;
    preparer.source.take_gates(n, later, gate);
    const float most = 0.5f * op.beta_scale;  // as fast_sigmoid() has 0.5
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      gate[i] = each(gate[i], [&](float x) { return most + most * tanh_fast(0.5f * x); });
      k[i] = times(k[i], gate[i]);
    }
    preparer.source.ask_gates(later ? n + 1 : n, later ? 0 : 1);
    if (preparer.first + kTokens <= preparer.place.count) return;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (!preparer.valid(from + i)) k[i] = zero4();  // the gate may be no number
    }
  }
  // Four tokens: keys that erase and queries decayed since the run's start, keys until its end, and
  // the products of those within the half. since: what decayed within the run before them, and
  // then also within them.
  __device__ void half_run(int from, uint2& since, float (&sum)[16]) const {
    Numbers e, q, d;
    const half* const keys = kept(1) + from % kRun * 128;
    const half* const queries = kept(0) + from % kRun * 128;
    const bool later = from % kRun != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) e[i] = load_halves(keys + i * 128);
    erase(from, e);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      q[i] = load_halves(queries + i * 128);
      d[i] = load4(decays_of(from + i));
    }
    uint2 until = kOnes;
    if (later) {  // values of the next chunk may soon lie where queries were
      publish_to_copy_engine();
      warp_arrive(&shared.raw_read[0]);
    } else {
      float4 all = load4(decays_of(from + kHalf));
#pragma unroll
      for (int i = 1; i < kHalf; ++i) all = times(all, load4(decays_of(from + kHalf + i)));
      until = packed(all);
    }
    __syncwarp();  // all have read the decays that are overwritten from here on
    const PanelRun at(from, channel);
#pragma unroll
    for (int s = 0; s < kHalf; ++s) {
      float4 key = load_halves(keys + s * 128);
      sum[6 + triangle_at(s, s)] = dot(q[s], key);
#pragma unroll
      for (int t = s + 1; t < kHalf; ++t) {
        key = times(key, d[t]);
        sum[triangle_at(t - 1, s)] = dot(e[t], key);
        sum[6 + triangle_at(t, s)] = dot(q[t], key);
      }
      const uint2 last = packed(key);
      if (!later) keep_half(0, s, last);
      *reinterpret_cast<uint2*>(&image().end[at[s]]) = times_halves(last, until);
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (i > 0) d[i] = times(d[i], d[i - 1]);
      const uint2 key = packed(times(e[i], d[i])), query = packed(times(q[i], d[i]));
      if (later) {
        keep_half(kLater, i, key);
        keep_half(kLater, kHalf + i, query);
      }
      *reinterpret_cast<uint2*>(&image().k[at[i]]) = times_halves(key, since);
      *reinterpret_cast<uint2*>(&image().q[at[i]]) = times_halves(query, since);
    }
    since = packed(d[kHalf - 1]);
  }
  // The next chunk's raw values, to where queries were: the slowest have taken theirs by now.
  __device__ void bring_values() const {
    const auto& source = preparer.source;
    if (thread != kPreparers - 32 || n + 1 >= source.chunks()) return;
    sleep_for(&shared.raw_read[0], n);
    source.bring(2, n + 1);
  }
  __device__ void keys_and_queries() const {
    uint2 since = kOnes;
#pragma unroll 1
    for (int from = kRun * warp; from < kRun * warp + kRun; from += kHalf) {
      float sum[16];
      half_run(from, since, sum);
      if (from % kRun != 0) bring_values();
      keep_pairs(from, sum);
    }
    __syncwarp();
    join_halves();
  }

  // A pair of sums next to each other in a diagonal block, of keys that erase or of queries.
  __device__ void keep_erased(int t, int s, float low, float high) const {
    float* const to = &shared.diagonal[t / kBlock][s % kBlock * kBlock + t % kBlock];
    to[0] = low;
    to[kBlock] = high;
  }
  __device__ void keep_asked(int t, int s, float low, float high) const {
    *reinterpret_cast<uint32_t*>(&image().p[panel_at(t, s)]) = pack(low, high);
  }

  // Products of the run's later half with its earlier one: keys are rows 0 to 3 of a product and
  // queries rows 4 to 7; columns from 4 on are not kept.
  __device__ void join_halves() const {
    float sum[4] = {};
    const uint32_t earlier = shared_address(halves() + lane % 4 * 256);
    const uint32_t later = shared_address(halves() + kLater + lane % 8 * 256);
#pragma unroll
    for (int i = 0; i < 16; i += 4) {  // pieces
      uint32_t a[4], b[4];
      load_matrices(a, later + ((i + lane / 8) ^ lane % 8) * 16);
      load_matrices(b, earlier + ((i + lane / 8) ^ lane % 4) * 16);
      multiply(sum, {a[0], 0, a[1], 0}, b[0], b[1]);
      multiply(sum, {a[2], 0, a[3], 0}, b[2], b[3]);
    }
    const int g = lane / 4, s = kRun * warp + lane % 4 * 2, t = kRun * warp + kHalf + g % 4;
    if (lane % 4 >= 2) return;
    if (g < 4) {
      keep_erased(t, s, sum[0], sum[1]);
    } else {
      keep_asked(t, s, sum[0], sum[1]);
    }
  }

  // Products of the later run of diagonal block b with its earlier one: nothing lies between them.
  __device__ void join_runs(int b) const {
    float sum[4] = {};
    const int row = lane % 8, first = b * kBlock;
    const half* const left = lane / 8 % 2 == 0 ? image().k : image().q;
    const uint32_t later = shared_address(left + (first + kRun + row) * 64);
    const uint32_t earlier = shared_address(image().end + (first + row) * 64);
#pragma unroll
    for (int i = 0; i < 128; i += 32) {  // channels
      uint32_t a[2][4], s[4];
      const uint32_t panel = i / 64 * (kTokens * 128), piece = i % 64 / 8;
      load_matrices(a[0], later + panel + ((piece + lane / 16) ^ row) * 16);
      load_matrices(a[1], later + panel + ((piece + 2 + lane / 16) ^ row) * 16);
      load_matrices(s, earlier + panel + ((piece + lane / 8) ^ row) * 16);
      multiply(sum, a[0], s[0], s[1]);
      multiply(sum, a[1], s[2], s[3]);
    }
    const int t = first + kRun + lane / 4, s = first + lane % 4 * 2;
    keep_erased(t, s, sum[0], sum[1]);
    keep_asked(t, s, sum[2], sum[3]);
  }

  struct Step {  // operands of 16 channels
    uint32_t k[4], q[4], s[4];
  };
  __device__ static void load_step(Step& step, uint32_t left, uint32_t right, uint32_t queries) {
    load_matrices(step.k, left);
    load_matrices(step.q, left + queries);
    load_matrices(step.s, right);
  }
  // Block (b, c), c < b.
  template <typename Products>
  __device__ void block(const Products& products, int b, int c) const {
    float A[2][4] = {}, P[2][4] = {};
    const PanelLane left = PanelLane::of_a(image().k, lane);
    const PanelLane right = PanelLane::of_b(image().end, lane);
    constexpr uint32_t kQueries = offsetof(Chunk, q) - offsetof(Chunk, k);
    constexpr uint32_t kPanel = kTokens * 128;
    const int row = (b - 1) * (b - 1) + 2 * c, next = c == b - 1 ? kFactors - 1 : row + 1;
    uint32_t of_left = left.row + b * kBlock * 128, of_right = right.row + c * kBlock * 128;
    const half* factors = &shared.runs.factors[0][lane % 4 * 4];
#pragma unroll 1
    for (int panel = 0; panel < 2; ++panel) {
      Step steps[2];
      load_step(steps[0], of_left + left.piece, of_right + right.piece, kQueries);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 16 channels
        auto& [k, q, s] = steps[i % 2];
        if (i < 3) {
          load_step(steps[(i + 1) % 2], of_left + (left.piece ^ 32 * (i + 1)),
                    of_right + (right.piece ^ 32 * (i + 1)), kQueries);
        }
        const auto factor = [&](int row) {
          return *reinterpret_cast<const uint2*>(factors + row * 128 + 16 * i);
        };
        const uint2 first = factor(8 + b), between[2] = {factor(row), factor(next)};
        k[1] = times_halves(k[1], first.x);
        k[3] = times_halves(k[3], first.y);
        q[1] = times_halves(q[1], first.x);
        q[3] = times_halves(q[3], first.y);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t low = times_halves(s[2 * h], between[h].x);
          const uint32_t high = times_halves(s[2 * h + 1], between[h].y);
          multiply(A[h], k, low, high);
          multiply(P[h], q, low, high);
        }
      }
      of_left += kPanel;
      of_right += kPanel;
      factors += 64;
    }
    products.keep(b, c, A, P);
  }

  // Six warps have a block below the diagonal, two of them two diagonal ones.
  __device__ void products() const {
    const chunk::Products<128, true, std::remove_reference_t<decltype(preparer.shop)>> products{
        preparer.shop, lane / 4, lane % 4 * 2};
    if (warp < 6) {  // (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)
      const int b = warp == 0 ? 1 : warp < 3 ? 2 : 3;
      block(products, b, warp - b * (b - 1) / 2);
    } else {
      const int b = 2 * warp - 12;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) join_runs(b + i);
      __syncwarp();
      products.invert(b + lane / 16, 32);
    }
  }
};

// By the warps that have the state, each with a run of eight tokens: what brings keys and queries
// to the chunk's ends.
__device__ inline void keep_ends(RowShared<true>& shared) {
  const int thread = thread_again(), own = thread / 32 % kRowWarps, channel = thread % 32 * 4;
  const float* const logs = &shared.runs.logs[0][channel];
  float4 before = zero4(), after = zero4();
#pragma unroll
  for (int run = 0; run < kRowWarps; ++run) {
    const float4 sum = load4(logs + run * 128);
    if (run < own) before = plus(before, sum);
    if (run > own) after = plus(after, sum);
  }
  store_halves(&shared.runs.since[own][channel], each(before, exp2_fast));
  store_halves(&shared.runs.until[own][channel], each(after, exp2_fast));
}
// By one of them, when nobody needs the chunk before's.
__device__ inline void keep_whole(RowShared<true>& shared) {
  const int channel = thread_again() % 32 * 4;
  float4 sum = zero4();
#pragma unroll
  for (int run = 0; run < kRowWarps; ++run) {
    sum = plus(sum, load4(&shared.runs.logs[run][channel]));
  }
  *reinterpret_cast<float4*>(&shared.stage[0].image.decay[channel]) = each(sum, exp2_fast);
}
__device__ inline void scale_halves(half* at, uint4 by) {
  auto& x = *reinterpret_cast<uint4*>(at);
  x = {times_halves(x.x, by.x), times_halves(x.y, by.y), times_halves(x.z, by.z),
       times_halves(x.w, by.w)};
}
// Keys and queries as the state meets them, in place of those that the products were made of. A
// lane has eight channels of every second token.
__device__ inline void reach_ends(RowShared<true>& shared) {
  auto& image = shared.stage[0].image;
  const int thread = thread_again(), run = thread / 32 % kRowWarps, channel = thread % 16 * 8;
  const int first = panel_at(8 * run + thread % 32 / 16, channel);
  const uint4 since = *reinterpret_cast<const uint4*>(&shared.runs.since[run][channel]);
  const uint4 until = *reinterpret_cast<const uint4*>(&shared.runs.until[run][channel]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = (first ^ 16 * i) + 128 * i;
    scale_halves(&image.k[at], since);
    scale_halves(&image.q[at], since);
    scale_halves(&image.end[at], until);
  }
  publish_to_copy_engine();  // to the tensor cores, which read it likewise
}

}  // namespace weir::cuda::chunk
