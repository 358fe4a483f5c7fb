#include "kernels/delta_chunk_cuda.cuh"

#include <algorithm>

#include "kernels/delta_chunk_layout.cuh"

namespace weir::cuda {
namespace chunk {
namespace {

// What blocks of the chunk kernel could not do for each other's sake: the last inputs of a row
// become its history once all have read the old one; heads whose values lie in several blocks are
// normalised. Rows of few tokens are left alone.
__global__ __launch_bounds__(256) void finish_rows_kernel(const __grid_constant__ DeltaMix op,
                                                          bool norm) {
  const int row = blockIdx.y;
  let_successor_start();
  wait_for_predecessor();
  const Slot slot = op.rows.slot[row];
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  if (slot == kPadding || count <= kStepTokensMost) return;
  const int64_t keys = int64_t(op.key_heads) * op.key_dim;
  const int64_t channels = 2 * keys + int64_t(op.value_heads) * op.value_dim;
  const int kept = op.conv_width - 1;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < kept * channels;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t token = begin + count - kept + i / channels, channel = i % channels;
    const Acts& in = channel < keys ? op.q : channel < 2 * keys ? op.k : op.v;
    const int64_t column = channel < 2 * keys ? channel % keys : channel - 2 * keys;
    at(op.history, slot)[i] = at(in, token)[column];
  }
  if (!norm) return;
  const int warps = gridDim.x * 8, lane = threadIdx.x % 32;
  for (int i = blockIdx.x * 8 + threadIdx.x / 32; i < count * op.value_heads; i += warps) {
    const int64_t token = begin + i / op.value_heads;
    const int64_t column = int64_t(i % op.value_heads) * op.value_dim;
    float* const out = at(op.out, token) + column;
    float squares = 0;
    for (int j = lane; j < op.value_dim; j += 32) squares += out[j] * out[j];
    const float scale =
        1.0f / sqrtf(sum_over_lanes(squares) / float(op.value_dim) + op.norm_eps);
    for (int j = lane; j < op.value_dim; j += 32) {
      float y = out[j] * scale * op.norm_weight[j];
      if (op.gate.data != nullptr) {
        y *= apply(op.gate_activation, (at(op.gate, token) + column)[j]);
      }
      out[j] = y;
    }
  }
}


// The fewer heads and rows there are, the thinner the slices: a block for each multiprocessor.
int slice_of(const DeltaMix& op, const Context& context) {
  const int long_rows =
      std::clamp(op.rows.tokens / (kStepTokensMost + 1), 1, op.rows.count);
  int slice = op.value_dim % 128 == 0 ? 128 : 64;
  while (slice > 16 && long_rows * op.value_heads * (op.value_dim / slice) * 2 <=
                           context.multiprocessors) {
    slice /= 2;
  }
  return slice;
}

bool served(const DeltaMix& op, const Context& context) {
  const auto aligned = [](const float* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 4 == 0;
  };
  bool all = aligned(op.state.data, op.state.stride) &&
             aligned(op.history.data, op.history.stride);
  for (const Acts& acts : {op.q, op.k, op.v, op.erase, op.write}) {
    all = all && aligned(acts.data, acts.stride);
  }
  if (op.decay == Decay::PerChannel) {
    all = all && aligned(op.decay_in.data, op.decay_in.stride) && aligned(op.dt_bias, 0);
  }
  const auto known = [&](Activation activation) {
    return op.qk_activation == activation;
  };
  all = all && (known(Activation::Silu) || known(Activation::None) || known(Activation::Relu) ||
                known(Activation::EluPlusOne));
  all = all && (!op.gate || op.gate_activation == Activation::Silu ||
                op.gate_activation == Activation::Sigmoid);
  return all && context.compute >= 80 && op.conv_width <= 4 &&
         (op.key_dim == 64 || op.key_dim == 128) && op.value_dim % 64 == 0;
}

}  // namespace
}  // namespace chunk

bool run_chunks(const DeltaMix& op, Context& context) {
  if (!chunk::served(op, context)) return false;
  const bool channel = op.decay == Decay::PerChannel || op.erase.data != nullptr;
  const int slice = chunk::slice_of(op, context);
  const auto start = op.key_dim == 128
                         ? channel ? chunk::start_channel_128 : chunk::start_head_128
                         : channel ? chunk::start_channel_64 : chunk::start_head_64;
  start(op, context, slice);
  const bool norm = slice != op.value_dim;
  const int64_t work = norm ? int64_t(op.rows.tokens) * op.value_heads / 64 : 8;
  const int64_t most = std::max(8, 8 * context.multiprocessors / op.rows.count);
  launch(context,
         {.grid = dim3(std::clamp<int64_t>(work, 8, most), op.rows.count), .block = dim3(256)},
         chunk::finish_rows_kernel, op, norm);
  return true;
}

}  // namespace weir::cuda
