#pragma once
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/request.h"

namespace weir {

// Which snapshots there are, as one who asks for more of them sees it.
struct SnapshotLedger {
  int32_t free = 0;  // slots that are neither kept nor promised to a request
  std::unordered_map<SnapshotId, std::vector<Token>> kept;  // the tokens that each has read

  // Whether a request that check() accepts finds what it names.
  Admission check(const Request& request) const;
};

// The frozen slots: those behind the sequences' own, which hold what a prompt's beginning has left
// and which nobody writes while somebody may still start from them. A slot is free, then promised
// to a request that names a position, then a snapshot; it is free again when its owner has let go
// of it and every sequence that starts from it has done so.
class Snapshots {
 public:
  Snapshots(Slot first, int32_t count);

  const SnapshotLedger& ledger() const { return ledger_; }
  int64_t freed() const { return freed_; }  // slots that became free again, since the start

  Slot promise();                // one must be free
  void give_back(Slot promised);
  SnapshotId keep(Slot promised, std::span<const Token> read);
  void drop(SnapshotId id);      // by its owner; unknown ids are fine

  // Between the two the slot stays as it is, dropped or not.
  Slot begin_reading(SnapshotId id);
  void end_reading(Slot slot);

  // Each slot that is free or kept, once.
  std::vector<Slot> at_rest() const;

 private:
  struct Frozen {
    int32_t readers = 0;
    bool owned = false;
  };
  void leave(Slot slot);

  SnapshotLedger ledger_;
  std::vector<Slot> free_;
  std::unordered_map<SnapshotId, Slot> slot_of_;   // owned ones
  std::unordered_map<Slot, Frozen> frozen_;
  SnapshotId last_ = kNoSnapshot;
  int64_t freed_ = 0;
};

}  // namespace weir
