#include "engine/deferred_writes.h"

#include <algorithm>

#include "engine/lower.h"

namespace weir {
namespace {

// Without rows.
Program flushes_of(const Program& program) {
  Program flushes;
  for (const Op& op : program) {
    std::visit(
        [&](const auto& one) {
          if constexpr (requires { pending_layout(one); }) {
            if (one.pending.data == nullptr) return;
            flushes.push_back(FlushPending{.heads = pending_heads(one),
                                           .layout = pending_layout(one),
                                           .state = one.state,
                                           .pending = one.pending});
          }
        },
        op);
  }
  return flushes;
}

}  // namespace

bool defers_writes(const ModelSpec& spec, int32_t slots, const Backend& backend) {
  const int32_t rows = std::min(slots, 64);  // as good as any other count of many
  Workspace measure;
  return backend.defers_writes(lower(spec, weight_shapes(spec), nullptr,
                                     {.slots = rows, .step_tokens = rows}, {}, {rows, rows, rows},
                                     measure));
}

bool keep_deferred(Program& program, const Backend& backend) {
  if (flushes_of(program).empty()) return false;
  if (backend.defers_writes(program)) return true;
  for (Op& op : program) {
    std::visit(
        [](auto& one) {
          if constexpr (requires { pending_layout(one); }) one.pending = {};
        },
        op);
  }
  return false;
}

DeferredWrites::DeferredWrites(const Model& model, const StatePool& pool, const Limits& limits)
    : written_(size_t(limits.slots) + size_t(limits.snapshots)) {
  Workspace measure;
  if (pool.defers_writes()) {
    flush_ = flushes_of(lower(model.spec, model.weights, &pool, limits, {}, {1, 1, 1}, measure));
  }
}

bool DeferredWrites::advance(std::span<const Row> rows, bool defers, int32_t* written,
                             int32_t* flushed) {
  bool any = false;
  for (size_t r = 0; r < rows.size(); ++r) {
    const Row& row = rows[r];
    int32_t& now = written_[size_t(row.slot)];
    const bool reads = defers && row.count == 1;
    const bool flushes = !reads && row.first > 0 && updates_wait(row.first, now);
    flushed[r] = flushes ? now : row.first;
    if (flushes || row.first == 0) now = row.first;
    written[r] = now;
    if (!reads) now = row.first + row.count;
    any |= flushes;
  }
  return any;
}

const Program& DeferredWrites::flush(const Rows& rows) {
  for (Op& op : flush_) std::get<FlushPending>(op).rows = rows;
  return flush_;
}

}  // namespace weir
