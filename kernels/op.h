#pragma once
#include <variant>
#include <vector>

#include "kernels/attention.h"
#include "kernels/delta_mix.h"
#include "kernels/depth_attention.h"
#include "kernels/elementwise.h"
#include "kernels/embed.h"
#include "kernels/erase_step.h"
#include "kernels/feature_map.h"
#include "kernels/flush_pending.h"
#include "kernels/gather.h"
#include "kernels/head_dot.h"
#include "kernels/head_norm.h"
#include "kernels/linear.h"
#include "kernels/memory_merge.h"
#include "kernels/memory_route.h"
#include "kernels/outer_step.h"
#include "kernels/rms_norm.h"
#include "kernels/rotary.h"
#include "kernels/route_signal.h"
#include "kernels/sample.h"
#include "kernels/conv1d.h"
#include "kernels/swiglu.h"
#include "kernels/swila_mix.h"
#include "kernels/token_shift.h"
#include "kernels/value_route.h"

namespace weir {

// Everything a backend can be asked to do, as plain data. A step is a list of these.
using Op = std::variant<Embed, RmsNorm, Linear, Conv1d, TokenShift, Rotary, Elementwise,
                        FeatureMap, HeadNorm, DeltaMix, EraseStep, SwilaMix, OuterStep, Attention,
                        DepthAttention, MemoryRoute, MemoryMerge, Swiglu, HeadDot, ValueRoute,
                        RouteSignal, FlushPending, Gather, Sample>;
using Program = std::vector<Op>;

// The floor of an op: each input read once, each output written once; multiply and add count two.
// Activations are left out: they stay in cache.
struct Cost {
  size_t bytes = 0, flops = 0;
  Cost& operator+=(const Cost& other) {
    bytes += other.bytes;
    flops += other.flops;
    return *this;
  }
};
Cost cost(const Op& op);
Cost cost(const Program& program);

const char* name(const Op& op);

}  // namespace weir
