#pragma once
#include <cstdint>

namespace weir {

// One token of one state head of the delta rule, S of [value_dim, key_dim]:
//   S = S diag(decay);  u = write * v - S erase;  S = S + u k';  out = S q
struct DeltaHeadStep {
  int32_t key_dim = 0, value_dim = 0;
  float* state = nullptr;
  const float* q = nullptr;            // [key_dim], scaled; likewise below
  const float* k = nullptr;
  const float* decay = nullptr;        // factors
  const float* decayed_erase = nullptr;  // decay * erase
  const float* written = nullptr;      // [value_dim], write * v
  float* out = nullptr;                // [value_dim]
};

// The inner loops of the mixers. The same table made of plain loops is the oracle.
struct MixerSimd {
  void (*delta_step)(const DeltaHeadStep& step);
  float (*dot)(const float* a, const float* b, int32_t count);
  void (*exp)(float* x, int32_t count);           // in place; likewise below
  void (*silu)(float* x, int32_t count);
  void (*sigmoid)(float* x, int32_t count);
  // out[i] = scale * rows[i] . q, for `count` rows of [dim] one after the other.
  void (*scores)(const float* q, const float* rows, int32_t count, int32_t dim, float scale,
                 float* out);
  // out += sum over i of weights[i] * rows[i], in the order of i.
  void (*weighted_sum)(const float* weights, const float* rows, int32_t count, int32_t dim,
                       float* out);
};

const MixerSimd& plain_mixers();

}  // namespace weir
