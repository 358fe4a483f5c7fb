#include "kernels/outer_chunk_cuda.cuh"

#include <initializer_list>

#include "kernels/outer_chunk_layout.cuh"

namespace weir::cuda {
namespace adding {
namespace {

bool served(const OuterStep& op, const Context& context) {
  using Decay = OuterStep::Decay;
  const auto aligned = [](const Acts& acts) {
    return reinterpret_cast<uintptr_t>(acts.data) % 16 == 0 && acts.stride % 4 == 0;
  };
  const bool per_key = op.decay == Decay::PerKey, per_value = op.decay == Decay::PerValue;
  const auto among = [](int dim, std::initializer_list<int> dims) {
    return std::find(dims.begin(), dims.end(), dim) != dims.end();
  };
  const bool sizes = among(op.key_dim, {64, 128, 256}) && op.value_dim % 16 == 0 &&
                     op.query_heads <= op.heads;
  const bool inputs = aligned(op.q) && aligned(op.k) && aligned(op.v) &&
                      (!(per_key || per_value) || (aligned(op.log_decay) && !op.v_scale)) &&
                      !(per_value && op.skip != nullptr) &&
                      aligned({op.state.data, op.state.stride}) &&
                      aligned({op.sums.data, op.sums.stride});
  // The sum of keys belongs to all values of a head, and so to one block.
  const bool sum = !op.normalise || (op.decay == Decay::None && !op.v_scale &&
                                     among(op.value_dim, {64, 128}));
  return context.compute >= 90 && sizes && inputs && sum;
}

// How many values a block takes, at most. Two heads of 64 that read the same keys and queries are
// taken together.
int widest_slice(const OuterStep& op) {
  if (op.normalise) return op.value_dim;
  using Decay = OuterStep::Decay;
  const bool channels = op.decay == Decay::PerKey || op.decay == Decay::PerValue;
  const auto shared_by_two = [&](int heads) {
    return op.heads % heads == 0 && op.heads / heads % 2 == 0;
  };
  const bool pairs = op.value_dim == 64 && !channels && op.value_heads == op.heads &&
                     shared_by_two(op.key_heads) && shared_by_two(op.query_heads);
  int slice = 128;
  while (op.value_dim % slice != 0 && !(pairs && slice == 128)) slice /= 2;
  return slice;
}

// How the op is shared out over the machine.
struct Shares {
  int slice;
  Segments segments;
};

// Rows are cut where four or more segments of each find room at once and have 128 tokens or more:
// keys and values are read twice then. Otherwise the fewer rows there are, the thinner the slices:
// a block for each multiprocessor.
Shares shares_of(const OuterStep& op, const Context& context) {
  constexpr int kLeastTokens = 128, kLeastSegments = 4;
  Shares shares{widest_slice(op), {}};
  const auto blocks = [&](int64_t rows) { return rows * op.heads * op.value_dim / shares.slice; };
  const int64_t all = most_long_rows(op.rows, kOuterStepsMost);
  const int64_t prompts = likely_long_rows(op.rows, kOuterStepsMost, kLeastTokens);
  const int64_t room = int64_t(op.key_dim > 128 ? 1 : 2) * context.multiprocessors;
  const int64_t longest = op.rows.tokens - op.rows.count + 1;
  const int64_t most = std::min(room / blocks(prompts), longest / kLeastTokens);
  const int64_t tokens = most < kLeastSegments
                             ? 0
                             : (longest + most * kTokens - 1) / (most * kTokens) * kTokens;
  if (tokens > 0) {
    const int64_t ends = op.rows.tokens / tokens + op.rows.count;
    const int64_t floats = ends * blocks(1) * end_floats(op.key_dim, shares.slice);
    if (size_t(floats) * sizeof(float) <= 2 * context.half_bytes) {
      shares.segments = {.tokens = int(tokens), .most = int((longest + tokens - 1) / tokens),
                         .ends = static_cast<float*>(context.scratch)};
      return shares;
    }
  }
  const bool thin = !op.normalise;
  while (thin && shares.slice > 16 && 2 * blocks(all) <= context.multiprocessors) {
    shares.slice /= 2;
  }
  return shares;
}

// A thread has four neighbouring numbers of a block's part of a state; `pieces` of kPassThreads
// threads have all. Floor: the ends read once and written once, from the L2 cache as a rule.
constexpr int kPassThreads = 256;

struct Numbers {
  float4 end, decay;

  __device__ void load(const OuterStep& op, const float* ends, int i, int slice) {
    using Decay = OuterStep::Decay;
    end = *reinterpret_cast<const float4*>(ends + i);
    const float* const decays = ends + slice * op.key_dim + op.key_dim;
    const int value = i / op.key_dim;
    if (op.decay == Decay::PerKey) {
      decay = *reinterpret_cast<const float4*>(decays + i % op.key_dim);
    } else {
      const float whole = op.decay == Decay::None ? 1.0f
                                                  : decays[op.decay == Decay::PerValue
                                                               ? value
                                                               : value / op.value_dim];
      decay = {whole, whole, whole, whole};
    }
  }
};

__global__ __launch_bounds__(kPassThreads) void pass_segments_kernel(
    const __grid_constant__ OuterStep op, Segments segments, int slice, int pieces) {
  let_successor_start();
  const int row = long_row(op.rows, blockIdx.y, kOuterStepsMost);
  wait_for_predecessor();
  if (row < 0) return;
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  const Slot slot = op.rows.slot[row];
  const int last = (count + segments.tokens - 1) / segments.tokens;
  if (slot == kPadding || count <= kOuterStepsMost || last == 1) return;
  const int block = int(blockIdx.x) / pieces, K = op.key_dim, states = slice * K;
  const int i = 4 * (int(blockIdx.x) % pieces * kPassThreads + int(threadIdx.x));
  if (i >= states + (op.normalise ? K : 0)) return;
  float* const kept = i < states ? at(op.state, slot) + int64_t(block) * states + i
                                 : at(op.sums, slot) + int64_t(block) * K + i - states;
  const int64_t floats = end_floats(K, slice), blocks = gridDim.x / pieces;
  float* ends = segments.ends +
                (int64_t(begin / segments.tokens + row) * blocks + block) * floats;
  float4 state = op.rows.first[row] == 0 ? float4{0, 0, 0, 0} : *reinterpret_cast<float4*>(kept);
  constexpr int kTogether = 4;
  for (int n = 0; n < last; n += kTogether, ends += kTogether * blocks * floats) {
    Numbers numbers[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (n + j < last) numbers[j].load(op, ends + j * blocks * floats, i, slice);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (n + j >= last) break;
      *reinterpret_cast<float4*>(ends + j * blocks * floats + i) = state;
      state = plus(times(state, numbers[j].decay), 1.0f, numbers[j].end);
    }
  }
  *reinterpret_cast<float4*>(kept) = state;
}

}  // namespace

void pass_segments(const OuterStep& op, Context& context, int slice, const Segments& segments) {
  const int numbers = slice * op.key_dim + (op.normalise ? op.key_dim : 0);
  const int pieces = (numbers / 4 + kPassThreads - 1) / kPassThreads;
  const int blocks = op.heads * op.value_dim / slice;
  launch(context,
         {.grid = dim3(blocks * pieces, most_long_rows(op.rows, kOuterStepsMost)),
          .block = dim3(kPassThreads)},
         pass_segments_kernel, op, segments, slice, pieces);
}

}  // namespace adding

bool run_chunks(const OuterStep& op, Context& context) {
  if (!adding::served(op, context)) return false;
  const auto start = op.normalise                             ? adding::start_sum
                     : op.decay == OuterStep::Decay::PerKey   ? adding::start_key
                     : op.decay == OuterStep::Decay::PerValue ? adding::start_value
                                                              : adding::start_head;
  const auto [slice, segments] = adding::shares_of(op, context);
  start(op, context, slice, segments);
  return true;
}

}  // namespace weir::cuda
