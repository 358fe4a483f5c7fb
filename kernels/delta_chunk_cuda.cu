#include "kernels/delta_chunk_cuda.cuh"

#include <climits>

#include "kernels/delta_chunk_prepare.cuh"
#include "kernels/long_rows_cuda.cuh"

namespace weir::cuda {
namespace chunk {
namespace {

// What becomes of answers that finish_rows_kernel normalises.
struct Finish {
  bool norm;
  SplitVectors left;  // for the Linear that follows, perhaps
  bool exact;         // also op.out
};

// A warp normalises one head's answers to a token of the step, and leaves them for the next op.
__device__ inline void norm_answers(const DeltaMix& op, const Finish& finish, int64_t token,
                                    int64_t column) {
  constexpr int kMost = 2;  // times 128 values
  float4 y[kMost], gate[kMost], weight[kMost];
  float* const out = at(op.out, token) + column;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int j = 128 * i + threadIdx.x % 32 * 4;
    y[i] = j < op.value_dim ? load4(out + j) : zero4();
    gate[i] = j < op.value_dim && op.gate.data != nullptr ? load4(at(op.gate, token) + column + j)
                                                          : zero4();
    weight[i] = j < op.value_dim ? load4(op.norm_weight + j) : zero4();
    squares += y[i].x * y[i].x + y[i].y * y[i].y + y[i].z * y[i].z + y[i].w * y[i].w;
  }
  const float scale = 1.0f / sqrtf(sum_over_lanes(squares) / float(op.value_dim) + op.norm_eps);
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int j = 128 * i + threadIdx.x % 32 * 4;
    if (j >= op.value_dim) break;
    y[i] = times(scaled(y[i], scale), weight[i]);
    if (op.gate.data != nullptr) {
      y[i] = times(y[i], each(gate[i], [&](float x) { return apply(op.gate_activation, x); }));
    }
    if (finish.exact) store4(out + j, y[i]);
    store_split(finish.left, token * op.value_heads * op.value_dim + column + j, y[i]);
  }
}

// What blocks of the chunk kernel could not do for each other's sake: the last inputs of a row
// become its history once all have read the old one; heads whose values lie in several blocks are
// normalised. Rows of few tokens are left alone.
__device__ inline void finish_row(const DeltaMix& op, const Finish& finish, int row) {
  const Slot slot = op.rows.slot[row];
  const int begin = op.rows.begin[row], count = op.rows.begin[row + 1] - begin;
  if (slot == kPadding || count <= kStepTokensMost) return;
  const int64_t keys = int64_t(op.key_heads) * op.key_dim;
  const int64_t channels = 2 * keys + int64_t(op.value_heads) * op.value_dim;
  const int kept = op.conv_width - 1, from = count - kept, position = op.rows.first[row] + from;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < kept * channels;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int age = int(i / channels);
    const int64_t token = begin + from + age, channel = i % channels;
    const Acts& in = channel < keys ? op.q : channel < 2 * keys ? op.k : op.v;
    const int64_t column = channel < 2 * keys ? channel % keys : channel - 2 * keys;
    at(op.history, slot)[ring_row(position + age, kept) * channels + channel] =
        at(in, token)[column];
  }
  const int warps = gridDim.x * 8;
  if (!finish.norm) return;
  for (int i = blockIdx.x * 8 + threadIdx.x / 32; i < count * op.value_heads; i += warps) {
    norm_answers(op, finish, begin + i / op.value_heads,
                 int64_t(i % op.value_heads) * op.value_dim);
  }
}
__global__ __launch_bounds__(256) void finish_rows_kernel(const __grid_constant__ DeltaMix op,
                                                          Finish finish) {
  let_successor_start();
  const auto find = [&](int k) { return long_row(op.rows, k, kStepTokensMost); };
  int k = blockIdx.y, row = find(k), next = row < 0 ? -1 : find(k + gridDim.y);
  wait_for_predecessor();
  while (row >= 0) {
    finish_row(op, finish, row);
    k += gridDim.y;
    row = next;
    if (row >= 0) next = find(k + gridDim.y);
  }
}

// Whether one kernel can take the whole of long rows.
bool rows_at_once(const DeltaMix& op, const Context& context) {
  return context.hopper.encode_map != nullptr && op.key_dim == 128 && op.value_dim % 128 == 0;
}

// The long rows. Of not many tokens a step has few: one kernel for each of many rows takes three
// times as long as both kernels where there is one prompt among rows that decode, and where there
// are no such rows both kernels lose little.
int prompts(const DeltaMix& op) {
  constexpr int kTokensOfMany = 4096, kMean = 128;
  const int mean = op.rows.tokens < kTokensOfMany ? INT_MAX : kMean;
  return likely_long_rows(op.rows, kStepTokensMost, mean);
}

// The fewer heads and rows there are, the thinner the slices: a block for each multiprocessor.
int slice_of(const DeltaMix& op, const Context& context) {
  constexpr int kManyRows = 16;
  const int rows = prompts(op);
  int slice = rows_at_once(op, context) ? 128 : 64;
  // The other rows' kernel has the rest of the machine meanwhile, if they are many.
  const int least = op.rows.count > kManyRows ? 64 : 16;
  while (slice > least &&
         rows * op.value_heads * (op.value_dim / slice) * 2 <= context.multiprocessors) {
    slice /= 2;
  }
  return slice;
}

// The scratch memory that is left for tiles while the other rows' answers are left split in it.
struct Room {
  unsigned char* begin;
  int64_t bytes;
};
Room room_beside(const DeltaMix& op, const Context& context) {
  auto* const scratch = static_cast<unsigned char*>(context.scratch);
  const auto half = int64_t(context.half_bytes);
  if (context.split.half == 0) return {scratch, half};  // the answers are left in the other one
  const int64_t padded = (int64_t(op.rows.tokens) + 7) / 8 * 8;
  const int64_t answers = padded * op.value_heads * op.value_dim * (context.keep_low ? 4 : 2);
  const int64_t taken = std::min((answers + 1023) / 1024 * 1024, 2 * half);
  return {scratch + taken, 2 * half - taken};
}

// All turns of both kernels; whether that is one turn, its tiles apart from other rows' answers.
// The host does not know how long each row is, but how many chunks all of them have at most; blocks
// without a tile return at once.
bool run_turns(const DeltaMix& op, Context& context, const Starts& starts, int slice) {
  const int blocks_of_row = op.value_heads * (op.value_dim / slice);
  int group = 1;
  while (group < 32 && 2 * group * blocks_of_row <= context.multiprocessors) group *= 2;
  const int chunks = op.rows.tokens / kTokens + most_long_rows(op.rows, kStepTokensMost);
  const int64_t bytes = int64_t(tile_bytes(starts.image, op.value_dim)) * op.value_heads;
  const Room room = room_beside(op, context);
  const bool apart = chunks * bytes <= room.bytes;
  auto* const tiles = apart ? room.begin : static_cast<unsigned char*>(context.scratch);
  // Of several turns, the first kernel of one runs beside the second one of the turn before, in the
  // other half of the scratch memory.
  const auto half = int64_t(context.half_bytes);
  const bool one = apart || chunks * bytes <= 2 * half;
  const int64_t most = one ? chunks : half / bytes;
  // The first kernel's blocks in whole waves.
  const int wave = starts.blocks * context.multiprocessors;
  int of_turn = int(std::min<int64_t>(most, chunks));
  if (!one && of_turn * op.value_heads > wave) {
    of_turn = of_turn * op.value_heads / wave * wave / op.value_heads;
  }
  const int turns = (chunks + of_turn - 1) / of_turn;
  for (int i = 0; i < turns; ++i) {
    const Turn turn{.group = group,
                    .first = i * of_turn,
                    .count = std::min(of_turn, chunks - i * of_turn),
                    .tiles = tiles + i % 2 * half,
                    .follows = i > 0};
    starts.prepare(op, context, turn);
    starts.advance(op, context, turn, slice, std::min(op.rows.count, 2 * group));
  }
  return apart;
}

bool served(const DeltaMix& op, const Context& context) {
  const auto aligned = [](const float* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 4 == 0;
  };
  bool all = aligned(op.state.data, op.state.stride) &&
             aligned(op.history.data, op.history.stride);
  for (const Acts& acts : {op.q, op.k, op.v, op.erase, op.write, op.gate, op.out}) {
    all = all && aligned(acts.data, acts.stride);
  }
  for (const float* weights : {op.conv_q, op.conv_k, op.conv_v, op.conv_q_bias, op.conv_k_bias,
                               op.conv_v_bias, op.norm_weight}) {
    all = all && aligned(weights, 0);
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
  // No more heads than a half of the scratch memory has room for a chunk of.
  all = all && op.value_heads <= 256 && context.half_bytes >= size_t(25) << 20;
  return all && context.compute >= 90 && op.conv_width <= 4 &&
         (op.key_dim == 64 || op.key_dim == 128) && op.value_dim % 64 == 0 && op.value_dim <= 256;
}

}  // namespace
}  // namespace chunk

bool serves_chunks(const DeltaMix& op, const Context& context) {
  return chunk::served(op, context);
}

Chunks run_chunks(const DeltaMix& op, Context& context) {
  if (!chunk::served(op, context)) return {};
  Chunks chunks{.run = true};
  const int slice = chunk::slice_of(op, context);
  const bool norm = slice != op.value_dim;
  if (slice == 128) {
    chunks.left = chunk::start_rows(op, context);
  } else {
    const bool channel = op.decay == Decay::PerChannel || op.erase.data != nullptr;
    const auto starts =
        channel ? chunk::channel_starts(op.key_dim) : chunk::head_starts(op.key_dim);
    chunks.apart = chunk::run_turns(op, context, starts, slice);
  }
  const int dim = op.value_heads * op.value_dim;
  if (norm) {  // the tiles that were in the scratch memory have been read then
    chunks.left = leave_split(op.out, dim, op.rows.tokens, context);
  }
  const bool exact = chunks.left.high == nullptr || !op.read_once ||
                     !next_reads_split(op.out, dim, op.rows.tokens, context);
  // A warp an answer: with eight in turn a prompt by itself waited 20 us a layer for them. The
  // history alone: three numbers a thread.
  const int64_t blocks = norm ? int64_t(op.rows.tokens) * op.value_heads / 8 : 24;
  const int rows = chunk::prompts(op);
  const int64_t most = std::max(8, 32 * context.multiprocessors / rows);
  launch(context, {.grid = dim3(std::clamp<int64_t>(blocks, 8, most), rows), .block = dim3(256)},
         chunk::finish_rows_kernel, op, chunk::Finish{norm, chunks.left, exact});
  return chunks;
}

}  // namespace weir::cuda
