#pragma once
#include "kernels/swila_chunk_chain.cuh"
#include "kernels/swila_chunk_state.cuh"

namespace weir::cuda::swila_chunk {

// Registers of a thread of each kind, together no more than all threads have at the start.
struct Registers {
  int state, chain, prepare;
};
template <class V>
constexpr Registers registers() {
  if (V::kValues == kDim) return V::kGated ? Registers{72, 104, 56} : Registers{72, 104, 80};
  return V::kValues == 32 ? Registers{80, 112, 96} : Registers{104, 128, 128};
}

// 0 at the start: they stay as they are.
template <int kStart, int kRegisters>
__device__ inline void set_registers() {
  if constexpr (kStart > kRegisters) give_up_registers<kRegisters>();
  if constexpr (kStart > 0 && kStart < kRegisters) take_registers<kRegisters>();
}

template <class V>
__device__ inline void run_block(const SwilaMix& op, const Place& place, Shared<V>& shared) {
  constexpr Registers kRegisters = registers<V>();
  constexpr bool kDivide = V::kGated || V::kValues == kDim;  // else there are enough
  constexpr int kStart = kDivide ? 65536 / V::kThreads / 8 * 8 : 0;
  static_assert(!kDivide || V::kStates * kRegisters.state + 128 * kRegisters.chain +
                                    V::kPreparers * kRegisters.prepare <=
                                kStart * V::kThreads);
  if (threadIdx.x < V::kStates) {
    set_registers<kStart, kRegisters.state>();
    StateWarp<V>(op, place, shared).run();
  } else if (threadIdx.x < V::kStates + 128) {
    set_registers<kStart, kRegisters.chain>();
    const int thread = threadIdx.x - V::kStates;
    if (thread % 64 >= V::kLanes) return;
    if (thread < 64) {
      Chain<V>{op, place, shared}.run();
    } else {
      Finish<V>{op, place, shared}.run();
    }
  } else {
    set_registers<kStart, kRegisters.prepare>();
    Preparer<V>{op, place, shared}.run();
  }
}

template <class V>
__global__ __launch_bounds__(V::kThreads, 1) void swila_chunk_kernel(
    const __grid_constant__ SwilaMix op) {
  extern __shared__ __align__(16) unsigned char space[];
  auto& shared = *reinterpret_cast<Shared<V>*>(space);
  constexpr int kSlices = kDim / V::kValues;
  const int row = blockIdx.y;
  let_successor_start();
  wait_for_predecessor();
  const Slot slot = op.rows.slot[row];
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  if (slot == kPadding || count <= kStepTokensMost) return;
  const Place place{.head = int(blockIdx.x) / kSlices,
                    .value = int(blockIdx.x) % kSlices * V::kValues, .begin = begin,
                    .count = count, .fresh = op.rows.first[row] == 0, .slot = slot};
  Preparer<V>::keep_taps(op, place, shared);
  __syncthreads();  // the taps are there
  run_block(op, place, shared);
}

template <class V>
void start_variant(const SwilaMix& op, Context& context) {
  static_assert(sizeof(Shared<V>) <= 227 * 1024);
  const auto kernel = swila_chunk_kernel<V>;
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(sizeof(Shared<V>))));
  launch(context,
         {.grid = dim3(op.heads * (kDim / V::kValues), op.rows.count),
          .block = dim3(V::kThreads), .shared = sizeof(Shared<V>)},
         kernel, op);
}

template <bool kGated, bool kTemporal>
void start_slice(const SwilaMix& op, Context& context, int slice) {
  switch (slice) {
    case 64: return start_variant<Variant<kGated, kTemporal, 64>>(op, context);
    case 32: return start_variant<Variant<kGated, kTemporal, 32>>(op, context);
    default: return start_variant<Variant<kGated, kTemporal, 16>>(op, context);
  }
}

}  // namespace weir::cuda::swila_chunk
