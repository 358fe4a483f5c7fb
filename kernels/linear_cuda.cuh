#pragma once
#include "kernels/cuda_util.cuh"

namespace weir::cuda {

// From this many tokens on, cuBLASLt takes the large parts of a Linear, but for what the kernels
// for Hopper take: see kHopperTokens and suits_prompt().
inline constexpr int kLargeTokens = 17;

// Up to so many tokens the kernels for Hopper read the weights once.
inline constexpr int kHopperTokens = 128;

// x as bf16 in the scratch; nothing to do if the op before left it.
SplitVectors split(const Acts& x, int in, int tokens, Context& context);

int total_rows(const Linear& op);
void run_small(const Linear& op, Context& context);  // any Linear
// The op after a Linear, done in the same kernel: none, or one of them.
struct Epilogue {
  const Swiglu* gate = nullptr;
  const RmsNorm* norm = nullptr;
  bool split_alone = false;  // what the gate leaves is read as split vectors alone
};
// bf16, 16-byte aligned, few tokens.
void run_hopper(const Linear& op, const Epilogue& epilogue, Context& context);

// Where the sums of squares of split vectors lie, [sums, kHopperTokens], and how many fit.
inline constexpr size_t kSquaresBytes = size_t(1) << 20;
inline constexpr int kSquaresMost = int(kSquaresBytes / sizeof(float) / kHopperTokens);
inline float* squares_of(const Split& split, const Context& context) {
  return reinterpret_cast<float*>(static_cast<char*>(context.scratch) +
                                  (split.half + 1) * context.half_bytes - kSquaresBytes);
}
// A product for many tokens, by the kernel for prompts on Hopper.
struct PromptProduct {
  enum class Leave {
    Exact,  // y = W x, float32
    Added,  // y += W x, float32
    Gated,  // y = silu(W x) * (V x), bf16 without gaps, and what that takes away in `low`, if set
  };
  const void *matrix, *second;  // W, and V of a gate: [rows, in] bf16
  int rows, in, tokens;
  SplitVectors x;
  void *y, *low;   // 16-byte aligned, and so is every token of it
  int64_t stride;  // of y in float32, in numbers
  Leave leave;
};
// Whether it has enough to do for every multiprocessor; all rows of the product, of a gate both.
bool suits_prompt(int rows, int in, int tokens, const Context& context);
void run_prompt(const PromptProduct& product, Context& context);

void run_large(const Linear& op, Context& context);   // bf16, 16-byte aligned
// The same for a gate and its other half, one matrix without biases, and what is made of them,
// which is left split. By run_prompt(), or rounded on the way.
void run_large_gated(const Linear& op, const Swiglu& gate, Context& context);
bool is_one_matrix(const Linear& op);
// Gate and up as run_large_gated() leaves them rounded; out is left split, for a Linear that reads
// it so.
void run_narrow(const Swiglu& op, Context& context);

}  // namespace weir::cuda
