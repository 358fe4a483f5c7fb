#pragma once
#include "kernels/delta_chunk_state.cuh"

// What the warps of the one kernel for whole rows (delta_chunk_row.cuh) know and share.
namespace weir::cuda::chunk {

constexpr int kRowWarps = 8;  // of either kind
constexpr int kRowThreads = 2 * 32 * kRowWarps;
// All begin with 128 registers.
template <bool kChannel>
constexpr int kRowPreparerRegisters = kChannel ? 96 : 88;
template <bool kChannel>
constexpr int kRowStateRegisters = 256 - kRowPreparerRegisters<kChannel>;
constexpr int kNormBarrier = 2;

// Runs of eight tokens, a warp each, where channels decay.
constexpr int kFactors = 13;
template <bool kChannel>
struct RowRuns {};
template <>
struct RowRuns<true> {
  // Of chunks by turns: the sum of a run's log decays, in powers of two.
  alignas(16) float logs[2][kRowWarps][128];
  alignas(16) half factors[kFactors][128];  // see RowDecays::keep_factors()
  alignas(16) float gates[4][kPreparers * 4];  // that erase or write, of four tokens a thread
};

template <bool kChannel>
struct RowShared {
  using Shop = Workshop<128, kChannel>;
  // Prepared chunks. Per channel there is room for one: while the state uses it, values and decays
  // of the next are made.
  static constexpr int kStages = kChannel ? 1 : 2;
  static constexpr int kRawTokens = kTokens + 3;  // with the convolution's past
  static constexpr int kTurnedPitch = 20;
  struct alignas(1024) Stage {
    Image<128, kChannel> image;
  };
  Stage stage[kStages];
  alignas(1024) half v[kTokens * 128];               // times beta; panels, as keys
  // Raw projections: queries, keys and values; per channel values and then queries, and keys.
  alignas(128) float raw[kChannel ? 2 : 3][kRawTokens * 128];
  alignas(16) float taps[3][4][128];                 // by age, oldest first
  alignas(16) float turned[kRowWarps][8 * kTurnedPitch];
  float squares[2][kRowWarps][32];
  alignas(16) float diagonal[4][kBlock * Shop::kDiagonalPitch];
  // L; per channel the decays' logits, then the decays, 4 KB of each warp's tokens.
  alignas(128) float logs[kStages][kChannel ? kTokens * 128 : kTokens];
  RowRuns<kChannel> runs;
  float beta[2][kTokens];
  uint64_t raw_full[3], values_read, decays_full;    // barriers
  uint64_t full[kStages], empty[kStages], values_empty, gates_full[2];

  __device__ void init() {
    for (uint64_t& one : raw_full) barrier_init(shared_address(&one), 1);
    barrier_init(shared_address(&values_read), kRowWarps);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&full[i]), kRowWarps);
      barrier_init(shared_address(&empty[i]), kRowWarps);
    }
    barrier_init(shared_address(&values_empty), kRowWarps);
    barrier_init(shared_address(&decays_full), 1);
    for (uint64_t& one : gates_full) barrier_init(shared_address(&one), 1);
    barrier_init_done();
  }
  __device__ float* raw_of(int which) { return kChannel ? raw[which % 2] : raw[which]; }
};

// What Preparer and Products work in.
template <bool kChannel>
struct RowShop {
  using Shop = Workshop<128, kChannel>;
  Image<128, kChannel>& image;
  float (&diagonal)[4][kBlock * Shop::kDiagonalPitch];
  float (&logs)[kChannel ? kTokens * 128 : kTokens];
  float (&beta)[kTokens];
};

// The raw projections of all tokens, queries, keys and values, in boxes of kRawTokens tokens and
// 128 channels; the decays' logits, where each channel has its own, in boxes as `logs` has rows.
struct RowMaps {
  CUtensorMap map[3], decays;
};
// Where answers go besides or instead of op.out: rounded, [tokens, value_heads * 128], for the
// Linear that follows; null: nowhere.
struct RowOutput {
  __nv_bfloat16* rounded = nullptr;
  bool exact = true;  // also op.out
};

// threadIdx.x, which the compiler is not to know: it would keep all that follows from it, of all
// steps, in registers from chunk to chunk.
__device__ inline int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// What all warps of a block know.
template <bool kChannel>
struct RowPart {
  const DeltaMix& op;
  const RowMaps& maps;
  const RowOutput& output;
  RowShared<kChannel>& shared;
  Place place;
  int value;  // the slice's first, within the head

  // The slice's first channel of one of the projections.
  __device__ int first_of(int which) const {
    return which < 2 ? place.key_head * 128 : place.value_head * op.value_dim + value;
  }
  __device__ int chunks() const { return (place.count + kTokens - 1) / kTokens; }
  __device__ int stage_of(int n) const { return n % RowShared<kChannel>::kStages; }
  __device__ int turn_of(int n) const { return n / RowShared<kChannel>::kStages; }
  // Until the state needs no more of what lay where chunk n will.
  __device__ void await_stage(int n) const {
    if (turn_of(n) > 0) wait_for(&shared.empty[stage_of(n)], turn_of(n) - 1);
  }
  __device__ RowShop<kChannel> shop_of(int n) const {
    return {shared.stage[stage_of(n)].image, shared.diagonal, shared.logs[stage_of(n)],
            shared.beta[n % 2]};
  }
  // By all warps of a kind: what is read where it is, on its way to the L2 cache, 128 numbers of
  // each of a chunk's tokens.
  __device__ void prefetch(const Acts& acts, int64_t column, int n) const {
    const int t = n * kTokens + int(threadIdx.x) % kPreparers / 4;
    if (acts.data == nullptr || t >= place.count) return;
    prefetch_line(at(acts, place.begin + t) + column + threadIdx.x % 4 * 32);
  }
  __device__ void prefetch_all(int n) const {
    const int64_t values = int64_t(place.value_head) * op.value_dim + value;
    if (op.value_dim == 128) prefetch(op.gate, values, n);
    if constexpr (kChannel) {
      prefetch(op.erase, int64_t(place.key_head) * 128, n + 1);
      prefetch(op.write, values, n + 1);
    }
  }

  // What follows from these is computed again from here on: the compiler would keep it, all the
  // addresses of a chunk, in registers that it does not have.
  __device__ void forget() {
    for (int* x : {&place.key_head, &place.value_head, &place.decay_head, &place.begin, &value}) {
      asm volatile("" : "+r"(*x));
    }
  }
};

// Raw projections, decays and gates in shared memory.
template <bool kChannel>
struct SharedSource : RowPart<kChannel> {
  // Logits of the gates that write (parts 0 and 1 of chunk n, four tokens each) and erase (2 and 3)
  // by and for each thread alone, asked for when it has taken those before.
  __device__ void ask_gates(int n, int part) const {
    const auto& op = this->op;
    const Place& place = this->place;
    if (op.erase.data == nullptr || n >= this->chunks()) return;
    const int thread = thread_again();
    const int first = n * kTokens + thread / 32 * 8 + part % 2 * 4;
    const Acts& acts = part < 2 ? op.write : op.erase;
    const int64_t stride = acts.stride;
    float* const to = &this->shared.runs.gates[0][4 * thread];
    const float* from = acts.data + (place.begin + min(first, place.count - 1)) * stride +
                        (this->first_of(part < 2 ? 2 : 1) + thread % 32 * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      copy_16_bytes(to + i * kPreparers * 4, from);
      if (first + i + 1 < place.count) from += stride;
    }
    copies_commit();
  }
  __device__ void take_gates(float4 (&x)[4]) const {
    copies_wait();
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = load4(&this->shared.runs.gates[i][4 * threadIdx.x]);
  }
  template <int kCount>
  __device__ void convolved(int which, int token, int channel, float4 (&x)[kCount + 3]) const {
    auto& shared = this->shared;
    const float* const raw = shared.raw_of(which) + token * 128 + channel;
#pragma unroll
    for (int j = 0; j < kCount + 3; ++j) x[j] = load4(raw + j * 128);
    Taps taps{.bias = zero4()};
#pragma unroll
    for (int j = 0; j < 4; ++j) taps.age[j] = load4(&shared.taps[which][j][channel]);
    const float* const bias = which == 0   ? this->op.conv_q_bias
                              : which == 1 ? this->op.conv_k_bias
                                           : this->op.conv_v_bias;
    if (bias != nullptr) taps.bias = load4(bias + this->first_of(which) + channel);
    apply_taps<kCount>(taps, x);
  }
  template <int kCount>
  __device__ void decays(int token, int channel, float4 (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = load4(&this->shared.logs[0][(token + i) * 128 + channel]);
    }
  }
};

}  // namespace weir::cuda::chunk
