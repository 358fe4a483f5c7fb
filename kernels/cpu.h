#pragma once
#include "kernels/op.h"
#include "kernels/simd.h"
#include "kernels/thread_pool.h"

namespace weir::cpu {

// How an op runs: on which threads, with which instruction set, or plainly: as its formula reads,
// on the calling thread, using neither.
struct Context {
  ThreadPool& pool;
  const SimdTable& simd;
  bool plain = false;
};

// With one context, a token's result depends on its own inputs alone, bit for bit: neither on the
// other tokens of the call nor on the number of threads.
void run(const Embed& op, const Context& context);
void run(const RmsNorm& op, const Context& context);
void run(const Linear& op, const Context& context);
void run(const Conv1d& op, const Context& context);
void run(const TokenShift& op, const Context& context);
void run(const Rotary& op, const Context& context);
void run(const Elementwise& op, const Context& context);
void run(const FeatureMap& op, const Context& context);
void run(const HeadDot& op, const Context& context);
void run(const HeadNorm& op, const Context& context);
void run(const OuterStep& op, const Context& context);
void run(const MemoryRoute& op, const Context& context);
void run(const MemoryMerge& op, const Context& context);
void run(const DeltaMix& op, const Context& context);
void run(const EraseStep& op, const Context& context);
void run(const SwilaMix& op, const Context& context);
void run(const Attention& op, const Context& context);
void run(const DepthAttention& op, const Context& context);
void run(const Swiglu& op, const Context& context);
void run(const ValueRoute& op, const Context& context);
void run(const RouteSignal& op, const Context& context);
void run(const FlushPending& op, const Context& context);
void run(const Gather& op, const Context& context);
void run(const Sample& op, const Context& context);

// Adds so many updates that wait of a head to its state S (pending.h).
void add_pending(const PendingLayout& layout, int32_t updates, const float* pending, float* S);

// The vectorised, threaded versions of the ops whose plain one is the oracle; run() chooses.
void run_fast(const DeltaMix& op, const Context& context);
void run_fast(const Attention& op, const Context& context);
void run_fast(const Sample& op, const Context& context);

}  // namespace weir::cpu
