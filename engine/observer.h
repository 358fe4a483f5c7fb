#pragma once
#include <cstddef>
#include <cstdint>

namespace weir {

// What one step did, and how things stand after it.
struct StepReport {
  // From when it was asked for, or the step before it was done, to its answers: the sum over steps
  // is the time in which anything was computed. The host's part is included.
  double seconds = 0;
  double waited = 0;               // of these, the engine's thread had nothing to do
  int32_t decode_rows = 0, prompt_rows = 0;
  int32_t decode_tokens = 0, prompt_tokens = 0;  // in vain, too: its sequence had just ended
  int32_t drawn = 0;               // tokens drawn
  int32_t admitted = 0;            // sequences that took a slot
  int32_t finished = 0;            // sequences that gave one back
  int32_t zeroed = 0;              // sequences that started from zero
  int32_t restored = 0;            // sequences that started from a snapshot
  int32_t kept = 0;                // states copied to be kept
  size_t bytes = 0;                // what the step had to move at least (kernels/cost.cpp)
};

struct Occupancy {
  int32_t waiting = 0, running = 0;
  int32_t slots = 0, free_slots = 0;
  int32_t pages = 0, free_pages = 0;
  int32_t snapshots = 0, free_snapshots = 0;  // slots of their own; promised ones are not free

  bool operator==(const Occupancy&) const = default;
};

// Told, never asked: nothing in the core reads back. Called on the engine thread; must not block.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_step(const StepReport& report) = 0;
  // Whenever it changed, also when no step follows.
  virtual void on_occupancy(const Occupancy& occupancy) = 0;
};

}  // namespace weir
