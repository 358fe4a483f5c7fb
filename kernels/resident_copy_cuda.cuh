#pragma once
#include "kernels/resident_linear_cuda.cuh"
#include "kernels/resident_narrow_cuda.cuh"

// The copying warp of the resident kernel: weights do not depend on activations, so it keeps them
// coming, in the order in which the phases need them, through the ring of stages. Where the ring is
// full it asks for what comes next into L2, at the speed of memory, which else would stand still
// until the other warps go on.
namespace weir::cuda::resident {

constexpr int kAheadMost = 16;    // stages of L2, a block's
constexpr uint32_t kPace = 2500;  // clocks from one stage to the next
// Stages: more at one time would keep whatever else is read waiting behind them.
constexpr int kInFlight = 2;

// Weights are read once: they leave the cache to what is read again.
__device__ inline void load_row(uint32_t shared, const char* from, uint32_t bytes,
                                uint32_t barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#endif
}
__device__ inline uint64_t read_once() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// A lane's row of a tile, and how many there are in its slab from there on.
struct Row {
  const char* at = nullptr;  // null: none
  int left = 0;

  __device__ void find(const LinearPhase& l, int tile) {
    const int lane = threadIdx.x % 32;
    at = nullptr;
    left = 0;
    if (lane >= kTileRows) return;
    int row = row_of_tile(l, tile, lane);
#pragma unroll 1
    for (int s = 0; s < kSlabs; ++s) {
      const int rows = l.slab[s].rows;
      if (row < rows) {
        at = l.slab[s].data + int64_t(row) * l.in * 2;
        left = rows - row;
        return;
      }
      row -= rows;
    }
  }
};

// A stage of this block's, in the order in which the phases need them: that of multiply_all() and
// of run_narrow().
struct Cursor {
  const Table* table;
  int stages = 0;                     // before this one
  int phase = -1, linear = -1, narrow = -1;  // the last one of each kind
  int count = 0;                      // tiles of the phase
  int tile = blockIdx.x, column = 0, in = 0;
  bool second = false;                // of a batch's tiles
  const LinearPhase* l = nullptr;     // or
  const NarrowPhase* n = nullptr;     // or neither: the end
  Row row, other;                     // of the tile; of a batch's second one
  int step = 0;                       // rows from one of the block's tiles to the next

  __device__ bool ended() const { return l == nullptr && n == nullptr; }
  // Whether a stage has whole rows: then their tiles come one after the other.
  __device__ bool whole() const { return in <= kStageColumns; }

  // To the next phase that has weights: where the table has it.
  __device__ const void* next_phase() {
    const int blocks = gridDim.x;
#pragma unroll 1
    while (tile - blocks >= count) tile -= blocks;
    tile -= count;
    count = 0;
#pragma unroll 1
    while (++phase < table->phases) {
      const Table::Kind kind = shared_memory().kinds[phase];
      if (kind == Table::Kind::Linear) return table->linear + ++linear;
      if (kind == Table::Kind::Narrow) return table->narrow + ++narrow;
    }
    return nullptr;
  }
  // Its description is there too; false: there is no stage for this block.
  __device__ bool enter(const void* description) {
    l = nullptr;
    n = nullptr;
    column = 0;
    if (description == nullptr) return true;
    if (shared_memory().kinds[phase] == Table::Kind::Narrow) {
      n = static_cast<const NarrowPhase*>(description);
      count = n->tiles;
      return tile < count;
    }
    l = static_cast<const LinearPhase*>(description);
    count = tiles_of(*l);
    in = l->in;
    step = int(gridDim.x) * (l->paired ? kTileRows / 2 : kTileRows);
    if (tile >= count) return false;
    find_rows();
    return true;
  }
  __device__ void find_rows() {
    row.find(*l, tile);
    if (!whole() && tile + int(gridDim.x) < count) other.find(*l, tile + int(gridDim.x));
  }
  // False: the phase has no more.
  __device__ bool next() {
    const int blocks = gridDim.x;
    ++stages;
    if (n != nullptr) {
      tile += kWarps * blocks;
      return tile < count;
    }
    if (whole()) {
      tile += blocks;
      if (tile >= count) return false;
      row.left -= step;
      row.at += int64_t(step) * in * 2;
      if (row.left <= 0) row.find(*l, tile);
      __syncwarp();
      return true;
    }
    static_assert(kBatch == 2);
    second = !second && tile + blocks < count;
    if (second) return true;
    column += kStageColumns;
    if (column < in) return true;
    column = 0;
    tile += kBatch * blocks;
    if (tile >= count) return false;
    find_rows();
    return true;
  }
  // The lane's part of the stage: rows that lie end to end in memory and there are one piece, for
  // each takes its time to start. 0 bytes: another lane has it. `rows`: of the stage.
  __device__ uint32_t piece(const char*& from, int& rows) const {
    const int lane = threadIdx.x % 32;
    const char* const mine = second ? other.at : row.at;
    const uint32_t bytes = min(kStageColumns, in - column) * 2;
    const auto before = __shfl_up_sync(0xffffffffu, reinterpret_cast<uint64_t>(mine), 1);
    const bool joins = whole() && lane % (kTileRows / 2) > 0 &&
                       reinterpret_cast<uint64_t>(mine) == before + bytes;
    const uint32_t all = __ballot_sync(0xffffffffu, mine != nullptr),
                   firsts = __ballot_sync(0xffffffffu, mine != nullptr && !joins);
    from = mine + column * 2;
    rows = __popc(all);
    const uint32_t after = firsts & ~((2u << lane) - 1);  // up to the next first one, or all
    const uint32_t own = all & ~((1u << lane) - 1) & (after == 0 ? ~0u : (after & -after) - 1);
    return (firsts >> lane & 1) == 0 ? 0 : bytes * __popc(own);
  }

  // Into L2.
  __device__ void prefetch() const {
    if (l == nullptr) return;  // narrow layers are small
    const char* from;
    int rows;
    const uint32_t bytes = piece(from, rows);
    if (bytes > 0) bulk_prefetch(from, bytes);
    __syncwarp();
  }
};

// The description of the next phase with weights, asked for while this one's are copied.
struct Coming {
  static constexpr int kWords = int(std::max(sizeof(LinearPhase), sizeof(NarrowPhase)) / 4);
  static constexpr int kEach = (kWords + 31) / 32;
  uint32_t word[kEach];

  __device__ void ask(const void* description) {
    if (description == nullptr) return;
    const auto* from = static_cast<const uint32_t*>(description);
#pragma unroll
    for (int i = 0; i < kEach; ++i) word[i] = from[min(i * 32 + int(threadIdx.x % 32), kWords - 1)];
  }
  __device__ void put(uint32_t* to) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[min(i * 32 + int(threadIdx.x % 32), kWords - 1)] = word[i];
    __syncwarp();
  }
};

struct Copier {
  Cursor ring, ahead;  // the next stage to be loaded; the next one into L2, if that is further
  Cursor coming;       // a phase further than the ring
  Coming description;
  const void* there;   // in the table; null: none
  Walk walk;
  uint64_t policy;
  uint32_t last = 0;   // clock, of what was asked of memory

  // Asks for another stage into L2, when it is time. `idle`: memory has nothing else to do.
  __device__ void look_ahead(bool idle) {
    if (ahead.stages <= ring.stages) {
      if (!idle) return;
      ahead = ring;
    }
    if (ahead.ended() || ahead.stages >= ring.stages + kAheadMost) return;
    if (!__any_sync(0xffffffffu, uint32_t(clock()) - last >= kPace)) return;
    last = uint32_t(clock());
    ahead.prefetch();
    if (ahead.next()) return;
    while (!ahead.enter(ahead.next_phase())) {
    }
  }
  __device__ void wait(uint32_t barrier, uint32_t parity, bool idle) {
#pragma unroll 1
    while (!__all_sync(0xffffffffu, barrier_done(barrier, parity))) look_ahead(idle);
  }

  // Returns when the ring's next stage may be filled; its barrier.
  __device__ uint32_t wait_for_stage() {
    const uint32_t full = shared_address(shared_memory().full),
                   free = shared_address(shared_memory().free);
    // It is free at once in the first round: the phase before the first is done.
    wait(free + 8 * walk.stage, walk.parity ^ 1, true);
    const int before = walk.stage - kInFlight;
    if (ring.stages >= kInFlight) {
      wait(full + 8 * (before + (before < 0 ? kStages : 0)), walk.parity ^ int(before < 0), false);
    }
    return full + 8 * walk.stage;
  }

  __device__ void copy_linear() {
    const char* from;
    int rows;
    const uint32_t piece = ring.piece(from, rows);
    const int lane = threadIdx.x % 32, columns = min(kStageColumns, ring.in - ring.column);
    const uint32_t to = shared_address(shared_memory().ring) + walk.stage * kStageBytes +
                        place_of_row(lane, pitch_of(ring.in));
    const uint32_t full = wait_for_stage();
    if (lane == 0) barrier_expect(full, columns * 2 * rows);
    __syncwarp();
    if (piece > 0) load_row(to, from, piece, full, policy);
    __syncwarp();
  }
  // Eight rows of each warp's lie in memory end to end.
  __device__ void copy_narrow() {
    Shared& shared = shared_memory();
    const NarrowPhase& n = *ring.n;
    const int lane = threadIdx.x % 32;
    int tile = ring.tile + lane * int(gridDim.x);
    const char* from = nullptr;
    const uint32_t bytes = kTileRows * n.in * 2;
    if (lane < kWarps && tile < n.tiles) {
      const NarrowPhase::Layer& layer = layer_of(n, tile);
      from = layer.weights + int64_t(tile) * bytes;
    }
    const int pieces = __popc(__ballot_sync(0xffffffffu, from != nullptr));
    const uint32_t full = wait_for_stage();
    if (lane == 0) barrier_expect(full, bytes * pieces);
    __syncwarp();
    if (from == nullptr) return;
    load_row(shared_address(shared.ring) + walk.stage * kStageBytes + lane * kNarrowBytes, from,
             bytes, full, policy);
  }
  // The ring to its next phase.
  __device__ void enter() {
#pragma unroll 1
    do {
      ring.next_phase();
      uint32_t* const to = shared_memory().copied;
      const bool any = there != nullptr;
      if (any) description.put(to);
      there = coming.next_phase();
      description.ask(there);
      if (ring.enter(any ? to : nullptr)) return;
    } while (true);
  }
  __device__ void run() {
    there = coming.next_phase();
    description.ask(there);
    enter();
#pragma unroll 1
    while (!ring.ended()) {
      if (ring.n == nullptr) {
        copy_linear();
      } else {
        copy_narrow();
      }
      if (ahead.stages <= ring.stages) last = uint32_t(clock());
      __syncwarp();
      walk.next_stage();
      if (!ring.next()) enter();
    }
  }
};

__device__ inline void copy_weights(const Table& table) {
  for (int p = threadIdx.x % 32; p < table.phases; p += 32) {
    shared_memory().kinds[p] = table.kind[p];
  }
  __syncwarp();
  Copier copier{.ring = {.table = &table},
                .ahead = {.table = &table},
                .coming = {.table = &table},
                .policy = read_once()};
  copier.run();
}

}  // namespace weir::cuda::resident
