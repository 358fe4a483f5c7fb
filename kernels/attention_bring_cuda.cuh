#pragma once
#include "kernels/attention_chunk_cuda.cuh"
#include "kernels/tensor_core.cuh"
#include "kernels/wgmma_cuda.cuh"

// Attention for many tokens: which queries a block has, and the warpgroup that brings it keys and
// values.
namespace weir::cuda::attention {

// One kernel's kind: columns of a head; whether halves are kept as one plane or as two, high and
// low, which together are a float32 to 22 bits; whether there is a forget gate.
template <int dim, int planes, bool forgets>
struct Sizes {
  static constexpr int kDim = dim, kPlanes = planes;
  static constexpr bool kForgets = forgets;
  static constexpr bool kLarge = kDim * kPlanes == 256;   // shared memory is short
  static constexpr int kGroups = kLarge ? 2 : 3;          // warpgroups with queries
  static constexpr int kTile = 64 * kGroups;              // queries of a block
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kPanels = kDim / 64;               // of 64 columns, 128 bytes a row
  static constexpr int kPanel = 64 * 128;                 // bytes of 64 rows
  static constexpr int kPlane = kPanels * kPanel;
  static constexpr int kUnit = kPlanes * kPlane;          // of keys or values, as halves
  static constexpr int kRaw = kUnitKeys * kDim * 4;       // the same, as they are kept
  static constexpr int kUnits = kLarge ? 3 : kDim == 64 ? 6 : 4;  // rings of them
  static constexpr int kRaws = kLarge ? 2 : kDim == 64 ? 4 : 3;
  static constexpr int kGates = 2 * kUnitKeys * 4;        // sums of log gates of a unit's positions
  static constexpr size_t kBytes =
      1024 + size_t(kGroups) * kUnit + kUnits * (kUnit + kGates) + kRaws * kRaw;
  static_assert(kBytes <= size_t(227) << 10);
  // Of each thread: those that bring keys and values, those with queries.
  static constexpr int kFewRegisters = kLarge ? 88 : 80, kManyRegisters = kLarge ? 208 : 144;
};

// A place in a ring, and the parity of the phases that it is in.
template <int kLength>
struct Place {
  int at = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++at == kLength) {
      at = 0;
      parity ^= 1;
    }
  }
};

// What a block has to do.
struct Tile {
  int row = -1, head, kv_head;
  int token, position;  // of the first query
  int count;            // queries
  int begin, end;       // units of kUnitKeys positions
};

// The block's queries: along x the query heads, along y the tiles of all rows, a row's last ones
// first as they see most keys. By one warp; row -1: there are fewer tiles.
__device__ inline Tile find_tile(const ChunkJob& job, int tile_tokens) {
  const Attention& op = job.op;
  const int lane = threadIdx.x % 32, each = (op.rows.count + 31) / 32;
  const int group = op.heads / op.kv_heads;
  const auto tiles = [&](int row) {
    if (row >= op.rows.count || !chunked(op.rows, row)) return 0;
    return (op.rows.begin[row + 1] - op.rows.begin[row] + tile_tokens - 1) / tile_tokens;
  };
  int own = 0;
  for (int i = 0; i < each; ++i) own += tiles(lane * each + i);
  int before = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int earlier = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += earlier;
  }
  int rank = int(blockIdx.y) - (before - own);
  const bool mine = rank >= 0 && rank < own;
  int row = lane * each, index = 0;
  if (mine) {
    while (rank >= tiles(row)) rank -= tiles(row++);
    index = tiles(row) - 1 - rank;
  }
  const unsigned owner = __ballot_sync(0xffffffffu, mine);
  Tile tile;
  if (owner == 0) return tile;
  row = __shfl_sync(0xffffffffu, row, __ffs(owner) - 1);
  index = __shfl_sync(0xffffffffu, index, __ffs(owner) - 1);
  const int first = index * tile_tokens, begin = op.rows.begin[row];
  tile.row = row;
  tile.head = job.kv_first * group + blockIdx.x;
  tile.kv_head = tile.head / group;
  tile.token = begin + first;
  tile.position = op.rows.first[row] + first;
  tile.count = min(tile_tokens, op.rows.begin[row + 1] - tile.token);
  const int oldest = op.window > 0 ? max(0, tile.position - op.window + 1) : 0;
  tile.begin = oldest / kUnitKeys;
  tile.end = (tile.position + tile.count - 1) / kUnitKeys + 1;
  return tile;
}

// Shared memory: queries of each warpgroup, units, what is kept, sums of gates; and its barriers.
template <typename S>
struct Room {
  uint32_t queries, units, raws, gates;         // shared addresses
  uint32_t unit_full, unit_free, raw_full;      // barriers

  __device__ Room(const void* shared, const void* barriers) {
    queries = (shared_address(shared) + 1023) / 1024 * 1024;
    units = queries + S::kGroups * S::kUnit;
    raws = units + S::kUnits * S::kUnit;
    gates = raws + S::kRaws * S::kRaw;
    unit_full = shared_address(barriers);
    unit_free = unit_full + 8 * S::kUnits;
    raw_full = unit_free + 8 * S::kUnits;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ inline float4 load_shared_four(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
  return x;
}
__device__ inline float2 load_shared_two(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ inline void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
// Four neighbouring numbers of a row as halves, into the layout of swizzled_rows(): of the row's
// eight 16-byte pieces, piece i lies at i ^ (row % 8). What halves leave goes to a second plane.
template <typename S>
__device__ inline void store_halves(uint32_t to, int row, int column, float4 x) {
  const uint32_t piece = uint32_t(column % 64 / 8 ^ row % 8);
  const uint32_t place = to + column / 64 * S::kPanel + row * 128 + piece * 16 + column % 8 * 2;
  uint32_t left = pack(x.x, x.y), right = pack(x.z, x.w);
#pragma unroll
  for (int plane = 0; plane < S::kPlanes; ++plane) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(place + plane * S::kPlane), "r"(left),
                 "r"(right)
                 : "memory");
    const float2 a = unpack(left), b = unpack(right);
    left = pack(x.x - a.x, x.y - a.y);
    right = pack(x.z - b.x, x.w - b.y);
  }
}

// --- the warpgroup that brings keys and values: unit n is of keys where n is even ----------------

template <typename S>
__device__ inline const float* source(const ChunkJob& job, const Tile& tile, int position,
                                      bool values) {
  const Attention& op = job.op;
  const int first = op.rows.first[tile.row];
  if (op.window > 0 && position >= first) {
    const int64_t token = op.rows.begin[tile.row] + position - first;
    if (values) return at(op.v, token) + int64_t(tile.kv_head) * S::kDim;
    return job.new_keys + (token * job.kv_count + tile.kv_head - job.kv_first) * S::kDim;
  }
  const Memory memory{op, tile.row, tile.kv_head, op.rows.slot[tile.row]};
  return memory.key(position) + (values ? memory.values_after() : 0);
}

// Of a unit's positions each warp brings 16 by itself.
constexpr int kWarpKeys = kUnitKeys / 4;

// Where a warp's positions of the next unit of keys lie, in pages that hold whole units. The page
// behind is looked up before it is needed.
class Pages {
 public:
  __device__ Pages(const ChunkJob& job, const Tile& tile, int position)
      : op_(job.op),
        table_(op_.page_table + int64_t(tile.row) * op_.pages_per_row),
        head_(int64_t(tile.kv_head) * op_.page_tokens) {
    if (job.together == 1) return;  // positions are looked for one by one
    page_ = position / op_.page_tokens;
    in_page_ = position % op_.page_tokens;
    now_ = table_[page_];
    next_ = table_[min(page_ + 1, op_.pages_per_row - 1)];
  }
  __device__ const float* take() {
    const float* const key =
        op_.pages + now_ * op_.page_stride + (head_ + in_page_) * op_.head_dim;
    in_page_ += kUnitKeys;
    if (in_page_ >= op_.page_tokens) {
      in_page_ -= op_.page_tokens;
      now_ = next_;
      next_ = table_[min(++page_ + 1, op_.pages_per_row - 1)];
    }
    return key;
  }

 private:
  const Attention& op_;
  const int32_t* table_;
  int64_t head_, now_ = 0, next_ = 0;
  int page_ = 0, in_page_ = 0;
};

// One warp of those that bring keys and values.
template <typename S>
struct Bringer {
  const ChunkJob& job;
  const Tile& tile;
  const Room<S>& room;
  int warp, lane;
  Pages pages;
  const float* key = nullptr;

  __device__ Bringer(const ChunkJob& j, const Tile& t, const Room<S>& r)
      : job(j), tile(t), room(r), warp(threadIdx.x % 128 / 32), lane(threadIdx.x % 32),
        pages(j, t, first(0)) {}

  // The warp's first position of a unit, and how many of them exist.
  __device__ int first(int unit) const {
    return (tile.begin + unit / 2) * kUnitKeys + kWarpKeys * warp;
  }
  __device__ int count(int unit) const {
    return max(0, min(kWarpKeys, tile.position + tile.count - first(unit)));
  }
  __device__ uint32_t raw_barrier(int place) const {
    return room.raw_full + 8 * (4 * place + warp);
  }
  __device__ uint32_t raw(int place) const {
    return room.raws + place * S::kRaw + warp * (S::kRaw / 4);
  }

  // Units are asked for one after the other.
  __device__ void ask_for(int unit, int place) {
    const int rows = count(unit);
    const uint32_t barrier = raw_barrier(place), to = raw(place);
    if (lane == 0) barrier_expect(barrier, rows * S::kDim * 4);
    __syncwarp();
    if (job.together == 1) {
      if (lane < rows) {
        copy(to + lane * S::kDim * 4, source<S>(job, tile, first(unit) + lane, unit % 2 == 1),
             S::kDim * 4, barrier);
      }
      return;
    }
    if (unit % 2 == 0) key = pages.take();
    if (lane > 0 || rows == 0) return;
    const int64_t values_after = int64_t(job.op.kv_heads) * job.op.page_tokens * S::kDim;
    copy(to, key + (unit % 2 == 1 ? values_after : 0), rows * S::kDim * 4, barrier);
  }
  __device__ void copy(uint32_t to, const float* from, uint32_t bytes, uint32_t barrier) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
  }

  // The sums of log gates at a position of the warp, high and low.
  __device__ float2 gates(int unit) const {
    if (lane >= count(unit)) return {0, 0};
    const Memory memory{job.op, tile.row, tile.kv_head, 0};
    const float* const sum = memory.gate_sum(first(unit) + lane, tile.head);
    return {sum[0], sum[memory.sum_rest()]};
  }

  // What is beyond the last position is anything: its weight will be 0, and so is it made.
  __device__ void narrow(uint32_t from, uint32_t to, int rows) const {
    constexpr int kPieces = kWarpKeys * S::kDim / 4 / 32, kAtOnce = 8;
#pragma unroll
    for (int base = 0; base < kPieces; base += kAtOnce) {
      float4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        x[i] = load_shared_four(from + (32 * (base + i) + lane) * 16);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int piece = 32 * (base + i) + lane, row = piece / (S::kDim / 4);
        const int column = piece % (S::kDim / 4) * 4;
        if (row >= rows) x[i] = {0, 0, 0, 0};
        store_halves<S>(to, kWarpKeys * warp + row, column, x[i]);
      }
    }
  }
};

template <typename S>
__device__ void bring(const ChunkJob& job, const Tile& tile, const Room<S>& room) {
  const int units = 2 * (tile.end - tile.begin);
  Bringer<S> bringer(job, tile, room);
  for (int unit = 0; unit < min(units, S::kRaws); ++unit) bringer.ask_for(unit, unit);
  Place<S::kUnits> place;
  Place<S::kRaws> raw;
  float2 gates{};
  if (S::kForgets) gates = bringer.gates(0);
  for (int unit = 0; unit < units; ++unit) {
    barrier_wait(bringer.raw_barrier(raw.at), raw.parity);
    barrier_wait(room.unit_free + 8 * place.at, place.parity ^ 1);
    bringer.narrow(bringer.raw(raw.at), room.units + place.at * S::kUnit, bringer.count(unit));
    if (S::kForgets && unit % 2 == 0 && bringer.lane < kWarpKeys) {
      const int at = kWarpKeys * bringer.warp + bringer.lane;
      const uint32_t to = room.gates + place.at * S::kGates + 4 * at;
      store_shared(to, gates.x);
      store_shared(to + 4 * kUnitKeys, gates.y);
      if (unit + 2 < units) gates = bringer.gates(unit + 2);
    }
    publish_to_copy_engine();
    __syncwarp();  // the warp's part of the unit is written, what it was made of is read
    if (bringer.lane == 0) barrier_arrive(room.unit_full + 8 * place.at);
    if (unit + S::kRaws < units) bringer.ask_for(unit + S::kRaws, raw.at);
    place.next();
    raw.next();
  }
}

#endif  // 9.0a

}  // namespace weir::cuda::attention
