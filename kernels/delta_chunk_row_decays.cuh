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

__device__ inline uint32_t times_halves(uint32_t a, uint32_t b) {
  const half2 y = __hmul2(reinterpret_cast<half2&>(a), reinterpret_cast<half2&>(b));
  return reinterpret_cast<const uint32_t&>(y);
}
__device__ inline uint2 times_halves(uint2 a, uint2 b) {
  return {times_halves(a.x, b.x), times_halves(a.y, b.y)};
}
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

// By the warps that prepare chunk n. RowPreparer meets them between the steps.
template <typename Preparer>
struct RowDecays {
  static constexpr int kRun = 8, kHalf = 4;  // tokens
  static constexpr uint2 kOnes{0x3c003c00, 0x3c003c00};
  const DeltaMix& op;
  RowShared<true>& shared;
  const Preparer& preparer;
  int n;
  int thread = thread_again(), warp = thread / 32, lane = thread % 32, channel = lane * 4;

  __device__ Image<128, true>& image() const { return shared.stage[0].image; }
  __device__ float* decays_of(int t) const { return &shared.logs[0][t * 128 + channel]; }
  __device__ float* logs_of(int run) const { return &shared.runs.logs[n % 2][run][channel]; }

  // Of four tokens, the logarithms of their decays, in powers of two.
  __device__ void logs(int from, float4 (&g)[kHalf]) const {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) g[i] = zero4();
    if (op.decay == Decay::None) return;
    const int head = preparer.place.decay_head;
    float4 shift;
    if (op.decay == Decay::PerChannel) {
      preparer.source.template decays<kHalf>(from, channel, g);
      shift = load4(op.dt_bias + int64_t(head) * 128 + channel);
    } else {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const int t = min(preparer.first + from + i, preparer.place.count - 1);
        const float logit = at(op.decay_in, preparer.place.begin + t)[head];
        g[i] = {logit, logit, logit, logit};
      }
      shift.x = shift.y = shift.z = shift.w = op.dt_bias[head];
    }
    preparer.template log2_decays<kHalf>(op.decay_a[head], shift, g);
    if (preparer.first + kTokens <= preparer.place.count) return;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (!preparer.valid(from + i)) g[i] = zero4();
    }
  }
  // The decays of half of the warp's tokens, in place of their logits; sum: of the logarithms.
  __device__ void make(int half, float4& sum) const {
    const int from = kRun * warp + half * kHalf;
    float4 g[kHalf];
    logs(from, g);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      sum = plus(sum, g[i]);
      *reinterpret_cast<float4*>(decays_of(from + i)) = each(g[i], exp2_fast);
    }
    if (half != 0) *reinterpret_cast<float4*>(logs_of(warp)) = sum;
  }

  // What decays between run c and block b of two runs is row (b - 1)^2 + c of shared.runs.factors,
  // and in the first run of block b row 8 + b; ones are the last row. A lane's channels of a
  // fragment, {p, p + 1, p + 8, p + 9}, lie side by side.
  __device__ void keep_factors() const {
#pragma unroll 1
    for (int i = warp; i < kFactors - 1; i += kRowWarps) {
      const int b = i < 1 ? 1 : i < 4 ? 2 : i < 9 ? 3 : i - 8;
      const int first = i < 9 ? i - (b - 1) * (b - 1) + 1 : 2 * b;
      const int end = i < 9 ? 2 * b : 2 * b + 1;
      float4 sum = zero4();
      for (int run = first; run < end; ++run) sum = plus(sum, load4(logs_of(run)));
      const uint2 both = packed(each(sum, exp2_fast));
      const int place = channel / 16 * 16 + channel % 8 * 2 + channel / 8 % 2 * 2;
      half* const to = &shared.runs.factors[i][place];
      *reinterpret_cast<uint32_t*>(to) = both.x;
      *reinterpret_cast<uint32_t*>(to + 4) = both.y;
    }
  }
  __device__ uint2 factor(int row, int i) const {
    return *reinterpret_cast<const uint2*>(&shared.runs.factors[row][i + lane % 4 * 4]);
  }

  // Four tokens' queries (0) or keys (1): convolved, activated, normalised.
  __device__ void normalised(int which, int from, float4 (&x)[kHalf + 3]) const {
    float scale[kHalf];
    const float whole = which == 0 ? 0.08838834764831845f : 1.0f;  // 1 / sqrt(128)
    preparer.source.template convolved<kHalf>(which, from, channel, x);
    activate<kHalf>(op.qk_activation, x);
    norm_scales<128>(op.qk_norm, x, scale);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) x[i] = scaled(x[i], scale[i] * whole);
    preparer.drop_others(from, x);
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

  using Numbers = float4[kHalf];
  __device__ void load_decays(int from, Numbers& d) const {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) d[i] = load4(decays_of(from + i));
  }
  // Four tokens' keys, to where they are kept, for the queries; with the gates that erase, decayed
  // since the run's start; and their products with one another, below the diagonal. since: what
  // decayed within the run before them, and then also within them.
  template <bool kErase>
  __device__ void keys(int from, uint2 since, float (&sum)[16]) const {
    float4 k[kHalf + 3];
    Numbers d, erasing;
    normalised(1, from, k);
    const PanelRun at(from, channel);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) store_halves(&image().end[at[i]], k[i]);
    if constexpr (kErase) {
      preparer.source.take_gates(erasing);
      const float most = 0.5f * op.beta_scale;  // as fast_sigmoid() has 0.5
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float4 gate = each(erasing[i], [&](float x) {
          return most + most * tanh_fast(0.5f * x);
        });
        erasing[i] = times(k[i], gate);
      }
      const bool later = from % kRun != 0;
      preparer.source.ask_gates(later ? n + 1 : n, later ? 0 : 3);
    } else {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) erasing[i] = scaled(k[i], shared.beta[n % 2][from + i]);
    }
    load_decays(from, d);
#pragma unroll
    for (int s = 0; s < kHalf - 1; ++s) {
#pragma unroll
      for (int t = s + 1; t < kHalf; ++t) {
        k[s] = times(k[s], d[t]);
        sum[triangle_at(t - 1, s)] = dot(erasing[t], k[s]);
      }
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (i > 0) d[i] = times(d[i], d[i - 1]);
      const uint2 key = packed(times(erasing[i], d[i]));
      if (from % kRun != 0) keep_half(kLater, i, key);
      *reinterpret_cast<uint2*>(&image().k[at[i]]) = times_halves(key, since);
    }
  }
  // Four tokens' queries, decayed likewise; keys decayed until the run's end; and their products up
  // to the diagonal.
  __device__ void queries(int from, uint2& since, float (&sum)[16]) const {
    float4 q[kHalf + 3];
    normalised(0, from, q);
    Numbers d;
    load_decays(from, d);
    uint2 until = kOnes;
    const bool later = from % kRun != 0;
    if (!later) {
      float4 all = load4(decays_of(from + kHalf));
#pragma unroll
      for (int i = 1; i < kHalf; ++i) all = times(all, load4(decays_of(from + kHalf + i)));
      until = packed(all);
    }
    __syncwarp();  // all have read the decays that are overwritten from here on
    const PanelRun at(from, channel);
#pragma unroll
    for (int s = 0; s < kHalf; ++s) {
      float4 key = load_halves(&image().end[at[s]]);
      sum[6 + triangle_at(s, s)] = dot(q[s], key);
#pragma unroll
      for (int t = s + 1; t < kHalf; ++t) {
        key = times(key, d[t]);
        sum[6 + triangle_at(t, s)] = dot(q[t], key);
      }
      const uint2 kept = packed(key);
      if (!later) keep_half(0, s, kept);
      *reinterpret_cast<uint2*>(&image().end[at[s]]) = times_halves(kept, until);
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (i > 0) d[i] = times(d[i], d[i - 1]);
      const uint2 query = packed(times(q[i], d[i]));
      if (later) keep_half(kLater, kHalf + i, query);
      *reinterpret_cast<uint2*>(&image().q[at[i]]) = times_halves(query, since);
    }
    since = packed(d[kHalf - 1]);
  }
  __device__ void keys_and_queries() const {
    uint2 since = kOnes;
#pragma unroll 1
    for (int from = kRun * warp; from < kRun * warp + kRun; from += kHalf) {
      float sum[16];
      if (op.erase.data != nullptr) {
        keys<true>(from, since, sum);
      } else {
        keys<false>(from, since, sum);
      }
      queries(from, since, sum);
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

  // kCount blocks (b, c), (b, c + 1) below the diagonal.
  template <int kCount, typename Products>
  __device__ void blocks(const Products& products, int b, int c) const {
    float A[kCount][2][4] = {}, P[kCount][2][4] = {};
    const PanelLane left = PanelLane::of_a(image().k, lane);
    const PanelLane asked = PanelLane::of_a(image().q, lane);
    const PanelLane right = PanelLane::of_b(image().end, lane);
    int row[2 * kCount];
#pragma unroll
    for (int j = 0; j < 2 * kCount; ++j) {
      row[j] = 2 * c + j == 2 * b - 1 ? kFactors - 1 : (b - 1) * (b - 1) + 2 * c + j;
    }
#pragma unroll 2
    for (int i = 0; i < 128; i += 16) {
      uint32_t k[4], q[4];
      load_matrices(k, left.at(b * kBlock, i));
      load_matrices(q, asked.at(b * kBlock, i));
      const uint2 first = factor(8 + b, i);
      k[1] = times_halves(k[1], first.x);
      k[3] = times_halves(k[3], first.y);
      q[1] = times_halves(q[1], first.x);
      q[3] = times_halves(q[3], first.y);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        uint32_t s[4];
        load_matrices(s, right.at((c + j) * kBlock, i));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint2 between = factor(row[2 * j + h], i);
          const uint32_t low = times_halves(s[2 * h], between.x);
          const uint32_t high = times_halves(s[2 * h + 1], between.y);
          multiply(A[j][h], k, low, high);
          multiply(P[j][h], q, low, high);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) products.keep(b, c + j, A[j], P[j]);
  }

  __device__ void products() const {
    const chunk::Products<128, true, std::remove_reference_t<decltype(preparer.shop)>> products{
        preparer.shop, lane / 4, lane % 4 * 2};
    if (warp < 4) {
      join_runs(warp);
      __syncwarp();
      products.invert(warp);
    } else if (warp % 3 == 1) {  // (1, 0), (3, 2)
      blocks<1>(products, warp == 4 ? 1 : 3, warp == 4 ? 0 : 2);
    } else {  // (2, 0), (2, 1), (3, 0), (3, 1)
      blocks<2>(products, warp - 3, 0);
    }
  }
};

// By the warps that have the state, of chunk n: keys and queries as the state meets them, decayed
// since the chunk's start, or until its end.
__device__ inline void reach_ends(RowShared<true>& shared, int n) {
  constexpr int kRun = 8;
  auto& image = shared.stage[0].image;
  const int warp = threadIdx.x / 32 % kRowWarps, channel = threadIdx.x % 32 * 4;
  float4 before = zero4(), after = zero4();
#pragma unroll
  for (int run = 0; run < kRowWarps; ++run) {
    const float4 sum = load4(&shared.runs.logs[n % 2][run][channel]);
    if (run < warp) before = plus(before, sum);
    if (run > warp) after = plus(after, sum);
  }
  if (warp == 0) {
    const float4 all = plus(load4(&shared.runs.logs[n % 2][0][channel]), after);
    *reinterpret_cast<float4*>(&image.decay[channel]) = each(all, exp2_fast);
  }
  const uint2 since = packed(each(before, exp2_fast)), until = packed(each(after, exp2_fast));
  const PanelRun at(kRun * warp, channel);
#pragma unroll 4
  for (int i = 0; i < kRun; ++i) {
    for (half* x : {image.k, image.q}) {
      auto& both = *reinterpret_cast<uint2*>(&x[at[i]]);
      both = times_halves(both, since);
    }
    auto& end = *reinterpret_cast<uint2*>(&image.end[at[i]]);
    end = times_halves(end, until);
  }
  publish_to_copy_engine();  // to the tensor cores, which read it likewise
  meet(kNormBarrier, 32 * kRowWarps);
}

}  // namespace weir::cuda::chunk
