#include <climits>

#include "kernels/outer_chunk_cuda.cuh"
#include "kernels/vector_cuda.cuh"

namespace weir::cuda {
namespace {

// Rows of a head's state (a value each) have nothing to do with each other: each warp takes a few
// of them into registers, passes the row's tokens by and puts them back; no barrier anywhere. A
// thread holds 32 numbers of the state, and a warp's loads are whole 128-byte lines.
//
// With `normalise` the running sum of keys belongs to all rows of a head: then one block has the
// whole head, each of its warps passes the tokens by once for each 32 / kLanes * kRows values, and
// the sum is written when every warp is done with it.
//
// Floor, one token a row: the state read once and written once, 8 * key_dim * value_dim bytes per
// head and row.
constexpr int kThreads = 128;  // of a block that has a whole head

// What decays: all of a head alike (or nothing), each key channel or each value on its own; or
// nothing, with a running sum of keys.
enum class By : uint8_t { Head, Key, Value, Sum };

template <int kLanes_, int kParts_, By kBy_, bool kMany_>
struct Layout {
  static constexpr By kBy = kBy_;
  static constexpr bool kMany = kMany_;          // rows have several tokens as a rule
  static constexpr int kLanes = kLanes_;         // threads of a row
  static constexpr int kParts = kParts_;         // of 16 bytes, of a row, in a thread
  static constexpr int kRows = 8 / kParts;       // of a thread
  static constexpr int kKeys = 4 * kLanes * kParts;
  static constexpr int kApart = 32 / kLanes;         // rows between two of a thread
  static constexpr int kTile = kApart * kRows;       // rows of a warp
  static constexpr bool kSums = kBy == By::Sum;
  static constexpr int kWarps = kSums ? kThreads / 32 : 1;
  static constexpr int kResident = (kMany ? 12 : 20) / kWarps;  // blocks of a multiprocessor
};

// Where the warp is.
struct Place {
  int head, key_head, value_head;
  int begin, tokens;
  bool fresh;
};

__device__ inline float head_decay(const OuterStep& op, const Place& at_, int64_t token) {
  if (op.decay == OuterStep::Decay::Constant) return expf(op.constant[at_.head]);
  if (op.decay == OuterStep::Decay::PerHead) return expf(at(op.log_decay, token)[at_.head]);
  return 1.0f;
}

__device__ inline float4 exp_of(float4 x) { return {expf(x.x), expf(x.y), expf(x.z), expf(x.w)}; }

// What a thread reads of one token: the pieces of its rows' keys, its rows' values.
template <class L>
struct Inputs {
  float4 k[L::kParts], q[L::kParts], decay[L::kParts];
  float v[L::kRows], value_decay[L::kRows];
  float head_decay, v_scale;

  __device__ void load(const OuterStep& op, const Place& place, int value, int query, int t) {
    const int64_t token = place.begin + t;
    const int lane = threadIdx.x % L::kLanes;
    const auto* keys = reinterpret_cast<const float4*>(at(op.k, token) + place.key_head * L::kKeys);
    const auto* queries = reinterpret_cast<const float4*>(at(op.q, token) + query * L::kKeys);
    const auto* decays = reinterpret_cast<const float4*>(at(op.log_decay, token) +
                                                         place.key_head * L::kKeys);
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      k[c] = keys[c * L::kLanes + lane];
      q[c] = queries[c * L::kLanes + lane];
      if constexpr (L::kBy == By::Key) decay[c] = decays[c * L::kLanes + lane];
    }
    const int first = place.value_head * op.value_dim + value;
    const float* const values = at(op.v, token) + first;
    const float* const value_decays = at(op.log_decay, token) + first;
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      const bool valid = value + r * L::kApart < op.value_dim;
      v[r] = valid ? values[r * L::kApart] : 0.0f;
      if constexpr (L::kBy == By::Value) {
        value_decay[r] = valid ? value_decays[r * L::kApart] : 0.0f;
      }
    }
    head_decay = 1.0f;
    if constexpr (L::kBy == By::Head) head_decay = cuda::head_decay(op, place, token);
    v_scale = op.v_scale.data == nullptr ? 1.0f : at(op.v_scale, token)[place.head];
  }
};

// A thread's part of kTile rows of a head's state, and of the sum of keys.
template <class L>
struct State {
  float4 row[L::kRows][L::kParts], sum[L::kParts];

  __device__ void update(const Inputs<L>& in) {
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      float4 decay;
      if constexpr (L::kBy == By::Key) decay = exp_of(in.decay[c]);
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        if constexpr (L::kBy != By::Key) {
          const float whole = L::kBy == By::Value ? expf(in.value_decay[r]) : in.head_decay;
          decay = float4{whole, whole, whole, whole};
        }
        row[r][c] = plus(times(row[r][c], decay), in.v_scale * in.v[r], in.k[c]);
      }
      if constexpr (L::kSums) sum[c] = plus(sum[c], 1.0f, in.k[c]);
    }
  }

  // The answer to a query, of head `reader` of the output.
  __device__ void answer(const OuterStep& op, const Place& place, const Inputs<L>& in, int value,
                         int reader, int t) {
    float scale = op.scale;
    if constexpr (L::kSums) {
      float divisor = 0;
#pragma unroll
      for (int c = 0; c < L::kParts; ++c) divisor += dot(sum[c], in.q[c]);
      scale /= sum_over_lanes<L::kLanes>(divisor) * op.scale + 1e-10f;
    }
    float* const out = at(op.out, place.begin + t) + reader * op.value_dim;
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      float answer = 0;
#pragma unroll
      for (int c = 0; c < L::kParts; ++c) answer += dot(row[r][c], in.q[c]);
      answer = sum_over_lanes<L::kLanes>(answer) * scale;
      const int j = value + r * L::kApart;
      if (threadIdx.x % L::kLanes != 0 || j >= op.value_dim) continue;
      if (op.skip != nullptr) answer += op.skip[place.head * op.value_dim + j] * in.v[r];
      out[j] = answer;
    }
  }
};

// The row's tokens for one tile of a head. `value`: the thread's first row; `state` of the head.
template <class L>
__device__ inline void run_tile(const OuterStep& op, const Place& place, int value, float* state,
                                const float* sums, bool wait, State<L>& held) {
  const int lane = threadIdx.x % L::kLanes;
  float4* const mine = reinterpret_cast<float4*>(state + int64_t(value) * L::kKeys) + lane;
  const auto part = [&](int r, int c) {
    return mine + (r * L::kApart * L::kKeys / 4 + c * L::kLanes);
  };
  const auto valid = [&](int r) { return value + r * L::kApart < op.value_dim; };
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      held.row[r][c] = place.fresh || !valid(r) ? float4{0, 0, 0, 0} : __ldcs(part(r, c));
    }
  }
  if (wait) wait_for_predecessor();
#pragma unroll
  for (int c = 0; c < L::kParts && L::kSums; ++c) {
    held.sum[c] = place.fresh ? float4{0, 0, 0, 0}
                              : reinterpret_cast<const float4*>(sums)[c * L::kLanes + lane];
  }
  // The queries that read this head, or the one query that this head reads.
  const bool shares = op.query_heads < op.heads;
  const int group = shares ? 1 : op.query_heads / op.heads;
  const int reader = place.head * group;
  const int query = shares ? reader * op.query_heads / op.heads : reader;
  Inputs<L> in, next;
  if (L::kMany) next.load(op, place, value, query, 0);
#pragma unroll 1
  for (int t = 0; t < place.tokens; ++t) {
    if constexpr (L::kMany) {  // the next token's are on their way during this one
      in = next;
      if (t + 1 < place.tokens) next.load(op, place, value, query, t + 1);
    } else {
      in.load(op, place, value, query, t);
    }
    held.update(in);
    held.answer(op, place, in, value, reader, t);
    for (int j = 1; j < group; ++j) {
      const auto* q = reinterpret_cast<const float4*>(at(op.q, place.begin + t) +
                                                      (query + j) * L::kKeys);
#pragma unroll
      for (int c = 0; c < L::kParts; ++c) in.q[c] = q[c * L::kLanes + lane];
      held.answer(op, place, in, value, reader + j, t);
    }
  }
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      if (valid(r)) __stcs(part(r, c), held.row[r][c]);
    }
  }
}

// Blocks along x: head after head, `tiles` of L::kWarps * kTile values each.
template <class L>
__global__ __launch_bounds__(L::kWarps * 32, L::kResident) void outer_step_kernel(
    const __grid_constant__ OuterStep op, bool fresh_state, int tiles, int tokens_most) {
  let_successor_start();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const int head = int(blockIdx.x) / tiles, tile = int(blockIdx.x) % tiles;
  const Place place{.head = head, .key_head = head * op.key_heads / op.heads,
                    .value_head = head * op.value_heads / op.heads, .begin = begin,
                    .tokens = op.rows.begin[row + 1] - begin, .fresh = op.rows.first[row] == 0};
  const Slot slot = op.rows.slot[row];
  const int warp = threadIdx.x / 32, in_tile = threadIdx.x % 32 / L::kLanes;
  if (slot == kPadding || place.tokens == 0 || place.tokens > tokens_most) {
    wait_for_predecessor();
    return;
  }
  float* const state = at(op.state, slot) + int64_t(head) * op.value_dim * L::kKeys;
  float* const sums = L::kSums ? at(op.sums, slot) + head * L::kKeys : nullptr;
  bool wait = fresh_state && !L::kSums;
  if (!wait) wait_for_predecessor();
  State<L> held;
  for (int first = (tile * L::kWarps + warp) * L::kTile; first < op.value_dim;
       first += tiles * L::kWarps * L::kTile) {
    run_tile<L>(op, place, first + in_tile, state, sums, wait, held);
    wait = false;
  }
  if (wait) wait_for_predecessor();  // a warp without values
  if constexpr (L::kSums) {
    __syncthreads();  // every warp has read the sum
    if (threadIdx.x >= L::kLanes) return;
#pragma unroll
    for (int c = 0; c < L::kParts; ++c) {
      reinterpret_cast<float4*>(sums)[c * L::kLanes + threadIdx.x] = held.sum[c];
    }
  }
}

// Any sizes: one block a head, the state stays where it is, a warp takes one row after the other.
__global__ __launch_bounds__(kThreads) void outer_step_any_kernel(
    const __grid_constant__ OuterStep op, int tokens_most) {
  extern __shared__ float sum[];  // [key_dim]: of keys
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, begin = op.rows.begin[row], head = blockIdx.x;
  const Place place{.head = head, .key_head = head * op.key_heads / op.heads,
                    .value_head = head * op.value_heads / op.heads, .begin = begin,
                    .tokens = op.rows.begin[row + 1] - begin, .fresh = op.rows.first[row] == 0};
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || place.tokens == 0 || place.tokens > tokens_most) return;
  const int K = op.key_dim, V = op.value_dim, lane = threadIdx.x % 32;
  float* const state = at(op.state, slot) + int64_t(head) * V * K;
  float* const sums = op.normalise ? at(op.sums, slot) + int64_t(head) * K : nullptr;
  const bool shares = op.query_heads < op.heads;
  const int group = shares ? 1 : op.query_heads / op.heads;
  for (int t = 0; t < place.tokens; ++t) {
    const int64_t token = begin + t;
    const float* k = at(op.k, token) + int64_t(place.key_head) * K;
    const bool zero = place.fresh && t == 0;
    for (int i = threadIdx.x; i < K && op.normalise; i += kThreads) {
      sum[i] = (zero ? 0.0f : t == 0 ? sums[i] : sum[i]) + k[i];
    }
    __syncthreads();  // the sum is there
    const float whole = head_decay(op, place, token);
    const float v_scale = op.v_scale.data == nullptr ? 1.0f : at(op.v_scale, token)[head];
    const float* by_key = op.decay != OuterStep::Decay::PerKey
                              ? nullptr
                              : at(op.log_decay, token) + int64_t(place.key_head) * K;
    for (int j = threadIdx.x / 32; j < V; j += kThreads / 32) {
      const int64_t column = int64_t(place.value_head) * V + j;
      const float v = at(op.v, token)[column];
      const float decay =
          op.decay == OuterStep::Decay::PerValue ? expf(at(op.log_decay, token)[column]) : whole;
      float* const s = state + int64_t(j) * K;
      for (int i = lane; i < K; i += 32) {
        const float kept = zero ? 0.0f : s[i] * (by_key == nullptr ? decay : expf(by_key[i]));
        s[i] = kept + v_scale * v * k[i];
      }
      for (int g = 0; g < group; ++g) {
        const int reader = head * group + g;
        const int query = shares ? head * op.query_heads / op.heads : reader;
        const float* q = at(op.q, token) + int64_t(query) * K;
        float answer = 0, divisor = 0;
        for (int i = lane; i < K; i += 32) {
          answer += s[i] * q[i];
          if (op.normalise) divisor += sum[i] * q[i];
        }
        answer = sum_over_lanes(answer) * op.scale;
        if (op.normalise) answer /= sum_over_lanes(divisor) * op.scale + 1e-10f;
        if (op.skip != nullptr) answer += op.skip[int64_t(head) * V + j] * v;
        if (lane == 0) at(op.out, token)[int64_t(reader) * V + j] = answer;
      }
    }
    __syncthreads();  // the sum has been read
  }
  for (int i = threadIdx.x; i < K && op.normalise; i += kThreads) sums[i] = sum[i];
}

template <class L>
void start(const OuterStep& op, Context& context, int tokens_most) {
  const int block = L::kWarps * L::kTile;
  const int tiles = L::kSums ? 1 : (op.value_dim + block - 1) / block;
  launch(context, {.grid = dim3(op.heads * tiles, op.rows.count), .block = dim3(L::kWarps * 32)},
         outer_step_kernel<L>, op, context.fresh_state, tiles, tokens_most);
}

template <int kLanes, int kParts, By kBy>
void start(const OuterStep& op, Context& context, int tokens_most) {
  op.rows.tokens > op.rows.count
      ? start<Layout<kLanes, kParts, kBy, true>>(op, context, tokens_most)
      : start<Layout<kLanes, kParts, kBy, false>>(op, context, tokens_most);
}

template <int kLanes, int kParts>
void start(const OuterStep& op, Context& context, int tokens_most) {
  if (op.normalise) return start<kLanes, kParts, By::Sum>(op, context, tokens_most);
  switch (op.decay) {
    case OuterStep::Decay::PerKey: return start<kLanes, kParts, By::Key>(op, context, tokens_most);
    case OuterStep::Decay::PerValue:
      return start<kLanes, kParts, By::Value>(op, context, tokens_most);
    default: return start<kLanes, kParts, By::Head>(op, context, tokens_most);
  }
}

bool aligned(const OuterStep& op) {
  const auto sixteen = [](const float* p, int64_t stride) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 4 == 0;
  };
  const bool per_key = op.decay == OuterStep::Decay::PerKey;
  return sixteen(op.q.data, op.q.stride) && sixteen(op.k.data, op.k.stride) &&
         (!per_key || sixteen(op.log_decay.data, op.log_decay.stride)) &&
         sixteen(op.state.data, op.state.stride) &&
         (!op.normalise || sixteen(op.sums.data, op.sums.stride));
}

}  // namespace

const char* refusal(const OuterStep& op) {
  return op.key_dim <= 12 * 1024 ? nullptr : "outer_step of keys with more than 12,288 numbers";
}

void run(const OuterStep& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.rows.count <= 65535);
  int tokens_most = INT_MAX;  // longer rows have been run already
  const int longest = op.rows.tokens - op.rows.count + 1;  // at most, if no row is empty
  // The chunk kernel knows its rows when it starts.
  if (!op.rows.computed && longest > kOuterStepsMost && run_chunks(op, context)) {
    if (op.rows.count == 1) return;
    tokens_most = kOuterStepsMost;
  }
  const bool held = aligned(op) && !(op.normalise && op.decay != OuterStep::Decay::None);
  switch (held ? op.key_dim : 0) {
    case 32: return start<8, 1>(op, context, tokens_most);
    case 64: return start<16, 1>(op, context, tokens_most);
    case 128: return start<32, 1>(op, context, tokens_most);
    case 256: return start<32, 2>(op, context, tokens_most);
    case 512: return start<32, 4>(op, context, tokens_most);
    default: break;
  }
  WEIR_CHECK(refusal(op) == nullptr);
  const size_t shared = size_t(op.key_dim) * sizeof(float);
  launch(context,
         {.grid = dim3(op.heads, op.rows.count), .block = dim3(kThreads), .shared = shared},
         outer_step_any_kernel, op, tokens_most);
}

}  // namespace weir::cuda
