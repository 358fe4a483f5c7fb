#include "engine/snapshots.h"

#include <algorithm>

#include "kernels/check.h"

namespace weir {

Admission SnapshotLedger::check(const Request& request) const {
  if (request.start_from != kNoSnapshot) {
    const auto found = kept.find(request.start_from);
    if (found == kept.end()) return Admission::UnknownSnapshot;
    const std::vector<Token>& read = found->second;
    // At least one token must be left to read: a state has no logits.
    const bool fits = read.size() < request.prompt.size() &&
                      std::equal(read.begin(), read.end(), request.prompt.begin());
    const bool ahead =
        request.snapshots.empty() || request.snapshots.front() > int64_t(read.size());
    if (!fits || !ahead) return Admission::BadSnapshot;
  }
  return int64_t(request.snapshots.size()) > free ? Admission::NoSnapshotFree
                                                  : Admission::Accepted;
}

Snapshots::Snapshots(Slot first, int32_t count) : ledger_{.free = count, .kept = {}} {
  for (int32_t i = count; i-- > 0;) free_.push_back(first + i);
}

Slot Snapshots::promise() {
  WEIR_CHECK(!free_.empty());
  const Slot slot = free_.back();
  free_.pop_back();
  --ledger_.free;
  return slot;
}

void Snapshots::give_back(Slot promised) {
  free_.push_back(promised);
  ++ledger_.free;
  ++freed_;
}

SnapshotId Snapshots::keep(Slot promised, std::span<const Token> read) {
  const SnapshotId id = ++last_;
  slot_of_[id] = promised;
  frozen_[promised] = {.owned = true};
  ledger_.kept[id].assign(read.begin(), read.end());
  return id;
}

void Snapshots::drop(SnapshotId id) {
  const auto found = slot_of_.find(id);
  if (found == slot_of_.end()) return;
  const Slot slot = found->second;
  slot_of_.erase(found);
  ledger_.kept.erase(id);
  frozen_.at(slot).owned = false;
  leave(slot);
}

Slot Snapshots::begin_reading(SnapshotId id) {
  const Slot slot = slot_of_.at(id);
  ++frozen_.at(slot).readers;
  return slot;
}

void Snapshots::end_reading(Slot slot) {
  --frozen_.at(slot).readers;
  leave(slot);
}

void Snapshots::leave(Slot slot) {
  const Frozen& frozen = frozen_.at(slot);
  if (frozen.owned || frozen.readers > 0) return;
  frozen_.erase(slot);
  give_back(slot);
}

std::vector<Slot> Snapshots::at_rest() const {
  std::vector<Slot> slots = free_;
  for (const auto& [slot, frozen] : frozen_) slots.push_back(slot);
  return slots;
}

}  // namespace weir
