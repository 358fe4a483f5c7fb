#pragma once
// What Hopper's tensor cores and copy engine are asked for (PTX ISA: wgmma, cp.async.bulk.tensor),
// for compute capability 9.0a alone.
#include <cuda.h>

#include <cstdint>

#include "kernels/async_cuda.cuh"

namespace weir::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// --- copies of a tensor's box into shared memory ----------------------------------------------

constexpr uint64_t kReadOnce = 0x12F0000000000000;  // an L2 policy: evict first
constexpr uint64_t kReadOften = 0x14F0000000000000;  // evict last

__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int column, int row,
                                uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int column, int row, int plane,
                                uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(barrier), "l"(policy)
      : "memory");
}
// Asks for a box to be brought to the L2 cache.
__device__ inline void prefetch_box(const CUtensorMap& map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map),
               "r"(column), "r"(row)
               : "memory");
}
__device__ inline void prefetch_box(const CUtensorMap& map, int column, int row, int plane) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(column), "r"(row), "r"(plane)
               : "memory");
}
// The same into all blocks of a cluster whose bits are set, to the same place in each, and each
// one's barrier is told.
__device__ inline void copy_box_to_all(uint32_t to, const CUtensorMap& map, int column, int row,
                                       uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}
// From shared to device memory; what lies outside of the tensor is left out.
__device__ inline void store_box(const CUtensorMap& map, int column, int row, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
// The same, added to what lies there.
__device__ inline void add_box(const CUtensorMap& map, int column, int row, uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// --- products by a warpgroup ------------------------------------------------------------------

// Rows of 64 bf16 numbers (128 bytes) one after the other, in the copy engine's 128-byte swizzle;
// eight rows take 1024 bytes, and so does the alignment. 16 numbers further on: + kNextColumns.
__device__ inline uint64_t swizzled_rows(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
}
constexpr uint64_t kNextColumns = 32 >> 4;

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// sum [64, kWide] += a [64, 16] b [kWide, 16]^T, both in shared memory. Thread t holds of row
// t / 32 * 16 + t % 32 / 4 the columns 8 j + 2 (t % 4) + {0, 1} in sum[4 j + {0, 1}], and of the
// row eight further down in sum[4 j + {2, 3}].
template <int kWide>
__device__ void multiply(float (&sum)[kWide / 2], uint64_t a, uint64_t b);

// The instruction names every register, so each width is written out: names and sums of a width are
// those of the width before and some more.
#define WEIR_FOUR(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define WEIR_NAMES_32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
  "%14,%15"
#define WEIR_SUMS_32 \
  WEIR_FOUR(0), WEIR_FOUR(4), WEIR_FOUR(8), WEIR_FOUR(12)
#define WEIR_NAMES_64 \
  WEIR_NAMES_32 "," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31"
#define WEIR_SUMS_64 \
  WEIR_SUMS_32, WEIR_FOUR(16), WEIR_FOUR(20), WEIR_FOUR(24), WEIR_FOUR(28)
#define WEIR_NAMES_72 \
  WEIR_NAMES_64 "," \
  "%32,%33,%34,%35"
#define WEIR_SUMS_72 \
  WEIR_SUMS_64, WEIR_FOUR(32)
#define WEIR_NAMES_96 \
  WEIR_NAMES_72 "," \
  "%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WEIR_SUMS_96 \
  WEIR_SUMS_72, WEIR_FOUR(36), WEIR_FOUR(40), WEIR_FOUR(44)
#define WEIR_NAMES_104 \
  WEIR_NAMES_96 "," \
  "%48,%49,%50,%51"
#define WEIR_SUMS_104 \
  WEIR_SUMS_96, WEIR_FOUR(48)
#define WEIR_NAMES_128 \
  WEIR_NAMES_104 "," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WEIR_SUMS_128 \
  WEIR_SUMS_104, WEIR_FOUR(52), WEIR_FOUR(56), WEIR_FOUR(60)
#define WEIR_NAMES_144 \
  WEIR_NAMES_128 "," \
  "%64,%65,%66,%67,%68,%69,%70,%71"
#define WEIR_SUMS_144 \
  WEIR_SUMS_128, WEIR_FOUR(64), WEIR_FOUR(68)
#define WEIR_NAMES_176 \
  WEIR_NAMES_144 "," \
  "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
  "%86,%87"
#define WEIR_SUMS_176 \
  WEIR_SUMS_144, WEIR_FOUR(72), WEIR_FOUR(76), WEIR_FOUR(80), WEIR_FOUR(84)
#define WEIR_NAMES_192 \
  WEIR_NAMES_176 "," \
  "%88,%89,%90,%91,%92,%93,%94,%95"
#define WEIR_SUMS_192 \
  WEIR_SUMS_176, WEIR_FOUR(88), WEIR_FOUR(92)
#define WEIR_NAMES_208 \
  WEIR_NAMES_176 "," \
  "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101," \
  "%102,%103"
#define WEIR_SUMS_208 \
  WEIR_SUMS_176, WEIR_FOUR(88), WEIR_FOUR(92), WEIR_FOUR(96), WEIR_FOUR(100)
#define WEIR_NAMES_248 \
  WEIR_NAMES_208 "," \
  "%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117," \
  "%118,%119,%120,%121,%122,%123"
#define WEIR_SUMS_248 \
  WEIR_SUMS_208, WEIR_FOUR(104), WEIR_FOUR(108), WEIR_FOUR(112), WEIR_FOUR(116), \
  WEIR_FOUR(120)
#define WEIR_MULTIPLY(wide, a_at, b_at)                                                       \
  template <>                                                                                 \
  __device__ inline void multiply<wide>(float (&sum)[wide / 2], uint64_t a, uint64_t b) {     \
    asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                               \
                 "wgmma.mma_async.sync.aligned.m64n" #wide "k16.f32.bf16.bf16 {"              \
                 WEIR_NAMES_##wide "}, %" #a_at ", %" #b_at ", add, 1, 1, 0, 0;\n}"           \
                 : WEIR_SUMS_##wide                                                           \
                 : "l"(a), "l"(b));                                                           \
  }
WEIR_MULTIPLY(32, 16, 17)
WEIR_MULTIPLY(64, 32, 33)
WEIR_MULTIPLY(72, 36, 37)
WEIR_MULTIPLY(96, 48, 49)
WEIR_MULTIPLY(104, 52, 53)
WEIR_MULTIPLY(128, 64, 65)
WEIR_MULTIPLY(144, 72, 73)
WEIR_MULTIPLY(176, 88, 89)
WEIR_MULTIPLY(192, 96, 97)
WEIR_MULTIPLY(208, 104, 105)
WEIR_MULTIPLY(248, 124, 125)
#undef WEIR_MULTIPLY

// The same for halves: sum [64, 64] = a [64, 16] b [64, 16]^T, added to sum where `add` is set.
__device__ inline void multiply_halves(float (&sum)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.u32 add, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               WEIR_NAMES_64 "}, %32, %33, add, 1, 1, 0, 0;\n}"
               : WEIR_SUMS_64
               : "l"(a), "l"(b), "r"(int(add)));
}
// sum [64, 64] += a [64, 16] b [16, 64]: a in registers, as tensor_core.cuh numbers them in each
// warp's 16 rows; b's rows swizzled_rows() one after the other.
__device__ inline void multiply_halves(float (&sum)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               WEIR_NAMES_64 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"
               : WEIR_SUMS_64
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The numbers are made before, or read after, this and nowhere else: before products_begin() and
// after products_wait() for what products change, before products_begin() for left operands.
template <int kCount>
__device__ inline void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ inline void pin(uint32_t (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kCount; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// The same rows as swizzled_rows(), of halves, but with the product's columns along a row: 64 of
// them in a panel, the next 64 `panel` bytes on. 16 rows further on: + 16 * 128 bytes.
__device__ inline uint64_t swizzled_columns(uint32_t address, uint32_t panel) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(panel >> 4) << 16 |
         uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
constexpr uint64_t kNextRows = 16 * 128 >> 4;

// sum [64, wide] (+)= a [64, 16] b, of halves, a in the registers of its rows' threads as
// mma.m16n8k16 has it; kAlong: b's columns lie along its rows (swizzled_columns()).
template <bool kAlong>
__device__ inline void multiply_halves(float (&sum)[16], const uint32_t (&a)[4], uint64_t b,
                                       int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.s32 add, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" WEIR_NAMES_32
      "}, {%16,%17,%18,%19}, %20, add, 1, 1, %22;\n}"
      : WEIR_SUMS_32
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(kAlong)));
}
template <bool kAlong>
__device__ inline void multiply_halves(float (&sum)[32], const uint32_t (&a)[4], uint64_t b,
                                       int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.s32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WEIR_NAMES_64
      "}, {%32,%33,%34,%35}, %36, add, 1, 1, %38;\n}"
      : WEIR_SUMS_64
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(kAlong)));
}
template <bool kAlong>
__device__ inline void multiply_halves(float (&sum)[64], const uint32_t (&a)[4], uint64_t b,
                                       int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.s32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" WEIR_NAMES_128
      "}, {%64,%65,%66,%67}, %68, add, 1, 1, %70;\n}"
      : WEIR_SUMS_128
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(kAlong)));
}
#undef WEIR_FOUR

#endif  // 9.0a

}  // namespace weir::cuda
