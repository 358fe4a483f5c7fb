#pragma once
#include "kernels/cuda_util.cuh"

// Hopper's asynchronous parts: barriers in shared memory, the copy engine, and what the blocks of a
// thread-block cluster say to each other. Before sm_90 there are none: kernels that use them must
// not be started there, or have a plain path; the functions are empty so that such code compiles.
// Barriers are named by their shared address.
namespace weir::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// --- barriers ---------------------------------------------------------------------------------

__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

// By the thread that initialised barriers: the copy engine knows them, and all threads after a
// __syncthreads().
__device__ inline void barrier_init_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
#endif
}

__device__ inline void barrier_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Arrives, and has the phase wait for `bytes` of the copy engine too.
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Returns when the phase of this parity is complete.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// A barrier among `threads` threads of a block, apart from the others. 0 is __syncthreads()'s own.
template <int id>
__device__ inline void barrier_among(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(id), "r"(threads) : "memory");
}

// --- the copy engine: 16-byte aligned, multiples of 16 bytes ------------------------------------

// Device to shared memory; the barrier was told to expect the bytes.
__device__ inline void bulk_load(void* shared, const void* from, uint32_t bytes,
                                 uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// Each thread, after its writes to shared memory and before the barrier that bulk_store() follows.
__device__ inline void publish_to_copy_engine() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Shared to device memory.
__device__ inline void bulk_store(void* to, const void* shared, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
#endif
}

// All but the thread's last `pending` stores have read their shared memory.
template <int pending>
__device__ inline void bulk_stores_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
#endif
}

// Asks for 128 bytes of device memory to be brought to the L2 cache.
__device__ inline void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Asks for device memory to be brought to the L2 cache by the copy engine.
__device__ inline void bulk_prefetch(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// --- copies of single threads ------------------------------------------------------------------

// Two floats from device to shared memory, both 8-byte aligned; there after copies_wait(), for
// other threads after a barrier that follows it.
__device__ inline void copy_pair(float* shared, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(from)
               : "memory");
}
__device__ inline void copy_one(float* shared, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(from)
               : "memory");
}
__device__ inline void copy_16_bytes(void* shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(from)
               : "memory");
}
// Zeros where what lies there is not valid.
__device__ inline void copy_16_or_zeros(void* shared, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// --- clusters -----------------------------------------------------------------------------------

__device__ inline uint32_t cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// A block's shared memory is there only once the block has started: every thread arrives when it
// has, and waits before it first writes to a peer.
__device__ inline void cluster_started() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Every thread of the cluster arrives, and what each wrote before can be read after.
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
#endif
}

// The same without a word about memory: what a block has read before it arrives stays as it was
// until then.
__device__ inline void cluster_meeting() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
#endif
}

// Where block `rank` of the cluster has what this block has at `mine`.
__device__ inline uint32_t peer_address(const float* mine, uint32_t rank) {
  uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(mine)), "r"(rank));
#endif
  return address;
}

__device__ inline void write_peer(float* mine, uint32_t rank, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(peer_address(mine, rank)), "f"(value)
               : "memory");
#endif
}

// A block is its own only peer before sm_90.
__device__ inline float read_peer(const float* mine, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(value)
               : "r"(peer_address(mine, rank))
               : "memory");
  return value;
#else
  return *mine;
#endif
}

}  // namespace weir::cuda
