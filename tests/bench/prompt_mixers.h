#pragma once
#include "kernels/op.h"

// The mixers that prefill_bench times: their names and shapes. Not the engine's of these names.
namespace weir::prompts {

struct SwilaMixer {
  const char* name;
  bool gated, temporal;
  int32_t heads = 16;
  int32_t decoding = 0;  // rows of one token in the same step
};

struct Mixer {
  const char* name;
  Decay decay;
  bool erase, gate;
  int32_t heads = 16, key_dim = 128, value_dim = 128;
  int32_t decoding = 0;
};

struct Softmax {
  const char* name;
  int32_t heads, kv_heads, head_dim;
  bool forgets = false;
};

// The recurrence that only adds, without what comes before and after it.
struct Adder {
  const char* name;
  OuterStep::Decay decay;
  int32_t heads, key_heads, key_dim, value_dim;
  bool scaled = false;   // values times a number each, and a skip: Mamba-2
  int32_t decoding = 0;
};

// RWKV-7's recurrence, likewise.
struct Eraser {
  const char* name;
  int32_t heads, key_dim, value_dim;
};

struct Convolution {
  const char* name;
  int32_t channels;
};

}  // namespace weir::prompts
