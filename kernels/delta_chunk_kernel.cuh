#pragma once
#include "kernels/delta_chunk_state.cuh"

namespace weir::cuda::chunk {

// The first kernel: a block for each value head and chunk.
//
// Floor of a chunk, scalar decay, 128 x 128: 96 KB read, 60 KB written (16 us of a multiprocessor's
// share of a copy, less where the tiles stay in the L2 cache); 11,000 warp instructions; per
// channel 25,000.
template <bool kChannel>
constexpr int kPrepareBlocks = kChannel ? 2 : 4;  // on a multiprocessor
constexpr int kFewBlocks = 2;  // where that is room for all: each asks for more at one time

template <int K, bool kChannel, int kBlocks>
__global__ __launch_bounds__(kPreparers, kBlocks) void delta_prepare_kernel(
    const __grid_constant__ DeltaMix op, const __grid_constant__ Turn turn) {
  using Preparer = chunk::Preparer<K, kChannel, Workshop<K, kChannel>, DeviceSource,
                                   K == 128 && kBlocks == kFewBlocks ? 8 : 4>;
  using Shop = Workshop<K, kChannel>;
  extern __shared__ __align__(128) unsigned char space[];
  auto& shop = *reinterpret_cast<Shop*>(space);
  const int warp = threadIdx.x / 32, head = blockIdx.x;
  let_successor_start();
  if (warp == 0) {
    const Tile tile = find_tile(op.rows, turn.group, turn.first + int(blockIdx.y));
    shop.row = tile.row;
    shop.chunk = tile.chunk;
  }
  // A later turn knows all it reads, and its tiles are no longer needed: its predecessor waited for
  // those who had them. So it need not wait; but one that waited for it alone must not start before
  // the turn's predecessor is done.
  if (!turn.follows) wait_for_predecessor();
  __syncthreads();
  if (shop.row >= 0) {
    const Place place = place_of(op, shop.row, head);
    const int first = shop.chunk * kTokens;
    const Preparer preparer{op, place, shop, {op, place, first}, first};
    const Products<K, kChannel> products{shop};
    ScalarLogits logits;
    if (warp == 7) logits.load(op, place, preparer.first);
    if (warp == 7) preparer.scalar_gates(logits);
    if constexpr (kChannel) {
      typename Preparer::RunLogs g;
      preparer.channel_logs(g);
      __syncthreads();
      preparer.join_logs(g);
    }
#pragma unroll 1
    for (int which = 0; which < 2; ++which) preparer.keys(which);
    __syncthreads();
    unsigned char* const tile = turn.tiles + (int64_t(blockIdx.y) * op.value_heads + head) *
                                                 tile_bytes(sizeof(shop.image), op.value_dim);
    preparer.values(reinterpret_cast<half*>(tile + sizeof(shop.image)));
    if constexpr (kChannel) {
      products.channel();
    } else {
      products.scalar();
    }
    publish_to_copy_engine();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(tile, &shop.image, sizeof(shop.image));
      bulk_stores_read<0>();
    }
  }
  const bool last = blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1;
  if (turn.follows && last) wait_for_predecessor();
}

template <int K, bool kChannel, int kBlocks>
void start_prepare(const DeltaMix& op, Context& context, const Turn& turn) {
  const auto kernel = delta_prepare_kernel<K, kChannel, kBlocks>;
  constexpr size_t kBytes = sizeof(Workshop<K, kChannel>);
  static_assert(kBytes <= (kChannel ? 113 : 56) * 1024);
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes)));
  launch(context,
         {.grid = dim3(op.value_heads, turn.count), .block = dim3(kPreparers), .shared = kBytes},
         kernel, op, turn);
}

template <int K, bool kChannel>
void start_prepare(const DeltaMix& op, Context& context, const Turn& turn) {
  // Blocks without a tile take little room for long.
  const int64_t blocks = int64_t(op.rows.tokens / kTokens + 1) * op.value_heads;
  if (blocks <= kFewBlocks * context.multiprocessors) {
    return start_prepare<K, kChannel, kFewBlocks>(op, context, turn);
  }
  start_prepare<K, kChannel, kPrepareBlocks<kChannel>>(op, context, turn);
}

template <int K, bool kChannel, int kWarps>
void start_state(const DeltaMix& op, Context& context, const Turn& turn, int rows) {
  const auto kernel = delta_state_kernel<K, kChannel, kWarps>;
  constexpr size_t kBytes = sizeof(StateShared<K, kChannel, kWarps>);
  static_assert(kBytes <= 227 * 1024);
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes)));
  launch(context,
         {.grid = dim3(op.value_heads * (op.value_dim / (16 * kWarps)), rows),
          .block = dim3(StateShared<K, kChannel, kWarps>::kThreads),
          .shared = kBytes},
         kernel, op, turn);
}

template <int K, bool kChannel>
void start_state(const DeltaMix& op, Context& context, const Turn& turn, int slice, int rows) {
  switch (slice) {
    case 64: return start_state<K, kChannel, 4>(op, context, turn, rows);
    case 32: return start_state<K, kChannel, 2>(op, context, turn, rows);
    default: return start_state<K, kChannel, 1>(op, context, turn, rows);
  }
}

template <int K, bool kChannel>
Starts starts() {
  return {start_prepare<K, kChannel>, start_state<K, kChannel>, sizeof(Image<K, kChannel>),
          kPrepareBlocks<kChannel>};
}

}  // namespace weir::cuda::chunk
