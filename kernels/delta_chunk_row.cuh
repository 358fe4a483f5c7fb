#pragma once
#include "kernels/delta_chunk_row_decays.cuh"
#include "kernels/long_rows_cuda.cuh"

// Both kernels in one, for heads of 128 x 128 and many rows: a block does all chunks of a row for
// 128 values of a head, so that nothing goes through device memory but what must. The copy engine
// brings raw projections, a chunk ahead; eight warps make keys, queries and values of them, each
// for itself; eight have the state, 16 values each, and make the products between the chunk's own
// tokens, those with the state, and the answers.
//
// Floor of a chunk, scalar decay: 164 KB that must move, 9,000 cycles of a multiprocessor's share
// of a copy; 5.2 million products, 2,500 cycles; 24,000 warp instructions, 6,000 cycles. Per
// channel: 196 KB and 10,700 cycles; Gated DeltaNet-2 260 KB, 45,000 warp instructions.
namespace weir::cuda::chunk {

// The warps that prepare: each has eight tokens of a chunk.
template <bool kChannel>
struct RowPreparer : RowPart<kChannel> {
  using Part = RowPart<kChannel>;
  using Part::op, Part::place, Part::shared, Part::value, Part::chunks;
  static constexpr int kPass = kChannel ? 4 : 8;  // tokens at one time
  static constexpr int kBringer = 7 * 32;    // of the threads: the one that starts copies
  int warp = threadIdx.x / 32, channel = threadIdx.x % 32 * 4;

  __device__ RowPreparer(const Part& part) : Part(part) {}

  __device__ void bring(int which, int n) const {
    if (threadIdx.x == kBringer) Part::bring(which, n);
  }
  // The row's past before its first token; zeros where there is none.
  __device__ void add_past(int which) const {
    if (threadIdx.x < 3 * 32) {
      const Stream s = stream(op, place, which);
      const int kept = warp - 3 + op.conv_width - 1;
      float4 past = zero4();
      if (!place.fresh() && kept >= 0) {
        const int from = place.kept(kept, op.conv_width) + (which == 2 ? value : 0);
        past = load4(s.past + from + channel);
      }
      *reinterpret_cast<float4*>(shared.raw_of(which) + warp * 128 + channel) = past;
      publish_to_copy_engine();
    }
    meet_preparers();
  }
  __device__ void await_raw(int which, int n) const {
    Part::await(&shared.raw_full[which], n);
    if (n == 0) add_past(which);
  }
  __device__ void copy_4(float* to, const float* from) const {
    *reinterpret_cast<float4*>(to + channel) = load4(from + channel);
  }
  // What no chunk changes.
  __device__ void keep_taps() const {
    if (warp < 3) {
      const Taps taps =
          load_taps(stream(op, place, warp), op.conv_width, (warp == 2 ? value : 0) + channel);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<float4*>(&shared.taps[warp][j][channel]) =
            scaled(taps.age[j], Part::tap_scale(warp));
      }
    }
    if constexpr (kChannel) {
      if (warp == 3 && op.value_dim == 128) copy_4(shared.runs.norm_weight, op.norm_weight);
      if (warp == 4 && op.decay == Decay::PerChannel) {
        copy_4(shared.runs.shift, op.dt_bias + place.decay_head * 128);
      }
    }
    meet_preparers();
  }

  // Values, convolved, activated and times beta, or halved where they have gates, which come later.
  // The loop of one turn keeps the compiler from computing addresses ahead that it has no registers
  // for.
  template <typename Preparer>
  __device__ void values(const Preparer& preparer, int n) const {
    constexpr int kCount = 8;
    if (n > 0) Part::await(&shared.values_empty, n - 1);
    const bool gated = kChannel && op.write.data != nullptr;
#pragma unroll 1
    for (int from = 8 * warp; from < 8 * warp + 8; from += kCount) {
      float4 x[kCount + 3];
      preparer.source.template convolved<kCount>(2, from, channel, x);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = scaled(each(x[i], silu_of_half), gated ? 0.5f : shared.beta[n % 2][from + i]);
      }
      preparer.drop_others(from, x);
      const PanelRun at(from, channel);
#pragma unroll
      for (int i = 0; i < kCount; ++i) store_halves(&shared.v[at[i]], x[i]);
    }
  }

  __device__ auto preparer(int n, RowShop<kChannel>& shop) const {
    return Preparer<128, kChannel, RowShop<kChannel>, SharedSource<kChannel>, kPass>{
        op, place, shop, {*this}, n * kTokens};
  }
  __device__ void run() {
    for (int which = 2; which >= (kChannel ? 1 : 0); --which) bring(which, 0);
    if constexpr (kChannel) {
      if (threadIdx.x == kBringer) Part::bring_decays(0);
      SharedSource<true>{*this}.ask_gates(0, 0);
      clear_once(shared);
    }
    keep_taps();
#pragma unroll 1
    for (int n = 0; n < chunks(); ++n) {
      Part::recall();
      RowShop<kChannel> shop = Part::shop_of(n);
      if (!kChannel) Part::prefetch_all(n);
      if constexpr (kChannel) {
        chunk_by_channel(n, preparer(n, shop));
      } else {
        chunk_by_head(n, preparer(n, shop));
      }
      publish_to_copy_engine();  // to the tensor cores, which read it likewise
      warp_arrive(&shared.full[Part::stage_of(n)]);
    }
  }
  // The next chunk's in place of what all have read.
  __device__ void bring_next(int which, int n) const {
    if (threadIdx.x != kBringer || n + 1 >= chunks()) return;
    Part::await(&shared.raw_read[which], n);
    Part::bring(which, n + 1);
  }
  template <typename Preparer>
  __device__ void chunk_by_head(int n, const Preparer& preparer) const {
    Part::await_stage(n);
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      await_raw(which, n);
      preparer.keys(which);
      warp_arrive(&shared.raw_read[which]);
    }
    bring_next(0, n);
    await_raw(2, n);
    Part::await(&shared.gates_full[n % 2], n / 2);
    values(preparer, n);
    warp_arrive(&shared.raw_read[2]);
    bring_next(1, n);
    bring_next(2, n);
  }

  // Values and queries share a place for what is raw: RowDecays::bring_values() asks for those.
  // What follows in other places is asked for by finish_chunk().
  template <typename Preparer>
  __device__ void chunk_by_channel(int n, const Preparer& preparer) const {
    await_raw(2, n);
    Part::await(&shared.gates_full[n % 2], n / 2);
    values(preparer, n);
    warp_arrive(&shared.raw_read[2]);
    if (op.decay == Decay::PerChannel) Part::await(&shared.decays_full, n);
    const RowDecays<Preparer> decays{op, shared, preparer, n};
    if (threadIdx.x == kBringer) {
      Part::await(&shared.raw_read[2], n);
      Part::bring(0, n);
      Part::bring_near(2, n + 1);
    }
    decays.make();
    warp_arrive(&shared.runs.made);
#pragma unroll 1
    for (int which = 1; which >= 0; --which) {
      await_raw(which, n);
      decays.normalise(which);
    }
    Part::await_stage(n);
    decays.keys_and_queries();
  }
};

// The warps that have the state.
template <bool kChannel>
struct RowState : RowPart<kChannel> {
  using Part = RowPart<kChannel>;
  using Part::op, Part::output, Part::place, Part::shared, Part::value, Part::chunks;
  using Image = chunk::Image<128, kChannel>;
  int warp = threadIdx.x / 32 % kRowWarps, lane = threadIdx.x % 32;
  static constexpr int kBringer = 7;  // of the warps: one that starts copies
  int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;  // row and column of a fragment
  float S[16][4];  // [value, key]
  using Answers = float[4][4];  // [value, token], of half a chunk
  using Values = uint32_t[4][4];  // of all tokens, as R has them

  __device__ RowState(const Part& part) : Part(part) {}

  // By one warp, while the state waits for chunk n - 1: what the gates of the whole head make of
  // chunk n's tokens.
  __device__ void gates(int n) const {
    ScalarLogits logits;
    logits.load(op, place, n * kTokens);
    if (!kChannel) Part::await_stage(n);
    RowShop<kChannel> shop = Part::shop_of(n);
    Preparer<128, kChannel, RowShop<kChannel>, SharedSource<kChannel>>{
        op, place, shop, {*this}, n * kTokens}.scalar_gates(logits);
    warp_arrive(&shared.gates_full[n % 2]);
  }

  // Values times their gates that write, where these are one a channel.
  __device__ void gate_values(int n) const {
    if (op.write.data == nullptr) return;
    const int thread = thread_again(), channel = thread % 32 * 4;
    const int from = thread / 32 % kRowWarps * 8;
    const float* const logits = op.write.data + Part::first_of(2) + channel;
    float4 gates[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int t = min(n * kTokens + from + i, place.count - 1);
      gates[i] = load4(logits + (place.begin + t) * op.write.stride);
    }
    const PanelRun at(from, channel);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      half* const v = &shared.v[at[i]];
      const float4 halved = load_halves(v);  // as the sigmoid is (1 + tanh(x / 2)) / 2
      const float4 turned = each(gates[i], [](float x) { return tanh_fast(0.5f * x); });
      store_halves(v, plus(halved, times(halved, turned)));
    }
  }
  // What can be done of a chunk with a decay a channel while the others still prepare it, then its
  // products: keys and queries end as the state meets them.
  __device__ void finish_chunk(int n, Values& v) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    RowShop<kChannel> shop = Part::shop_of(n);
    using Preparer = chunk::Preparer<128, kChannel, RowShop<kChannel>, SharedSource<kChannel>>;
    const Preparer preparer{op, place, shop, {*this}, n * kTokens};
    using Decays = RowDecays<Preparer>;
    const auto meet_all = [] { meet(kNormBarrier, 32 * kRowWarps); };
    const bool more = n + 1 < chunks();
    sleep_for(&shared.runs.made, n);
    Decays{op, shared, preparer, n}.keep_factors();
    keep_ends(shared);
    gate_values(n);
    meet_all();
    load_values(v);
    if (warp == 0) keep_whole(shared);
    warp_arrive(&shared.values_empty);  // and the decays' logarithms have been read
    sleep_for(&shared.full[0], n);
    if (warp == kBringer && more && lane == 0) {
      Part::bring_decays(n + 1);
      Part::bring(1, n + 1);
    }
    __syncwarp();
    Decays{op, shared, preparer, n}.products();
    meet_all();
    reach_ends(shared);
    meet_all();
#endif
  }

  // Visits the lane's pairs of the state in memory.
  template <typename Visit>
  __device__ void each_pair(float* state, const Visit& visit) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = int64_t(place.value_head) * op.value_dim + value + 16 * warp + g + 8 * h;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        visit(*reinterpret_cast<float2*>(state + row * 128 + 8 * n + p), S[n][2 * h],
              S[n][2 * h + 1]);
      }
    }
  }
  __device__ void load(float* state) {
    each_pair(state, [&](const float2& from, float& low, float& high) {
      const float2 pair = place.fresh() ? float2{0, 0} : from;
      low = pair.x;
      high = pair.y;
    });
  }
  __device__ void store(float* state) {
    each_pair(state, [](float2& to, float low, float high) { to = {low, high}; });
  }

  __device__ void load_values(Values& v) const {
    const PanelLane values = PanelLane::of_b(shared.v);
#pragma unroll
    for (int n = 0; n < 4; ++n) load_transposed(v[n], values.at(n * 16, 16 * warp));
  }
  // R = w v - S k, [value, token].
  __device__ void subtract_recalled(const Image& in, Values& v, float (&R)[8][4]) const {
    const PanelLane values = PanelLane::of_b(shared.v);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (!kChannel) load_transposed(v[n], values.at(n * 16, 16 * warp));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float(&tile)[4] = R[2 * n + h];
        if (!kChannel) scale_columns(tile, columns_of(in.recalled, 2 * n + h));
        const float2 upper = unpack(v[n][2 * h]), lower = unpack(v[n][2 * h + 1]);
        tile[0] = upper.x - tile[0];
        tile[1] = upper.y - tile[1];
        tile[2] = lower.x - tile[2];
        tile[3] = lower.y - tile[3];
      }
    }
  }

  // sum = S x', x keys or queries.
  template <int kTiles>
  __device__ void ask_state(float (&sum)[kTiles][4], const half* x) const {
    ask<128, kRowWarps>(sum, x, [&](int i, uint32_t (&state)[4]) {
      narrow(state, S[2 * i], S[2 * i + 1]);
    });
  }
  __device__ void solve(const Image& in, Values& v, uint32_t (&U)[4][4]) const {
    float R[8][4];
    ask_state(R, in.k);
    subtract_recalled(in, v, R);
    if (!kChannel) warp_arrive(&shared.values_empty);
    solve_blocks(in.a, R, [&](int b, uint32_t (&known)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) U[b][i] = known[i];
    });
  }
  // U with what its tokens keep until the chunk's end.
  __device__ void keep(const Image& in, uint32_t (&U)[4][4]) const {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 by = columns_of(in.kept, 2 * b + i / 2), written = unpack(U[b][i]);
        U[b][i] = pack(written.x * by.x, written.y * by.y);
      }
    }
  }

  // Where the lane's four neighbouring values of a token are when they are written: of the tokens
  // lane / 4 + 8 i of half a chunk.
  __device__ float* values_at(const Acts& acts, int64_t token) const {
    return at(acts, token) + int64_t(place.value_head) * op.value_dim + value + 16 * warp +
           lane % 4 * 4;
  }
  __device__ bool normalises() const { return op.value_dim == 128; }
  __device__ void load_gates(int first, float4 (&gates)[4]) const {
    if (op.gate.data == nullptr || !normalises()) return;
    const float* const row = values_at(op.gate, place.begin);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = min(first + lane / 4 + 8 * i, place.count - 1);
      gates[i] = load4(row + t * op.gate.stride);
    }
  }

  // The chunk's answers.
  __device__ void answer_all(const Image& in, uint32_t (&U)[4][4], Answers (&halves)[2]) const {
    auto& O = reinterpret_cast<float(&)[8][4]>(halves);
    ask_state(O, in.q);
    answer_with<kRowWarps, 4>(O, in.p, U);
  }
  // Half h of them.
  __device__ void answer(const Image& in, int h, uint32_t (&U)[4][4], Answers& O) const {
    ask_state(O, in.q + h * 32 * 64);
    if (!kChannel) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scale_columns(O[i], columns_of(in.asked + 32 * h, i));
    }
    if (h == 0) {
      answer_with<kRowWarps, 2>(O, in.p, U);
    } else {
      answer_with<kRowWarps, 4>(O, in.p + 32 * 64, U);
    }
  }

  // O's fragments as the lane's y[i]: through shared memory, eight tokens at a time.
  __device__ void transpose(const Answers& O, float4 (&y)[4]) const {
    constexpr int kPitch = RowShared<kChannel>::kTurnedPitch;
    float* const turned = shared.turned[warp];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) turned[(p + i % 2) * kPitch + g + i / 2 * 8] = O[n][i];
      __syncwarp();
      y[n] = load4(&turned[lane / 4 * kPitch + lane % 4 * 4]);
    }
  }

  // What the others need of half h of the chunk to normalise it: sums of squares of y. Those of two
  // halves lie apart, so that one meeting is enough.
  __device__ void keep_squares(int h, const float4 (&y)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = y[i].x * y[i].x + y[i].y * y[i].y + y[i].z * y[i].z + y[i].w * y[i].w;
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) shared.squares[h][warp][lane / 4 + 8 * i] = sum;
    }
  }
  __device__ const float* norm_weight() const {
    if constexpr (kChannel) {
      return shared.runs.norm_weight;
    } else {
      return op.norm_weight;  // there is no room for them
    }
  }
  // y times the norm's weights and the activated gates.
  __device__ void weigh(float4 (&y)[4], const float4 (&gates)[4]) const {
    const float4 weight = load4(norm_weight() + 16 * warp + lane % 4 * 4);
    const bool silu = op.gate_activation == Activation::Silu;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = times(y[i], weight);
      if (op.gate.data == nullptr) continue;
      const float4 sigmoid = each(gates[i], fast_sigmoid);
      y[i] = times(y[i], silu ? times(gates[i], sigmoid) : sigmoid);
    }
  }
  // y normalised, after a meeting.
  __device__ void scale(int h, float4 (&y)[4]) const {
    float sum = 0;  // of token `lane`
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) sum += shared.squares[h][w][lane];
    sum = rsqrt_fast(sum / 128 + op.norm_eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = scaled(y[i], __shfl_sync(0xffffffffu, sum, lane / 4 + 8 * i));
    }
  }
  __device__ void put(int first, const float4 (&y)[4]) const {
    first += lane / 4;
    const int left = place.count - first;
    if (output.exact) {
      float* to = values_at(op.out, place.begin + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (8 * i < left) store4(to, y[i]);
        to += 8 * op.out.stride;
      }
    }
    if (output.rounded == nullptr) return;
    const int64_t dim = int64_t(op.value_heads) * 128;
    __nv_bfloat16* to = output.rounded + (place.begin + first) * dim + place.value_head * 128 +
                        16 * warp + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (8 * i < left) {
        __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(y[i].x, y[i].y),
                                  __floats2bfloat162_rn(y[i].z, y[i].w)};
        *reinterpret_cast<uint2*>(to) = reinterpret_cast<uint2&>(pair);
      }
      to += 8 * dim;
    }
  }
  // Half h of the chunk's answers, from the row's token `first` on.
  __device__ void write(int h, int first, const Answers& O, const float4 (&gates)[4]) const {
    float4 y[4];
    transpose(O, y);
    if (normalises()) {
      keep_squares(h, y);
      weigh(y, gates);
      meet(kNormBarrier, 32 * kRowWarps);
      scale(h, y);
    }
    put(first, y);
  }
  // All of them; gates: the first half's.
  __device__ void write_all(int first, const Answers (&O)[2], float4 (&gates)[4]) const {
    float4 y[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      transpose(O[h], y[h]);
      if (normalises()) keep_squares(h, y[h]);
    }
    if (normalises()) {
      weigh(y[0], gates);
      load_gates(first + 32, gates);
      meet(kNormBarrier, 32 * kRowWarps);
      scale(0, y[0]);
    }
    put(first, y[0]);
    if (normalises()) {
      weigh(y[1], gates);
      scale(1, y[1]);
    }
    put(first + 32, y[1]);
  }

  __device__ void run(float* state) {
    if (warp == 0) gates(0);
    load(state);
#pragma unroll 1
    for (int n = 0; n < chunks(); ++n) {
      Part::recall();
      if (warp == 0 && n + 1 < chunks()) gates(n + 1);
      const Image& in = shared.stage[Part::stage_of(n)].image;
      Values v;
      if constexpr (kChannel) {
        Part::prefetch_all(n);
        finish_chunk(n, v);
      } else {
        wait_for(&shared.full[Part::stage_of(n)], Part::turn_of(n));
        RowShop<false> shop = Part::shop_of(n);
        Products<128, false, RowShop<false>>{shop}.scalar();
        publish_to_copy_engine();  // to the tensor cores, which read it likewise
        meet(kNormBarrier, 32 * kRowWarps);
      }
      Part::recall();
      uint32_t U[4][4];
      float4 gates[4];
      solve(in, v, U);
      Answers O[kChannel ? 2 : 1];
      load_gates(n * kTokens, gates);
      // Where there is room for one prepared chunk only, it is soon left to the next.
      if constexpr (kChannel) {
        answer_all(in, U, O);
      } else {
        answer(in, 0, U, O[0]);
        write(0, n * kTokens, O[0], gates);
        load_gates(n * kTokens + 32, gates);
        answer(in, 1, U, O[0]);
      }
      if (!kChannel) keep(in, U);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float whole = in.decay[0];
        scale_columns(S[i], kChannel ? columns_of(in.decay, i) : float2{whole, whole});
      }
      advance_by<128, kRowWarps>(S, kChannel ? in.end : in.k, U);
      warp_arrive(&shared.empty[Part::stage_of(n)]);
      if constexpr (kChannel) {
        write_all(n * kTokens, O, gates);
      } else {
        write(1, n * kTokens + 32, O[0], gates);
      }
    }
    store(state);
  }
};

template <bool kChannel>
__global__ __launch_bounds__(kRowThreads, 1) void delta_row_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ RowMaps maps,
    const __grid_constant__ RowOutput output, int slices) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char space[];
  auto& shared = *reinterpret_cast<RowShared<kChannel>*>(space);
  if (threadIdx.x == 0) shared.init();
  let_successor_start();
  const int row = long_row(op.rows, blockIdx.y, kStepTokensMost);
  const int head = int(blockIdx.x) / slices, value = int(blockIdx.x) % slices * 128;
  if (threadIdx.x == 0 && row >= 0) shared.keep_place(place_of(op, row, head), value);
  wait_for_predecessor();
  __syncthreads();
  if (row < 0 || chunks_of(op.rows, row) == 0) return;
  // Both kinds find their place themselves: what they shared would take registers from one of them.
  if (threadIdx.x < kPreparers) {
    give_up_registers<kRowPreparerRegisters>();
    const Place place = place_of(op, row, head);
    RowPreparer<kChannel>({op, maps, output, shared, place, value}).run();
  } else {
    take_registers<kRowStateRegisters>();
    const Place place = place_of(op, row, head);
    float* const state = at(op.state, op.rows.slot[row]);
    RowState<kChannel>({op, maps, output, shared, place, value}).run(state);
  }
#endif
}

}  // namespace weir::cuda::chunk
