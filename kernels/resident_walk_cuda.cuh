#pragma once
#include "kernels/async_cuda.cuh"
#include "kernels/resident_cuda.cuh"

// What all warps of the resident kernel share: its room, and how its blocks go from phase to phase.
namespace weir::cuda::resident {

// The computing warps, one that copies, one that reads the phases' descriptions, those that store.
constexpr int kComputing = kWarps * 32;
constexpr int kRun = 32;                                    // columns
constexpr int kStageRuns = 4, kStageColumns = kStageRuns * kWarps * kRun;
constexpr int kTileRows = 8, kStages = 6;
constexpr int kPitch = kStageColumns * 2;  // of a part of a row in shared memory
// The upper four rows of a stage lie 64 bytes further than they would, so that lanes that read one
// of them and one of the lower four at a time share no banks.
constexpr int kApart = 64, kStageBytes = kTileRows * kPitch + 2 * kApart;
constexpr int kBatch = 2;                  // tiles whose sums are added up together
constexpr int kOutputs = kTileRows * kTokensMost, kBatchOutputs = kBatch * kOutputs;
constexpr int kStoring = kBatchOutputs, kThreads = kComputing + 64 + kStoring;
// Named barriers: the computing warps; all but the copying one; sums are there, and have been read,
// of even batches and, one further, of odd ones.
constexpr int kAll = 1, kDescribed = 2, kSumsThere = 3, kSumsRead = 5;

// Where a block is in the step.
struct Walk {
  int first = blockIdx.x;  // tile of this phase; all tiles go round the blocks in turn
  int stage = 0, parity = 0;
  bool late = false;       // there is shared.late

  __device__ void next_stage() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // From one of the block's tiles of a phase of so many to the first one of the next phase.
  __device__ void leave_phase(int tile, int tiles) {
    const int blocks = gridDim.x;
#pragma unroll 1
    while (tile < tiles) tile += blocks;
#pragma unroll 1
    while (tile - blocks >= tiles) tile -= blocks;
    first = tile - tiles;
  }
};

union Phase {
  LinearPhase linear;
  NarrowPhase narrow;
  DeltaMix delta;
  SwilaMix swila;
  __device__ Phase() {}
};
constexpr int kPhaseWords = int(sizeof(Phase) / 4);

// What a thread has to write to the history of the short convolution once all blocks have read it.
struct Late {
  float* past;  // null: nothing
  float value;
};

// A row of a step, of one token.
struct RowPlace {
  Slot slot;
  int begin;
  bool fresh;
  int oldest;  // the ring's row that the token's input replaces
};

// Where a mixer's unit is: a head's share of values, for one row.
struct UnitPlace {
  int key;                       // the first one's place among all heads' keys
  int value_head, decay_head;
  int first_value;               // among all heads' values
  int begin;                     // its token
  Slot slot;
  bool padding, fresh;
  int oldest;                    // the ring's row that the token's input replaces
  float *state, *history, *out;  // the unit's; the row's; the unit's
};

// How a mixer's heads are shared out among the blocks.
struct Sharing {
  int slices, values, units;  // of a head; of a unit; units
  int channels;               // of a row of the history
  UnitPlace first;            // the block's
};

struct Shared {
  alignas(128) char ring[kStages * kStageBytes];
  alignas(16) uint16_t halves[kWarps][2][kStageRuns * kRun];  // of a token's columns: high, low
  union {
    float sums[2][kWarps * kBatchOutputs];  // of the batch of tiles, and the one before it
    Late late[kComputing];          // from a mixer's phase to the next one's beginning
  };
  union {
    // Sums of squares, of a token's columns of each warp or of each run.
    alignas(16) float squares[kTokensMost][kStageColumns / kRun];
    alignas(16) float head[4 * kKeysMost + kValuesMost + 8];  // of a mixer
  };
  alignas(16) uint32_t phase[3][kPhaseWords];  // this one, the next, the one after
  Table::Kind kind[3];
  Table::Kind kinds[Table::kPhases];           // the copying warp's: of all phases
  alignas(16) uint32_t copied[kPhaseWords];    // and the one it is in
  RowPlace rows[3][kTokensMost];               // of a mixer
  Sharing sharing[3];
  uint64_t full[kStages], free[kStages];
};
static_assert(sizeof(Shared) <= 227 * 1024);

constexpr int kTurnsMost = 1 << 24;         // of reading what is not there yet: seconds

// Found anew by each function, so that the compiler knows which memory it is.
__device__ inline Shared& shared_memory() {
  extern __shared__ __align__(128) char space[];
  return *reinterpret_cast<Shared*>(space);
}

// Whether the phase of this parity is complete.
__device__ inline bool barrier_done(uint32_t barrier, uint32_t parity) {
  uint32_t done = 1;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

// A thread's place in its block, found anew in each phase: what follows from it would else be kept
// in registers that other phases need.
struct Me {
  int thread;
  __device__ int lane() const { return thread % 32; }
  __device__ int warp() const { return thread / 32; }
};
__device__ inline Me find_me() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return {thread};
}

__device__ inline const Phase& phase_of(int description) {
  return *reinterpret_cast<const Phase*>(shared_memory().phase[description]);
}

__device__ inline int tiles_of(const LinearPhase& l) {
  return l.paired ? l.rows / kTileRows : (l.rows + kTileRows - 1) / kTileRows;
}

// Whole rows lie in a stage as in memory, four end to end.
__device__ inline int pitch_of(int in) { return min(in * 2, kPitch); }
// A row of a tile, in a stage.
__device__ inline int place_of_row(int row, int pitch) {
  return row * pitch + (row < kTileRows / 2 ? 0 : kApart);
}

// A tile's row of the stacked matrices: a pair's are four of the upper half and four of the lower.
__device__ inline int row_of_tile(const LinearPhase& l, int tile, int i) {
  if (!l.paired) return tile * kTileRows + i;
  return i < 4 ? tile * 4 + i : l.rows / 2 + tile * 4 + i - 4;
}

// --- what phases leave for each other -----------------------------------------------------------

__device__ inline bool written(float word) { return __float_as_uint(word) != Meeting::kUnwritten; }
__device__ inline bool written(const float4& words) {
  return written(words.x) && written(words.y) && written(words.z) && written(words.w);
}

__device__ inline void leave(float* to, float value) {
  const float word = written(value) ? value : __uint_as_float(0x7fffffffu);  // another NaN
#if __CUDA_ARCH__ >= 700
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(word) : "memory");
#endif
}

// What is there now.
__device__ inline float look(const float* from) {
  float word = 0;
#if __CUDA_ARCH__ >= 700
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(word) : "l"(from));
#endif
  return word;
}
__device__ inline float4 look4(const float* from) {
  float4 words{};
#if __CUDA_ARCH__ >= 700
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(words.x), "=f"(words.y), "=f"(words.z), "=f"(words.w)
               : "l"(from));
#endif
  return words;
}

// Rather an error than a step that never ends.
__device__ inline void count_turn(int& turn) {
  if (++turn == kTurnsMost) __trap();
}

// The word once it is written.
__device__ inline float await(const float* from) {
  float word = look(from);
  for (int turn = 0; !written(word); word = look(from)) count_turn(turn);
  return word;
}

// The half of the words that the last launch used.
__device__ inline void make_unwritten(Meeting& meeting, uint32_t launch, int count) {
  const int half = int(launch + 1) % 2, fours = count / 4;
  const float none = __uint_as_float(Meeting::kUnwritten);
  auto* const words = reinterpret_cast<float4*>(meeting.words[half]);
  for (int i = int(blockIdx.x) * kComputing + int(threadIdx.x); i < fours;
       i += int(gridDim.x) * kComputing) {
    words[i] = {none, none, none, none};
  }
}

// All warps are done with the phase's description, the describing one with a later one.
__device__ inline void end_phase() { barrier_among<kDescribed>(kComputing + 32 + kStoring); }

// Between those that compute a batch's sums and those that store them.
__device__ inline void sums_wait(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kComputing + kStoring) : "memory");
}
__device__ inline void sums_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kComputing + kStoring) : "memory");
}

__device__ inline float quick_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Once all blocks are known to have read the history.
__device__ inline void write_history(const Late& late) {
  if (late.past == nullptr) return;
  *late.past = late.value;
}

}  // namespace weir::cuda::resident
