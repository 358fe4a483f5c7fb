#pragma once
#include "kernels/async_cuda.cuh"
#include "kernels/resident_cuda.cuh"

// What all warps of the resident kernel share: its room, and how its blocks go from phase to phase.
namespace weir::cuda::resident {

// The computing warps, one that copies and one that reads the phases' descriptions.
constexpr int kComputing = kWarps * 32, kThreads = kComputing + 64;
constexpr int kRun = 32;                                    // columns
constexpr int kStageRuns = 4, kStageColumns = kStageRuns * kWarps * kRun;
// More at one time would keep whatever else is read waiting behind them.
constexpr int kTileRows = 8, kStages = 6, kInFlight = 2;
// A row in shared memory; 64 more bytes than columns, so that rows two apart share no banks.
constexpr int kPitch = kStageColumns * 2 + 64, kStageBytes = kTileRows * kPitch;
constexpr int kBatch = 2;                  // tiles whose sums are added up together
constexpr int kTileSums = kTileRows * 2 * kTokensMost, kSums = kBatch * kTileSums;
constexpr int kRunsMost = kColumnsMost / kRun, kNormsMost = kNormedMost / kRun;
constexpr int kSquares = kNormsMost + 1;
constexpr int kAll = 1, kDescribed = 2;     // named barriers: the computing warps; and one more

union Phase {
  LinearPhase linear;
  DeltaMix mix;
  __device__ Phase() {}
};
constexpr int kPhaseWords = int(sizeof(Phase) / 4);

// The history of the short convolution that a thread has to write once all blocks have read it.
struct Late {
  float* past;  // null: none
  float value[3];
  int channels;
};

struct Shared {
  alignas(128) char ring[kStages * kStageBytes];
  union {
    float sums[2][kWarps * kSums];  // of the batch of tiles, and the one before it
    Late late[kComputing];          // from a mixer's phase to the next one's beginning
  };
  union {
    struct {
      float squares[kTokensMost * kSquares];    // of a run of columns
      float scales[kTokensMost * kNormsMost];   // of a group of columns
    };
    alignas(16) float vectors[4 * kKeysMost + 2 * kValuesMost];  // of a mixer's head
  };
  alignas(16) uint32_t phase[3][kPhaseWords];  // this one, the next, the one after
  bool is_mix[3];
  uint64_t full[kStages], free[kStages];
};
static_assert(sizeof(Shared) <= 227 * 1024);

constexpr int kTurnsMost = 1 << 24;         // of waiting for another block: seconds

// Where a block is in the step.
struct Walk {
  const Table& table;
  Shared& shared;
  Meeting* meeting;
  uint32_t done;       // phases, of all blocks together, ever; one that this block has done last
  int tiles = 0;       // of all linear phases before this one
  int stage = 0, parity = 0;
  bool late = false;   // there is shared.late
  bool keep_low = true;
  int issued = 0;      // stages, by the copying warp

  __device__ int first_tile() const {
    const int blocks = gridDim.x;
    return (int(blockIdx.x) + blocks - tiles % blocks) % blocks;
  }
  __device__ void next_stage() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ inline int tiles_of(const LinearPhase& l) {
  return l.paired ? l.rows / kTileRows : (l.rows + kTileRows - 1) / kTileRows;
}

// A tile's row of the stacked matrices: a pair's are four of the upper half and four of the lower.
__device__ inline int row_of_tile(const LinearPhase& l, int tile, int i) {
  if (!l.paired) return tile * kTileRows + i;
  return i < 4 ? tile * 4 + i : l.rows / 2 + tile * 4 + i - 4;
}

__device__ inline uint32_t read_relaxed(const uint32_t* from) {
  uint32_t value = 0;
#if __CUDA_ARCH__ >= 700
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
#endif
  return value;
}
__device__ inline void add_release(uint32_t* to, uint32_t value) {
#if __CUDA_ARCH__ >= 700
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#endif
}

// The block has done its part of the phase. One number counts all blocks: that many readers of one
// word wait least, and who comes first changes no result.
__device__ inline void arrive(Walk& walk) {
  barrier_among<kDescribed>(kComputing + 32);
  walk.done += gridDim.x;
  if (threadIdx.x == 0) add_release(&walk.meeting->arrived, 1);
}

// All blocks have done as many phases as this one. What they wrote is in L2 then, where it is read
// from; an acquire would only empty L1.
__device__ inline void meet(Walk& walk) {
  if (threadIdx.x == 0) {
    for (int turn = 0; int32_t(read_relaxed(&walk.meeting->arrived) - walk.done) < 0; ++turn) {
      if (turn == kTurnsMost) __trap();  // rather an error than a step that never ends
    }
  }
  barrier_among<kAll>(kComputing);
  if (!walk.late) return;
  walk.late = false;
  const Late late = walk.shared.late[threadIdx.x];
  if (late.past == nullptr) return;
#pragma unroll
  for (int h = 0; h < 3; ++h) late.past[h * late.channels] = late.value[h];
}

}  // namespace weir::cuda::resident
