#include "kernels/outer_chunk_cuda.cuh"

#include <algorithm>
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

// How many values a block takes. Two heads of 64 that read the same keys and queries are taken
// together; the fewer rows there are, the thinner the slices: a block for each multiprocessor.
int slice_of(const OuterStep& op, const Context& context) {
  if (op.normalise) return op.value_dim;
  using Decay = OuterStep::Decay;
  const bool channels = op.decay == Decay::PerKey || op.decay == Decay::PerValue;
  const auto shared_by_two = [&](int heads) {
    return op.heads % heads == 0 && op.heads / heads % 2 == 0;
  };
  const bool pairs = op.value_dim == 64 && !channels && op.value_heads == op.heads &&
                     shared_by_two(op.key_heads) && shared_by_two(op.query_heads);
  const int rows = std::clamp(op.rows.tokens / (kOuterStepsMost + 1), 1, op.rows.count);
  int slice = 128;
  const auto fits = [&] { return op.value_dim % slice == 0 || (pairs && slice == 128); };
  const auto idle = [&] {
    return int64_t(rows) * op.heads * op.value_dim / slice * 2 <= context.multiprocessors;
  };
  while (slice > 16 && (!fits() || idle())) slice /= 2;
  return slice;
}

}  // namespace
}  // namespace adding

bool run_chunks(const OuterStep& op, Context& context) {
  if (!adding::served(op, context)) return false;
  const auto start = op.normalise                             ? adding::start_sum
                     : op.decay == OuterStep::Decay::PerKey   ? adding::start_key
                     : op.decay == OuterStep::Decay::PerValue ? adding::start_value
                                                              : adding::start_head;
  start(op, context, adding::slice_of(op, context));
  return true;
}

}  // namespace weir::cuda
