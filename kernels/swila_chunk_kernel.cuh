#pragma once
#include "kernels/long_rows_cuda.cuh"
#include "kernels/swila_chunk_gates.cuh"
#include "kernels/swila_chunk_helper.cuh"
#include "kernels/swila_chunk_state.cuh"

namespace weir::cuda::swila_chunk {

// Registers of a thread of each kind, together no more than all threads have at the start.
struct Registers {
  int state, chain, helper, convolver;
};
template <class V>
constexpr Registers registers() {
  if (V::kValues == 16) return V::kGated ? Registers{96, 128, 96, 80} : Registers{96, 128, 72, 104};
  if (V::kValues == 32) return V::kGated ? Registers{88, 96, 72, 64} : Registers{96, 96, 72, 96};
  return V::kGated ? Registers{112, 104, 40, 48} : Registers{112, 88, 48, 72};
}

template <int kStart, int kRegisters>
__device__ inline void set_registers() {
  if constexpr (kStart > kRegisters) give_up_registers<kRegisters>();
  if constexpr (kStart < kRegisters) take_registers<kRegisters>();
}

template <class V>
__device__ inline void run_block(const SwilaMix& op, const Maps& maps, const Place& place,
                                 Shared<V>& shared) {
  constexpr Registers kRegisters = registers<V>();
  constexpr int kStart = 65536 / V::kThreads / 8 * 8;
  static_assert(V::kHolders * kRegisters.state + 4 * kRegisters.chain +
                    V::kHelpers * kRegisters.helper + V::kConvolvers * kRegisters.convolver <=
                kStart * V::kThreads / 32);
  const int warp = int(threadIdx.x) / 32;
  if (warp < V::kFirstChain) {
    set_registers<kStart, kRegisters.state>();
    StateWarp<V>(op, place, shared).run();
  } else if (warp < V::kFirstHelper) {
    set_registers<kStart, kRegisters.chain>();
    if (warp < V::kFirstChain + V::kChains) Chain<V>{op, place, shared}.run();
  } else if (warp < V::kFirstConvolver) {
    set_registers<kStart, kRegisters.helper>();
    Helper<V>{op, maps, place, shared}.run();
  } else {
    set_registers<kStart, kRegisters.convolver>();
    if constexpr (V::kGated) {
      Gates<V>(op, maps, place, shared).run();
    } else {
      Convolver<V>{op, maps, place, shared}.run();
    }
  }
}

template <class V>
__global__ __launch_bounds__(V::kThreads, 1) void swila_chunk_kernel(
    const __grid_constant__ SwilaMix op, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) unsigned char space[];
  auto& shared = *reinterpret_cast<Shared<V>*>(space);
  constexpr int kSlices = kDim / V::kValues;
  if (threadIdx.x == 0) shared.init();
  let_successor_start();
  wait_for_predecessor();
  const int row = long_row(op.rows, blockIdx.y, kStepTokensMost);
  if (row < 0) return;
  const Slot slot = op.rows.slot[row];
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  if (slot == kPadding || count <= kStepTokensMost) return;
  const Place place{.head = int(blockIdx.x) / kSlices,
                    .value = int(blockIdx.x) % kSlices * V::kValues, .begin = begin,
                    .count = count, .fresh = op.rows.first[row] == 0,
                    .oldest = ring_row(op.rows.first[row], kWidth - 1), .slot = slot};
  Convolver<V>::keep_taps(op, place, shared);
  __syncthreads();  // the taps and barriers are there
  run_block(op, maps, place, shared);
#endif
}

template <class V>
void start_variant(const SwilaMix& op, const Maps& maps, Context& context) {
  static_assert(sizeof(Shared<V>) <= 227 * 1024);
  const auto kernel = swila_chunk_kernel<V>;
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(sizeof(Shared<V>))));
  launch(context,
         {.grid = dim3(op.heads * (kDim / V::kValues), most_long_rows(op.rows, kStepTokensMost)),
          .block = dim3(V::kThreads), .shared = sizeof(Shared<V>)},
         kernel, op, maps);
}

template <bool kGated, bool kTemporal>
void start_slice(const SwilaMix& op, const Maps& maps, Context& context, int slice) {
  switch (slice) {
    case 64: return start_variant<Variant<kGated, kTemporal, 64>>(op, maps, context);
    case 32: return start_variant<Variant<kGated, kTemporal, 32>>(op, maps, context);
    default: return start_variant<Variant<kGated, kTemporal, 16>>(op, maps, context);
  }
}

}  // namespace weir::cuda::swila_chunk
