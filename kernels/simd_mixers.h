#pragma once
#include <cstdint>

#include "kernels/types.h"

namespace weir {

// The delta rule of one value head over some tokens, S of [value_dim, key_dim]:
//   u = v - S erase;  S = S diag(decay) + u k';  out = S q
// or, when what is taken out has a direction of its own,
//   r = S erase;  S = S diag(decay) + v k' - r remove';  out = S q
// where the caller has multiplied the decay and the erase gate into `erase`, the write gate into v,
// and every scale into q and k.
struct DeltaBlock {
  int32_t key_dim = 0, value_dim = 0, tokens = 0;
  int64_t key_stride = 0, value_stride = 0;  // from one token's vectors to the next one's
  float* state = nullptr;                    // [value_dim, key_dim]
  bool fresh = false;                        // reads as zeros, whatever it holds
  const float* q = nullptr;                  // [tokens, key_stride]; likewise the next four
  const float* k = nullptr;
  const float* decay = nullptr;              // exp g
  const float* erase = nullptr;
  const float* remove = nullptr;             // or null
  const float* v = nullptr;                  // [tokens, value_stride]
  float* out = nullptr;                      // [tokens, value_stride]
  float* emitted = nullptr;                  // [tokens, emitted_stride]: u, or null
  int64_t emitted_stride = 0;
};

// exp of the log decay: g = -a softplus(x + bias), or lower_bound * sigmoid(a (x + bias)).
struct DecayBlock {
  const float* x = nullptr;
  const float* bias = nullptr;
  float a = 0, lower_bound = 0;  // < 0 selects the bounded gate
};

// out = rms(in) * weight [* activation(gate)].
struct GatedNorm {
  const float* in = nullptr;
  const float* weight = nullptr;
  float eps = 0;
  const float* gate = nullptr;   // or null
  Activation activation = Activation::None;
  float* out = nullptr;
};

// Some queries of one token, and keys that all of them see. A softmax runs over all the blocks of
// positions that a token sees: `most` begins at minus infinity, `total` and `out` at zero, and the
// answer is out / total.
struct AttentionBlock {
  static constexpr int kCount = 64;          // most positions at once

  int32_t dim = 0, queries = 0, count = 0;
  const float* const* keys = nullptr;        // [count] pointers to [dim]
  int64_t values_after = 0;                  // floats from a position's key to its value
  float scale = 0;
  // A score is scale * q . key [* key_scale of its position] [+ bias of its query and position].
  const float* key_scale = nullptr;          // [count], or null
  const float* bias = nullptr;               // [queries, kCount], or null
  const float* q = nullptr;                  // [queries, dim]
  float* most = nullptr;                     // [queries]
  float* total = nullptr;                    // [queries]
  float* out = nullptr;                      // [queries, dim]
};

// The inner loops of DeltaMix, Attention and Sample.
struct MixerSimd {
  static constexpr int kTaps = 8;  // most inputs of one convolve()

  void (*prefetch)(const float* from, int64_t count);
  // turned[j][c] = taps[c][j]; rows of `turned` lie `channels` apart.
  void (*turn_taps)(const float* taps, int32_t width, int64_t channels, float* turned);
  // y[c] = start[c] + sum over the inputs j of taps[j][c] * x[j][c], where rows of taps lie
  // taps_stride apart; start null: zeros.
  void (*convolve)(const float* const* x, int32_t inputs, const float* taps, int64_t taps_stride,
                   const float* start, float* y, int64_t channels);
  void (*activate)(Activation activation, float* x, int64_t count);              // in place
  void (*multiply)(float* x, const float* by, float scale, int64_t count);       // x *= by * scale
  float (*squares)(const float* x, int64_t count);
  float (*sum)(const float* x, int64_t count);
  void (*scale)(float* x, float by, int64_t count);
  void (*decay)(const DecayBlock& block, float* out, int64_t count);
  void (*exp)(const float* x, float* out, int64_t count);                        // of x <= 0
  void (*delta)(const DeltaBlock& block);
  void (*gated_norm)(const GatedNorm& norm, int64_t count);
  void (*attention)(const AttentionBlock& block);
  // The largest number; NaN when one of them is NaN or plus infinity.
  float (*largest)(const float* x, int64_t count);
  // Sum of exp((x - shift) / divisor).
  double (*exp_sum)(const float* x, float shift, float divisor, int64_t count);
};

}  // namespace weir
