#pragma once
#include "kernels/delta_chunk_state.cuh"

// What the warps of the one kernel for whole rows (delta_chunk_row.cuh) know and share.
namespace weir::cuda::chunk {

constexpr int kRowWarps = 8;  // of either kind
constexpr int kRowThreads = 2 * 32 * kRowWarps;
// All begin with 128 registers.
constexpr int kRowPreparerRegisters = 96, kRowStateRegisters = 256 - kRowPreparerRegisters;
constexpr int kNormBarrier = 2;
constexpr int kRecalled = 6;

// Runs of eight tokens, a warp each, where channels decay.
constexpr int kFactors = 13;
template <bool kChannel>
struct RowRuns {};
template <>
struct RowRuns<true> {
  alignas(16) float logs[kRowWarps][128];   // the sum of a run's log decays, in powers of two
  alignas(16) float norm_weight[128], shift[128];  // the latter of the decays' logits
  alignas(16) half factors[kFactors][128];  // see RowDecays::keep_factors()
  // What decays between the chunk's start and a run, and between that and its end.
  alignas(16) half since[kRowWarps][128], until[kRowWarps][128];
  alignas(128) float gates[kRowWarps][4][128];  // that erase, of four of each warp's tokens
  uint64_t made, gates_full[kRowWarps];         // barriers; the first: all logs are there
};

template <bool kChannel>
struct RowShared {
  using Shop = Workshop<128, kChannel>;
  // Prepared chunks. Per channel there is room for one: while the state uses it, values, decays and
  // normalised keys and queries of the next are made, these over the raw ones.
  static constexpr int kStages = kChannel ? 1 : 2;
  static constexpr int kRawTokens = kTokens + 3;  // with the convolution's past
  static constexpr int kTurnedPitch = 20;
  struct alignas(1024) Stage {
    Image<128, kChannel> image;
  };
  Stage stage[kStages];
  alignas(1024) half v[kTokens * 128];               // times beta or their gates; panels, as keys
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
  int place[kRecalled];                              // see RowPart::recall()
  uint64_t raw_full[3], raw_read[3], decays_full;    // barriers
  uint64_t full[kStages], empty[kStages], values_empty, gates_full[2];

  __device__ void init() {
    for (uint64_t& one : raw_full) barrier_init(shared_address(&one), 1);
    for (uint64_t& one : raw_read) barrier_init(shared_address(&one), kRowWarps);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&full[i]), kRowWarps);
      barrier_init(shared_address(&empty[i]), kRowWarps);
    }
    barrier_init(shared_address(&values_empty), kRowWarps);
    barrier_init(shared_address(&decays_full), 1);
    for (uint64_t& one : gates_full) barrier_init(shared_address(&one), 1);
    if constexpr (kChannel) {
      barrier_init(shared_address(&runs.made), kRowWarps);
      for (uint64_t& one : runs.gates_full) barrier_init(shared_address(&one), 1);
    }
    barrier_init_done();
  }
  __device__ void keep_place(const Place& at, int value) {
    const int kept[] = {at.key_head, at.value_head, at.decay_head, at.begin, at.count, value};
#pragma unroll
    for (int i = 0; i < kRecalled; ++i) place[i] = kept[i];
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
// 128 channels; the logits of decays and of gates that erase, where each channel has its own, in
// boxes of the chunk's tokens, and of four.
struct RowMaps {
  CUtensorMap map[3], decays, erase;
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
  // What taps and biases are kept times: a SiLU, if one follows, is made of half of its argument.
  __device__ float tap_scale(int which) const {
    return which == 2 || op.qk_activation == Activation::Silu ? 0.5f : 1.0f;
  }
  __device__ int chunks() const { return (place.count + kTokens - 1) / kTokens; }
  __device__ int stage_of(int n) const { return n % RowShared<kChannel>::kStages; }
  __device__ int turn_of(int n) const { return n / RowShared<kChannel>::kStages; }
  // Until a phase is complete, without taking time from the others where channels decay. Elsewhere
  // that is no faster.
  __device__ static void await(const uint64_t* barrier, int phase) {
    if constexpr (kChannel) {
      sleep_for(barrier, phase);
    } else {
      wait_for(barrier, phase);
    }
  }
  // Until the state needs no more of what lay where chunk n will.
  __device__ void await_stage(int n) const {
    if (turn_of(n) > 0) await(&shared.empty[stage_of(n)], turn_of(n) - 1);
  }
  __device__ RowShop<kChannel> shop_of(int n) const {
    return {shared.stage[stage_of(n)].image, shared.diagonal, shared.logs[stage_of(n)],
            shared.beta[n % 2]};
  }
  // Asks for raw projections of chunk n, from three tokens before it on. What is not the row's own
  // is some other row's, or zero: see add_past(), and it is not kept behind the row's end.
  __device__ void bring(int which, int n) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const uint32_t full = shared_address(&shared.raw_full[which]);
    barrier_expect(full, sizeof shared.raw[0]);
    copy_box(shared_address(shared.raw_of(which)), maps.map[which], first_of(which),
             place.begin + n * kTokens - 3, full, kReadOnce);
#endif
  }
  __device__ void bring_decays(int n) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (op.decay != Decay::PerChannel) return;
    const uint32_t full = shared_address(&shared.decays_full);
    barrier_expect(full, sizeof shared.logs);
    copy_box(shared_address(shared.logs), maps.decays, place.decay_head * 128,
             place.begin + n * kTokens, full, kReadOnce);
#endif
  }
  // To the L2 cache: raw projections that are asked for not long before they are needed.
  __device__ void bring_near(int which, int n) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (n >= chunks()) return;
    prefetch_box(maps.map[which], first_of(which), place.begin + n * kTokens - 3);
#endif
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
      prefetch(op.write, values, n + 1);
    }
  }

  // Where the block is, once more: the compiler would keep it, and all addresses of a chunk, in
  // registers that it does not have.
  __device__ void recall() {
    const uint32_t from = shared_address(shared.place);
    int* const to[] = {&place.key_head, &place.value_head, &place.decay_head,
                       &place.begin,    &place.count,      &value};
#pragma unroll
    for (int i = 0; i < kRecalled; ++i) {
      asm volatile("ld.shared.s32 %0, [%1];" : "=r"(*to[i]) : "r"(from + 4 * i) : "memory");
    }
  }
};

// Raw projections, decays and gates in shared memory.
template <bool kChannel>
struct SharedSource : RowPart<kChannel> {
  static constexpr bool kHalved = true;
  // Logits of the gates that erase, of four tokens (half 0 or 1 of the warp's in chunk n), by and
  // for each warp alone, asked for when it has taken those before. What lies behind the row's end
  // is some other row's, or zero.
  __device__ void ask_gates(int n, int half) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (this->op.erase.data == nullptr || n >= this->chunks()) return;
    const int thread = thread_again(), warp = thread / 32;
    __syncwarp();
    if (thread % 32 != 0) return;
    auto& runs = this->shared.runs;
    const uint32_t full = shared_address(&runs.gates_full[warp]);
    barrier_expect(full, sizeof runs.gates[0]);
    copy_box(shared_address(runs.gates[warp]), this->maps.erase, this->first_of(1),
             this->place.begin + n * kTokens + warp * 8 + half * 4, full, kReadOnce);
#endif
  }
  __device__ void take_gates(int n, int half, float4 (&x)[4]) const {
    const int thread = thread_again();
    auto& runs = this->shared.runs;
    sleep_for(&runs.gates_full[thread / 32], 2 * n + half);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = load4(&runs.gates[thread / 32][i][thread % 32 * 4]);
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
    if (bias != nullptr) {
      taps.bias = scaled(load4(bias + this->first_of(which) + channel), this->tap_scale(which));
    }
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
