#pragma once
#include <vector>

#include "kernels/cuda_util.cuh"

// A decode step of few tokens as one kernel that stays on every multiprocessor: its phases are the
// linear layers, with the norm before each and the SwiGLU after it folded in, and the mixers of the
// delta rule and of SwiLA between them.
namespace weir::cuda::resident {

constexpr int kTokensMost = 4;
constexpr int kColumnsMost = 1 << 15;  // of a linear layer
constexpr int kNarrowMost = 128;      // columns, of a layer that shares a phase
constexpr int kNormedMost = 2048;   // columns, where a norm is folded in
constexpr int kSwilaMost = 256;          // numbers of a state's row, of all mixtures
constexpr int kKeysMost = 128, kValuesMost = 512;  // of a mixer's head
constexpr int kWarps = 16;                         // that compute
constexpr int kSlabs = Linear::kParts;

// y = W f(x), f nothing or a norm: over groups of `group` columns, times weight, times a gate that
// an earlier phase has activated. What an earlier phase of the launch has left lies in the
// meeting's words (below), in those of even launches; the rest where the program has it.
struct LinearPhase {
  // Rows of the stacked matrices that lie next to each other.
  struct Slab {
    const char* data = nullptr;   // bf16 [rows, in]
    const float* bias = nullptr;  // [rows], or null
    int rows = 0;
  };
  const float* x = nullptr;
  const int32_t* index = nullptr;  // x's token for each of y's; null: the same
  Slab slab[kSlabs];
  const float* weight = nullptr;   // of the norm, [group]
  const float* gate = nullptr;     // [tokens, in], left by an earlier phase; or null
  const float* base = nullptr;     // [tokens, rows], what is added to; or null
  float* left = nullptr;           // receives y for later phases, or null: none reads it
  float* y = nullptr;              // for after the launch, or null: a later phase overwrites it
  float* normed = nullptr;         // receives f(x), or null
  int x_stride = 0, gate_stride = 0, base_stride = 0;
  int left_stride = 0, y_stride = 0, normed_stride = 0;
  int in = 0, rows = 0, tokens = 0;
  int group = 0;                   // 0: no norm
  int groups_a_run = 0;            // 32 / group, times 2^16
  int norm_lanes = 0, norm_runs = 0;  // whose squares are added up; runs of 32 of a group
  bool by_rows = false;            // the group is all of x, and there is no gate
  float eps = 0, share = 0;        // of the norm; 1 / group
  bool biased = false;             // some slab is
  int activated = 0, activated_end = 0;  // rows of y that become activation(y)
  Activation activation = Activation::Sigmoid;  // or Silu
  bool paired = false;             // y = silu(upper half of the rows) * lower half
  bool keep_low = true;            // x as high + low bf16, or high alone
  bool x_left = false, base_left = false;  // by an earlier phase
};

// Linear layers of few columns that do not read each other's answers; their x is left by earlier
// phases.
struct NarrowPhase {
  static constexpr int kLayers = 4;
  struct Layer {
    const float* x = nullptr;
    const char* weights = nullptr;  // bf16 [rows, in]
    const float* bias = nullptr;    // [rows], or null
    float *left = nullptr, *y = nullptr;  // as in LinearPhase
    int x_stride = 0, left_stride = 0, y_stride = 0;
    int rows = 0;                   // a multiple of 8
    bool activates = false;         // y becomes activation(y)
    Activation activation = Activation::Sigmoid;  // or Silu
  };
  Layer layer[kLayers];
  int layers = 0, in = 0, tokens = 0;
  int tiles = 0;                    // of eight rows, of all layers
  bool keep_low = true;
};

// What one launch runs. A mixer reads and writes words that are left; its answers are without their
// norm, which is the next phase's f.
struct Table {
  static constexpr int kLinear = 256, kMix = 64, kNarrow = 64, kPhases = kLinear + kMix;
  enum class Kind : uint8_t { Linear, Narrow, Delta, Swila };
  LinearPhase linear[kLinear];
  NarrowPhase narrow[kNarrow];
  DeltaMix delta[kMix];
  SwilaMix swila[kMix];
  Kind kind[kPhases] = {};
  int phases = 0;
  int words = 0;               // that are left
};

// Where the phases of a launch leave what later ones read. A word says by itself whether it has
// been written: every number has a place of its own in a launch, and that held kUnwritten before.
// So nobody counts blocks, no store waits for another one, and whoever needs a number reads its
// place until it is there. One half of the words is a launch's; the other, which the launch before
// has used, it makes unwritten again.
struct Meeting {
  static constexpr uint32_t kUnwritten = 0xffffffffu;  // a NaN that no phase leaves
  static constexpr int kBlocks = 256, kWords = 3 << 20;
  uint32_t launches[kBlocks] = {};  // ever, of each block
  int used[2] = {};                 // words of each half, by the last launch that had it
  alignas(128) float words[2][kWords];
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
