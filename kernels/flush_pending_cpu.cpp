#include "kernels/cpu.h"

namespace weir::cpu {

void add_pending(const PendingLayout& layout, int32_t updates, const float* pending, float* S) {
  const int64_t K = layout.key_dim;
  const int32_t each = layout.values / layout.groups;
  for (int32_t v = 0; v < layout.values; ++v) {
    const int64_t group = v / each * K;
    for (int64_t c = 0; c < K; ++c) {
      double x = double(S[v * K + c]) * double(pending[group + c]);
      for (int32_t i = 0; i < updates; ++i) {
        x += double(pending[layout.value_at(i) + v]) *
             double(pending[layout.key_at(i) + group + c]);
      }
      S[v * K + c] = float(x);
    }
  }
}

void run(const FlushPending& op, const Context&) {
  const int64_t floats = int64_t(op.layout.values) * op.layout.key_dim;
  for (int32_t r = 0; r < op.rows.count; ++r) {
    const Slot slot = op.rows.slot[r];
    if (slot == kPadding) continue;
    for (int32_t h = 0; h < op.heads; ++h) {
      const int32_t updates = pending_updates(op.rows.first[r], op.rows.written[r], h);
      if (updates == 0) continue;
      add_pending(op.layout, updates, op.pending.at(slot) + h * op.layout.floats(),
                  op.state.at(slot) + h * floats);
    }
  }
}

}  // namespace weir::cpu
