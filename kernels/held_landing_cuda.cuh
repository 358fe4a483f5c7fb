#pragma once
#include "kernels/async_cuda.cuh"

// A head's state of 64 KB in the dynamic shared memory of a block of 16 warps, where it lies as in
// device memory. From sm_90 on one thread asks for it in pieces, each with a barrier of its own;
// before, each thread for its own parts.
namespace weir::cuda::held {

struct Landing {
  static constexpr int kFloats = 128 * 128, kPieces = 4, kPiece = kFloats / kPieces;
  static constexpr int kBytes = kFloats * int(sizeof(float));
  static constexpr int kBringer = 15 * 32;  // the thread that asks

  // The four floats at `place`.
  __device__ static float4& at(int place) {
    extern __shared__ float4 space[];
    return *reinterpret_cast<float4*>(reinterpret_cast<float*>(space) + place);
  }
  __device__ static void open(uint64_t* barriers) {
    if (threadIdx.x != kBringer) return;
    for (int i = 0; i < kPieces; ++i) barrier_init(shared_address(barriers + i), 1);
    barrier_init_done();
  }
  // each_own(f) calls f with the places of all parts that the thread reads.
  template <typename EachOwn>
  __device__ static void load(const float* head, bool fresh, uint64_t* barriers,
                              const EachOwn& each_own) {
#if __CUDA_ARCH__ >= 900
    if (!fresh) {
      if (threadIdx.x == kBringer) bring(head, barriers);
      return;
    }
#endif
    each_own([&](int place) {
      fresh ? void(at(place) = {}) : copy_16_bytes(&at(place), head + place);
    });
    copies_commit();
  }
  // Returns when a piece is there, of the block's head number `turn`.
  __device__ static void await(bool fresh, int piece, int turn, const uint64_t* barriers) {
    if (fresh) return;
#if __CUDA_ARCH__ >= 900
    barrier_wait(shared_address(barriers + piece), turn % 2);
#else
    copies_wait();
#endif
  }

 private:
  __device__ static void bring(const float* head, uint64_t* barriers) {
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t barrier = shared_address(barriers + i);
      barrier_expect(barrier, kPiece * sizeof(float));
      bulk_load(&at(i * kPiece), head + i * kPiece, kPiece * sizeof(float), barrier);
    }
  }
};

}  // namespace weir::cuda::held
