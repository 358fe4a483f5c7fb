#pragma once
#include "kernels/delta_chunk_state_products.cuh"
#include "kernels/warp_barrier_cuda.cuh"

// The second kernel: along a row, chunk after chunk. A block has a slice of a head's values; 16 of
// them belong to a pair of warps. One of the two has their rows of the state in its registers and
// does what the next chunk waits for: what the state recalls, U, the state's step. The other
// answers the queries with the state and U that the first leaves in shared memory, and writes. A
// further warp has the copy engine bring the tiles, some chunks ahead.
//
// Floor of a chunk, scalar decay, 128 x 128: 60 KB of tile, 64 KB of gates and answers; 5.2 million
// products, 1.5 us at the tensor cores' full rate.
namespace weir::cuda::chunk {

constexpr int kBlockBarrier = 1, kAnswerBarrier = 2;  // 0 is __syncthreads()'s

template <int K, bool kChannel, int kWarps>
struct StateShared {
  struct alignas(1024) Stage {
    Image<K, kChannel> image;
    half v[kWarps][kTokens * kSliceValues];
  };
  static constexpr size_t kRoom = 190 * 1024;  // for them
  static constexpr int kStages = kRoom / sizeof(Stage) < 4 ? kRoom / sizeof(Stage) : 4;
  static constexpr int kThreads = 32 * (2 * kWarps + 1);
  Stage stage[kStages];
  uint4 state[kWarps][K / 16][32];  // narrowed, as the left operands that each lane has
  uint4 writes[kWarps][4][32];      // U, likewise
  static constexpr int kTurnedPitch = 20;
  alignas(16) float turned[kWarps][kBlock * kTurnedPitch];
  float squares[2][kWarps][kTokens];
  float scale[kWarps][kTokens];
  uint64_t full[kStages], empty[kStages];  // barriers
  uint64_t state_there[kWarps], state_read[kWarps], writes_there[kWarps], writes_read[kWarps];
  int row, first, end;              // chunks of the row that the turn is about; no more rows: -1

  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&full[i]), 1);
      barrier_init(shared_address(&empty[i]), 2 * kWarps);
    }
    for (int i = 0; i < kWarps; ++i) {
      for (uint64_t* one : {&state_there[i], &state_read[i], &writes_there[i], &writes_read[i]}) {
        barrier_init(shared_address(one), 1);
      }
    }
    barrier_init_done();
  }
};

__device__ inline void wait_for(const uint64_t* barrier, int phase) {
  barrier_wait(shared_address(barrier), uint32_t(phase) & 1);
}

// What both kinds of warps know.
template <int K, bool kChannel, int kWarps>
struct Slice {
  using Shared = StateShared<K, kChannel, kWarps>;
  static constexpr int kTokenTiles = kTokens / 8;
  const DeltaMix& op;
  Shared& shared;
  int head, value;  // first value of the slice within its head
  int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32;
  int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;  // row and column of a fragment

  __device__ int stage_of(int chunk) const { return chunk % Shared::kStages; }
  __device__ typename Shared::Stage& await(int chunk) const {
    wait_for(&shared.full[stage_of(chunk)], chunk / Shared::kStages);
    return shared.stage[stage_of(chunk)];
  }
  __device__ void release(int chunk) const { warp_arrive(&shared.empty[stage_of(chunk)]); }

  __device__ static uint4 joined(const uint32_t (&x)[4]) { return {x[0], x[1], x[2], x[3]}; }
};

template <int K, bool kChannel, int kWarps>
struct StateWarp : Slice<K, kChannel, kWarps> {
  using Base = Slice<K, kChannel, kWarps>;
  using typename Base::Shared;
  using Base::g, Base::p, Base::warp, Base::lane, Base::op, Base::shared;
  using Base::kTokenTiles;
  static constexpr int kTiles = K / 8;
  float S[kTiles][4];       // [value, key]
  float R[kTokenTiles][4];  // [value, token]: what the state recalls, then what is to be written

  __device__ StateWarp(const Base& base) : Base(base) {}

  __device__ float* state_row(float* state, int half_row) const {
    const int value = Base::value + 16 * warp + g + 8 * half_row;
    return state + (int64_t(Base::head) * op.value_dim + value) * K + p;
  }
  __device__ void load_state(float* state, bool fresh) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 pair{0, 0};
        if (!fresh) pair = *reinterpret_cast<float2*>(state_row(state, h) + 8 * n);
        S[n][2 * h] = pair.x;
        S[n][2 * h + 1] = pair.y;
      }
    }
  }
  __device__ void store_state(float* state) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<float2*>(state_row(state, h) + 8 * n) = {S[n][2 * h], S[n][2 * h + 1]};
      }
    }
  }

  // R = S k for every token, as the chunk's first state has them; the state, narrowed, goes to the
  // answering warp.
  __device__ void ask_state(const Image<K, kChannel>& in) {
    const auto left = [&](int i, uint32_t (&state)[4]) {
      narrow(state, S[2 * i], S[2 * i + 1]);
      shared.state[warp][i][lane] = Base::joined(state);
    };
    ask<K, kWarps>(R, in.k, left);
  }

  // R = w v - S k, [value, token].
  __device__ void subtract_recalled(const typename Shared::Stage& in) {
    const int t = lane % 8 + lane / 16 * 8;
    const uint32_t values = shared_address(&in.v[warp][value_at(t, lane / 8 % 2 * 8)]);
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) {
      uint32_t v[4];
      load_transposed(v, values + n * 16 * kSliceValues * 2);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float(&tile)[4] = R[2 * n + h];
        if (!kChannel) scale_columns(tile, columns_of(in.image.recalled, 2 * n + h));
        const float2 upper = unpack(v[2 * h]), lower = unpack(v[2 * h + 1]);
        tile[0] = upper.x - tile[0];
        tile[1] = upper.y - tile[1];
        tile[2] = lower.x - tile[2];
        tile[3] = lower.y - tile[3];
      }
    }
  }

  // U from R. U goes to the answering warp; `kept` is U with what its tokens keep until the chunk's
  // end, as the left operand of the state's step.
  __device__ void solve(const Image<K, kChannel>& in, uint32_t (&kept)[4][4]) {
    solve_blocks(in.a, R, [&](int b, uint32_t (&U)[4]) {
      shared.writes[warp][b][lane] = Base::joined(U);
      if (!kChannel) {
        scale_columns(R[2 * b], columns_of(in.kept, 2 * b));
        scale_columns(R[2 * b + 1], columns_of(in.kept, 2 * b + 1));
        narrow(U, R[2 * b], R[2 * b + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[b][i] = U[i];
    });
  }

  // S = S diag(decay) + U' K
  __device__ void advance(const Image<K, kChannel>& in, uint32_t (&kept)[4][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float whole = in.decay[0];
      scale_columns(S[n], kChannel ? columns_of(in.decay, n) : float2{whole, whole});
    }
    advance_by<K, kWarps>(S, kChannel ? in.end : in.k, kept);
  }

  // The block's n-th chunk.
  __device__ void run(int n) {
    const typename Shared::Stage& in = Base::await(n);
    if (n > 0) wait_for(&shared.state_read[warp], n - 1);
    ask_state(in.image);
    warp_arrive(&shared.state_there[warp]);
    subtract_recalled(in);
    uint32_t kept[4][4];
    if (n > 0) wait_for(&shared.writes_read[warp], n - 1);
    solve(in.image, kept);
    warp_arrive(&shared.writes_there[warp]);
    advance(in.image, kept);
    Base::release(n);
  }
};

template <int K, bool kChannel, int kWarps>
struct AnswerWarp : Slice<K, kChannel, kWarps> {
  using Base = Slice<K, kChannel, kWarps>;
  using typename Base::Shared;
  using Base::g, Base::p, Base::warp, Base::lane, Base::op, Base::shared;
  using Base::kTokenTiles;
  float O[kTokenTiles][4];  // [value, token]

  __device__ AnswerWarp(const Base& base) : Base(base) {}

  // O = S q
  __device__ void ask_state(const Image<K, kChannel>& in) {
    const auto left = [&](int i, uint32_t (&state)[4]) {
      const uint4 kept = shared.state[warp][i][lane];
      state[0] = kept.x, state[1] = kept.y, state[2] = kept.z, state[3] = kept.w;
    };
    ask<K, kWarps>(O, in.q, left);
    if constexpr (!kChannel) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) scale_columns(O[n], columns_of(in.asked, n));
    }
  }

  // O += U P'
  __device__ void add_writes(const Image<K, kChannel>& in) {
    uint32_t U[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint4 written = shared.writes[warp][c][lane];
      U[c][0] = written.x, U[c][1] = written.y, U[c][2] = written.z, U[c][3] = written.w;
    }
    answer_with<kWarps, 4>(O, in.p, U);
  }

  // From here on a lane has four neighbouring values of eight tokens, lane / 4 + 8 i.
  __device__ int token_of(int i) const { return lane / 4 + 8 * i; }
  // Where the lane's values of the token `token` of the step are.
  __device__ float* values_at(const Acts& acts, int64_t token) const {
    return at(acts, token) + int64_t(Base::head) * op.value_dim + Base::value + 16 * warp +
           lane % 4 * 4;
  }

  // What the answers are multiplied with besides their token's norm, as halves: the norm's weights
  // times the activated output gates. In two parts, as the loads take long.
  struct Gates {
    float4 logits[4];
    uint2 factors[8];
  };
  __device__ void load_gates(Gates& gates, int part, int64_t begin, int first, int count) const {
    if (op.gate.data == nullptr) return;
    const float* const row = values_at(op.gate, begin);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = min(first + token_of(4 * part + i), count - 1);
      gates.logits[i] = load4(row + t * op.gate.stride);
    }
  }
  __device__ void make_factors(Gates& gates, int part) const {
    const float4 weight = load4(op.norm_weight + Base::value + 16 * warp + lane % 4 * 4);
    const bool silu = op.gate_activation == Activation::Silu;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 y = weight;
      if (op.gate.data != nullptr) {
        const float4 x = gates.logits[i], sigmoid = each(x, fast_sigmoid);
        y = times(y, silu ? times(x, sigmoid) : sigmoid);
      }
      gates.factors[4 * part + i] = packed(y);
    }
  }

  // O's fragments as the lane's y[i]: through shared memory, 16 tokens at a time.
  __device__ void transpose(float4 (&y)[8]) const {
    constexpr int kPitch = Shared::kTurnedPitch;
    float* const turned = shared.turned[warp];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          turned[(8 * n + p + i % 2) * kPitch + g + i / 2 * 8] = O[2 * part + n][i];
        }
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        y[2 * part + n] = load4(&turned[token_of(n) * kPitch + lane % 4 * 4]);
      }
    }
  }

  // What normalises each of the chunk's tokens, to shared.scale; the sums of squares of two chunks
  // lie apart, so that one meeting is enough.
  __device__ void norm_scales(int n, const float4 (&y)[8]) const {
    float(&squares)[kWarps][kTokens] = shared.squares[n % 2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = y[i].x * y[i].x + y[i].y * y[i].y + y[i].z * y[i].z + y[i].w * y[i].w;
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) squares[warp][token_of(i)] = sum;
    }
    meet(kAnswerBarrier, 32 * kWarps);
    float2 sum{0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(&squares[w][2 * lane]);
      sum.x += part.x;
      sum.y += part.y;
    }
    const float count = float(op.value_dim);
    *reinterpret_cast<float2*>(&shared.scale[warp][2 * lane]) = {
        rsqrtf(sum.x / count + op.norm_eps), rsqrtf(sum.y / count + op.norm_eps)};
    __syncwarp();
  }

  // The answers to tokens `first` .. of a row that has `count`; normalised and gated where the
  // block has all of the head's values.
  __device__ void write(int n, int64_t begin, int first, int count, bool whole, Gates& gates) {
    float4 y[8];
    transpose(y);
    if (whole) {
      norm_scales(n, y);
      make_factors(gates, 1);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 low = unpack(gates.factors[i].x), high = unpack(gates.factors[i].y);
        y[i] = times(scaled(y[i], shared.scale[warp][token_of(i)]),
                     {low.x, low.y, high.x, high.y});
      }
    }
    float* to = values_at(op.out, begin + first + lane / 4);
    const int left = count - first - lane / 4;  // tokens from the lane's first on
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (8 * i < left) store4(to, y[i]);
      to += 8 * op.out.stride;
    }
  }

  // The block's n-th chunk. Gates are asked for as early as there is room for them.
  __device__ void run(int n, int64_t begin, int first, int count) {
    const bool whole = op.value_dim == 16 * kWarps;
    const typename Shared::Stage& in = Base::await(n);
    wait_for(&shared.state_there[warp], n);
    ask_state(in.image);
    warp_arrive(&shared.state_read[warp]);
    Gates gates;
    if (whole) load_gates(gates, 0, begin, first, count);
    wait_for(&shared.writes_there[warp], n);
    add_writes(in.image);
    warp_arrive(&shared.writes_read[warp]);
    Base::release(n);
    if (whole) {
      make_factors(gates, 0);
      load_gates(gates, 1, begin, first, count);
    }
    write(n, begin, first, count, whole, gates);
  }
};

// The copying warp: which rows the block is to do, and their tiles.
template <int K, bool kChannel, int kWarps>
struct CopyWarp : Slice<K, kChannel, kWarps> {
  using Base = Slice<K, kChannel, kWarps>;
  using typename Base::Shared;
  using Base::lane, Base::op, Base::shared;

  __device__ CopyWarp(const Base& base) : Base(base) {}

  // The group of the row, from which the row's chunks of this turn follow; not found: no more rows.
  __device__ Group find(const Turn& turn, int row) const {
    if (row >= op.rows.count) {
      if (lane == 0) shared.row = -1;
      return {.found = false};
    }
    const Group group = find_group(op.rows, turn.group, [&](int first, int begin, int) {
      return first <= row && row < first + turn.group && begin < turn.first + turn.count;
    });
    const bool there = group.found;
    const int first = there ? group.chunks_before(row - group.row, turn.first) : 0;
    const int end = there ? group.chunks_before(row - group.row, turn.first + turn.count) : 0;
    if (lane == 0) {
      shared.row = there ? row : -1;
      shared.first = first;
      shared.end = end;
    }
    return group;
  }

  // Chunk c of the row as the block's n-th.
  __device__ void copy(const Turn& turn, int n, int tile) const {
    if (n >= Shared::kStages) {
      wait_for(&shared.empty[Base::stage_of(n)], n / Shared::kStages - 1);
    }
    if (lane != 0) return;
    constexpr uint32_t kImage = sizeof(Image<K, kChannel>);
    constexpr uint32_t kValues = sizeof(Shared::Stage::v);
    auto& stage = shared.stage[Base::stage_of(n)];
    const uint32_t full = shared_address(&shared.full[Base::stage_of(n)]);
    const unsigned char* from =
        turn.tiles + (int64_t(tile - turn.first) * op.value_heads + Base::head) *
                         tile_bytes(kImage, op.value_dim);
    barrier_expect(full, kImage + kValues);
    bulk_load(&stage.image, from, kImage, full);
    bulk_load(stage.v, from + kImage + int64_t(Base::value) * kTokens * sizeof(half), kValues,
              full);
  }

  // A chunk's output gates on their way to the L2 cache.
  __device__ void prefetch_gates(int64_t begin, int first, int count) const {
    if (kWarps < 4 || op.gate.data == nullptr || op.value_dim != 16 * kWarps) return;
    constexpr int kLines = kWarps < 4 ? 1 : kWarps / 2;  // of a token; 128 bytes
#pragma unroll 1
    for (int i = lane; i < kTokens * kLines; i += 32) {
      const int t = min(first + i / kLines, count - 1);
      const float* line = at(op.gate, begin + t) + int64_t(Base::head) * op.value_dim +
                          i % kLines * 32;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
  }
};

template <int K, bool kChannel, int kWarps>
__global__ __launch_bounds__(32 * (2 * kWarps + 1), 1) void delta_state_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ Turn turn) {
  using Shared = StateShared<K, kChannel, kWarps>;
  extern __shared__ __align__(1024) unsigned char space[];
  auto& shared = *reinterpret_cast<Shared*>(space);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int slices = op.value_dim / (16 * kWarps), kind = threadIdx.x / (32 * kWarps);
  const Slice<K, kChannel, kWarps> slice{op, shared, int(blockIdx.x) / slices,
                                         int(blockIdx.x) % slices * 16 * kWarps};
  if (kind < 2) wait_for_predecessor();  // the others look for their row first
  // Not before: the next turn's tiles may be written from here on.
  if (kind < 2) let_successor_start();
  // The block's rows, one after the other, from the group of the turn's first tile on. Between two
  // meetings everybody knows the row.
  const auto meet_block = [] { meet(kBlockBarrier, Shared::kThreads); };
  int n = 0;
  if (kind == 0) {
    StateWarp<K, kChannel, kWarps> warp(slice);
    for (;;) {
      meet_block();
      const int row = shared.row, first = shared.first, end = shared.end;
      if (row < 0) return;
      meet_block();
      if (first == end) continue;
      float* const state = at(op.state, op.rows.slot[row]);
      warp.load_state(state, first == 0 && op.rows.first[row] == 0);
#pragma unroll 1
      for (int c = first; c < end; ++c) warp.run(n++);
      warp.store_state(state);
    }
  } else if (kind == 1) {
    AnswerWarp<K, kChannel, kWarps> warp(slice);
    for (;;) {
      meet_block();
      const int row = shared.row, first = shared.first, end = shared.end;
      if (row < 0) return;
      meet_block();
      const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
#pragma unroll 1
      for (int c = first; c < end; ++c) warp.run(n++, begin, c * kTokens, count);
    }
  } else {
    const CopyWarp<K, kChannel, kWarps> warp(slice);
    const Group start = find_group(op.rows, turn.group, [&](int, int begin, int end) {
      return begin <= turn.first && turn.first < end;
    });
    int row = start.found ? start.row + int(blockIdx.y) : op.rows.count;
    row = next_long_row(op.rows, row, gridDim.y);
    Group group = warp.find(turn, row);
    wait_for_predecessor();
    for (;;) {
      meet_block();
      const int first = shared.first, end = shared.end;
      if (shared.row < 0) return;
      meet_block();
      const int64_t begin = op.rows.begin[row];
      const int count = op.rows.begin[row + 1] - int(begin);
#pragma unroll 1
      for (int c = first; c < end; ++c) {
        warp.prefetch_gates(begin, c * kTokens, count);
        warp.copy(turn, n++, group.tile(row - group.row, c));
      }
      row = next_long_row(op.rows, row + int(gridDim.y), gridDim.y);
      group = warp.find(turn, row);
    }
  }
}

}  // namespace weir::cuda::chunk
