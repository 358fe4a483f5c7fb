#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = 4;  // blocks of a head

__global__ __launch_bounds__(kThreads) void flush_kernel(const __grid_constant__ FlushPending op) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, head = blockIdx.x / kParts;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding) return;
  const int updates = pending_updates(op.rows.first[row], op.rows.written[row], head);
  if (updates == 0) return;
  const int K = op.layout.key_dim, values = op.layout.values, each = values / op.layout.groups;
  const float* const decay = at(op.pending, slot) + int64_t(head) * op.layout.floats();
  const float* const keys = decay + op.layout.key_at(0);
  const float* const added = decay + op.layout.value_at(0);
  const int update = op.layout.update_floats();
  float* const state = at(op.state, slot) + int64_t(head) * values * K;
  for (int i = blockIdx.x % kParts * kThreads + threadIdx.x; i < values * K;
       i += kParts * kThreads) {
    const int v = i / K, c = v / each * K + i % K;
    float x = state[i] * decay[c];
    for (int u = 0; u < updates; ++u) x += added[u * update + v] * keys[u * update + c];
    state[i] = x;
  }
}

}  // namespace

void run(const FlushPending& op, Context& context) {
  if (op.rows.count == 0) return;
  launch(context, {.grid = dim3(op.heads * kParts, op.rows.count), .block = dim3(kThreads)},
         flush_kernel, op);
}

}  // namespace weir::cuda
