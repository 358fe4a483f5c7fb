#pragma once
#include <vector>

#include "kernels/cuda_util.cuh"

// A decode step of few tokens as one kernel that stays on every multiprocessor: its phases are the
// linear layers, with the norm before each and the SwiGLU after it folded in, and the delta-rule
// mixers between them.
namespace weir::cuda::resident {

constexpr int kTokensMost = 4;
constexpr int kColumnsMost = 5632;  // of a linear layer: its x stays in registers
constexpr int kNormedMost = 2048;   // columns, where a norm is folded in
constexpr int kKeysMost = 128, kValuesMost = 512;  // of a mixer's head
constexpr int kWarps = 16;                         // that compute
constexpr int kSlabs = 3;

// y = W f(x), f nothing or a norm: over groups of `group` columns, times weight, times a gate that
// an earlier phase has activated.
struct LinearPhase {
  // Rows of the stacked matrices that lie next to each other.
  struct Slab {
    const char* data = nullptr;   // bf16 [rows, in]
    const float* bias = nullptr;  // [rows], or null
    int rows = 0;
  };
  const float* x = nullptr;
  float* y = nullptr;
  const int32_t* index = nullptr;  // x's token for each of y's; null: the same
  Slab slab[kSlabs];
  const float* weight = nullptr;   // of the norm, [group]
  const float* gate = nullptr;     // [tokens, in], or null
  float* normed = nullptr;         // receives f(x), or null
  int x_stride = 0, y_stride = 0, gate_stride = 0, normed_stride = 0;
  int in = 0, rows = 0, tokens = 0;
  int group = 0;                   // 0: no norm
  float eps = 0;
  int activated = 0, activated_end = 0;  // rows of y that become activation(y)
  Activation activation = Activation::Sigmoid;  // or Silu
  bool accumulate = false;
  bool paired = false;  // y = silu(upper half of the rows) * lower half
  bool waits = true;    // for the phase before; false: it reads nothing of that
};

// What one launch runs.
struct Table {
  static constexpr int kLinear = 256, kMix = 64, kPhases = kLinear + kMix;
  LinearPhase linear[kLinear];
  DeltaMix mix[kMix];          // answers are left without their norm: the next phase's f
  bool is_mix[kPhases] = {};
  int phases = 0;
  bool keep_low = true;        // x as high + low bf16, or high alone
};

// Where the blocks of a launch meet; zeros at first.
struct Meeting {
  static constexpr int kBlocks = 256;
  uint32_t arrived = 0;        // blocks, once for each phase
  uint32_t space[31] = {};     // a cache line of its own
  uint32_t done[kBlocks] = {}; // `arrived` after a block's last phase, for its next launch
};

// On the device; null where the kernel cannot run.
Meeting* make_meeting(const Context& context);

// The device's copies of a program's tables, one for each launch. A program that has not changed
// uses them again; so does its graph.
class Tables {
 public:
  ~Tables();
  void begin() { next_ = 0; }
  // `changed`: the program is a new one.
  const Table* put(const Table& table, bool changed, cudaStream_t stream);

 private:
  std::vector<void*> memory_;
  size_t next_ = 0;
};

// Runs as many of the `count` ops from `first` on as this kernel knows; returns how many, 0: none.
int run(const Op* first, int count, Context& context);

// Starts the kernel; the table is the device's.
void start(const Table* table, Context& context);

}  // namespace weir::cuda::resident
