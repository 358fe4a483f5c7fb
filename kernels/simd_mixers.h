#pragma once

namespace weir {

// The inner loops of DeltaMix and Attention.
struct MixerSimd {};

}  // namespace weir
