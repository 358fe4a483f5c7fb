#include <climits>

#include "kernels/cuda_util.cuh"
#include "kernels/delta_chunk_cuda.cuh"

namespace weir::cuda {
namespace {

// One block of 256 threads per (key head, row) runs the mixer over the row's tokens, for each of
// the key head's value heads in turn. The copy engine brings a head's state into shared memory and
// takes it back, so that three blocks on a multiprocessor keep up to 192 KB on their way.
//
// Eight neighbouring threads share a row of the state: thread l of them holds the elements
// 4 l + 32 j .. + 3, so that a row is read in 128-byte lines, without bank conflicts.
//
// Floor, one token a row: the state read once and written once, 8 * key_dim * value_dim bytes per
// value head and row.
constexpr int kThreads = 256;
constexpr int kLanes = 8;
constexpr int kGroups = kThreads / kLanes;  // rows of the state at one time

// A token's vectors, in shared memory. Keys and queries are not normalised: the scale is a number.
struct Vectors {
  float *q, *k;    // [key_dim]
  float* decay;    // [key_dim], exp(g)
  float* erase;    // [key_dim], k times beta or the erase gate
  float* v;        // [value_dim], times beta or the write gate
  float* out;      // [value_dim]
};

// Where the block is.
struct Place {
  int key_head, value_head, decay_head;
  int token, begin;      // in the row; the row's first token in the step
  bool fresh;            // the row starts from a zero state
  float* history;        // the row's, [conv_width - 1, channels]
  int64_t channels;      // of one history entry
};

__device__ Vectors vectors(const DeltaMix& op, float* shared) {
  const int K = op.key_dim, V = op.value_dim;
  return {shared, shared + K, shared + 2 * K, shared + 3 * K, shared + 4 * K,
          shared + 4 * K + V};
}

// One of the head's channels: of q below key_dim, of k below 2 key_dim, then of v.
struct Channel {
  const float* now;            // at the block's token
  int64_t stride;
  const float *taps, *bias;    // the channel's own; bias may be null
  float* past;                 // in the oldest history entry
  const float *gate, *shift;   // the decay's, erase's or write's logit; dt_bias. May be null
};

__device__ inline Channel channel(const DeltaMix& op, const Place& place, int value_head, int i) {
  const int K = op.key_dim;
  const int which = i < K ? 0 : i < 2 * K ? 1 : 2;
  const int64_t all_keys = int64_t(op.key_heads) * K, token = place.begin + place.token;
  const int64_t column = which < 2 ? int64_t(place.key_head) * K + (which == 0 ? i : i - K)
                                   : int64_t(value_head) * op.value_dim + i - 2 * K;
  const Acts in = which == 0 ? op.q : which == 1 ? op.k : op.v;
  const float* taps = which == 0 ? op.conv_q : which == 1 ? op.conv_k : op.conv_v;
  const float* bias = which == 0 ? op.conv_q_bias : which == 1 ? op.conv_k_bias : op.conv_v_bias;
  const Acts gate = which == 0 ? op.decay_in : which == 1 ? op.erase : op.write;
  const int64_t decay_at = op.decay == Decay::PerHead
                               ? place.decay_head
                               : int64_t(place.decay_head) * K + (which == 0 ? i : 0);
  const bool gated = gate.data != nullptr && (which > 0 || op.decay != Decay::None);
  const int64_t past = which * all_keys + column;
  return {.now = in.data + token * in.stride + column,
          .stride = in.stride,
          .taps = taps + column * op.conv_width,
          .bias = bias == nullptr ? nullptr : bias + column,
          .past = place.history + past,
          .gate = gated ? gate.data + token * gate.stride + (which == 0 ? decay_at : column)
                        : nullptr,
          .shift = gated && which == 0 ? op.dt_bias + decay_at : nullptr};
}

__device__ inline float read(const float* from) { return from != nullptr ? *from : 0.0f; }

// What a channel reads from memory for one token, all of it without a branch, so that every load
// is on its way before the first is waited for.
template <int kWidth>
struct Raw {
  float x[kWidth], tap[kWidth];  // oldest first
  float bias, gate, shift;

  __device__ inline void load(const Channel& c, const Place& place) {
    const float4 taps = *reinterpret_cast<const float4*>(c.taps);
    tap[0] = taps.x, tap[1] = taps.y, tap[2] = taps.z, tap[3] = taps.w;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int back = kWidth - 1 - j;  // tokens ago
      const bool now = back <= place.token;
      const float* from =
          now ? c.now - back * c.stride : c.past + (place.token + j) * place.channels;
      x[j] = now || !place.fresh ? *from : 0.0f;
    }
    bias = read(c.bias);
    gate = read(c.gate);
    shift = read(c.shift);
  }
  __device__ inline float convolved(const Channel&, const Place&, int) const {
    float sum = bias;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += tap[j] * x[j];
    return sum;
  }
  // The newest inputs become the history.
  __device__ inline void remember(const Channel& c, const Place& place) const {
#pragma unroll
    for (int j = 1; j < kWidth; ++j) c.past[(j - 1) * place.channels] = x[j];
  }
};

// Any width, also none; slower.
template <>
struct Raw<0> {
  float gate, shift;

  __device__ inline void load(const Channel& c, const Place&) {
    gate = read(c.gate);
    shift = read(c.shift);
  }
  __device__ inline float convolved(const Channel& c, const Place& place, int width) const {
    if (width == 0) return *c.now;
    float sum = read(c.bias);
    for (int j = 0; j < width; ++j) {
      const int back = width - 1 - j;
      float x = 0;
      if (back <= place.token) {
        x = c.now[-back * c.stride];
      } else if (!place.fresh) {
        x = c.past[(place.token + j) * place.channels];
      }
      sum += c.taps[j] * x;
    }
    return sum;
  }
  __device__ inline void remember(const Channel&, const Place&) const {}
};

// exp(g) from its logit with dt_bias added.
__device__ inline float decay_of(const DeltaMix& op, float a, float x) {
  if (op.decay == Decay::None) return 1.0f;
  if (op.lower_bound < 0) return expf(op.lower_bound * sigmoid(a * x));
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  return expf(-a * softplus);
}

// Fills q, k, decay, erase and v for the block's token, two channels of a thread at one time. With
// the last token the inputs go to the history: q's and k's with the last value head that reads
// them.
template <int kWidth>
__device__ inline void prepare(const DeltaMix& op, const Place& place, const Vectors& s, bool last,
                               bool last_head) {
  const int K = op.key_dim, all = 2 * K + op.value_dim;
  const float a = op.decay == Decay::None ? 0.0f : op.decay_a[place.decay_head];
  const float beta_in =
      op.beta.data == nullptr ? 0.0f : at(op.beta, place.begin + place.token)[place.value_head];
  for (int first = threadIdx.x; first < all; first += 2 * kThreads) {
    Channel c[2];
    Raw<kWidth> raw[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      c[u] = channel(op, place, place.value_head, min(first + u * kThreads, all - 1));
      raw[u].load(c[u], place);
    }
    const float beta = op.beta_scale * (op.beta.data == nullptr ? 1.0f : sigmoid(beta_in));
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int i = first + u * kThreads;
      if (i >= all) continue;
      const float x = apply(i < 2 * K ? op.qk_activation : Activation::Silu,
                            raw[u].convolved(c[u], place, op.conv_width));
      const float gate = sigmoid(raw[u].gate);
      if (i < K) {
        s.q[i] = x;
        s.decay[i] = decay_of(op, a, raw[u].gate + raw[u].shift);
      } else if (i < 2 * K) {
        s.k[i - K] = x;
        s.erase[i - K] = x * (op.erase.data == nullptr ? beta : op.beta_scale * gate);
      } else {
        s.v[i - 2 * K] = x * (op.write.data == nullptr ? beta : gate);
      }
      if (last && (i >= 2 * K || last_head)) raw[u].remember(c[u], place);
    }
  }
}

// What normalises a head's q or k: every warp finds it for itself.
__device__ inline float head_scale(QkNorm norm, const float* x, int K) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < K; i += 32) sum += norm == QkNorm::L2 ? x[i] * x[i] : x[i];
  sum = sum_over_lanes(sum);
  return norm == QkNorm::L2 ? 1.0f / sqrtf(sum + 1e-6f) : 1.0f / sum;
}

// What finish() multiplies a thread's first value with, loaded before the state's step.
struct Late {
  float weight = 0, gate = 0;
};

__device__ inline Late late_factors(const DeltaMix& op, const Place& place, int i) {
  if (i >= op.value_dim) return {};
  const float* gate = op.gate.data == nullptr ? nullptr
                                              : at(op.gate, place.begin + place.token) +
                                                    int64_t(place.value_head) * op.value_dim;
  return {op.norm_weight[i], gate == nullptr ? 0.0f : gate[i]};
}

// out = rms(o) * norm_weight [* gate_act(gate)].
__device__ inline void finish(const DeltaMix& op, const Place& place, const Vectors& s,
                              Late late) {
  const int V = op.value_dim;
  const int64_t token = place.begin + place.token, value0 = int64_t(place.value_head) * V;
  float sum = 0;
  for (int i = threadIdx.x % 32; i < V; i += 32) sum += s.out[i] * s.out[i];
  const float scale = 1.0f / sqrtf(sum_over_lanes(sum) / float(V) + op.norm_eps);
  for (int i = threadIdx.x; i < V; i += kThreads) {
    if (i >= kThreads) late = late_factors(op, place, i);
    float out = s.out[i] * scale * late.weight;
    if (op.gate.data != nullptr) out *= apply(op.gate_activation, late.gate);
    at(op.out, token)[value0 + i] = out;
  }
}

// For any width: the last conv_width - 1 inputs become the history, by the thread that convolved
// the channel, oldest first: an entry is read before it is overwritten.
__device__ inline void remember(const DeltaMix& op, Place place, int tokens) {
  const int K = op.key_dim, kept = op.conv_width - 1, group = op.value_heads / op.key_heads;
  place.token = 0;
  for (int i = threadIdx.x; i < 2 * K + op.value_dim; i += kThreads) {
    for (int j = 0; j < (i < 2 * K ? 1 : group); ++j) {
      const Channel c = channel(op, place, place.key_head * group + j, i);
      for (int h = 0; h < kept; ++h) {
        const int from = tokens - kept + h;
        float x = 0;
        if (from >= 0) {
          x = c.now[from * c.stride];
        } else if (!place.fresh) {
          x = c.past[(h + tokens) * place.channels];
        }
        c.past[h * place.channels] = x;
      }
    }
  }
}

__device__ inline float dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
__device__ inline float4 times(float4 a, float4 b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ inline float4 plus(float4 a, float scale, float4 b) {
  return {a.x + scale * b.x, a.y + scale * b.y, a.z + scale * b.z, a.w + scale * b.w};
}

// The state of one head in shared memory, rows of kParts * 32 elements.
template <int kParts>
struct HeldState {
  static constexpr int kRows = 2;  // rows of one thread at one time
  float* s = nullptr;              // shared
  uint32_t barrier = 0, phase = 0;
  int bytes = 0;

  __device__ void open(float* shared, uint64_t* mbarrier, const DeltaMix& op) {
    s = shared;
    bytes = op.value_dim * kParts * 32 * int(sizeof(float));
    barrier = uint32_t(__cvta_generic_to_shared(mbarrier));
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      asm volatile(
          "mbarrier.init.shared::cta.b64 [%0], 1;\n"
          "fence.proxy.async.shared::cta;" ::"r"(barrier)
          : "memory");
    }
#endif
  }
  __device__ void load(const float* state, bool fresh) {
    const bool copied = !fresh;
#if __CUDA_ARCH__ >= 900
    if (copied && threadIdx.x == 0) {
      asm volatile(
          "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0];"
          ::"r"(barrier), "r"(bytes), "r"(uint32_t(__cvta_generic_to_shared(s))), "l"(state)
          : "memory");
    }
#else
    if (copied) {
      for (int i = threadIdx.x * 4; i < bytes / 4; i += kThreads * 4) {
        *reinterpret_cast<float4*>(s + i) = *reinterpret_cast<const float4*>(state + i);
      }
    }
#endif
    if (copied) return;
    for (int i = threadIdx.x * 4; i < bytes / 4; i += kThreads * 4) {
      *reinterpret_cast<float4*>(s + i) = float4{0, 0, 0, 0};
    }
  }
  // After a __syncthreads(): the state can be read.
  __device__ void wait(bool fresh) {
#if __CUDA_ARCH__ >= 900
    if (fresh) return;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(phase)
        : "memory");
    phase ^= 1;
#endif
  }
  // Before a __syncthreads() that store() follows: the copy engine sees this thread's writes.
  __device__ void publish() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
  __device__ void store(float* state) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      asm volatile(
          "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
          "cp.async.bulk.commit_group;" ::"l"(state),
          "r"(uint32_t(__cvta_generic_to_shared(s))), "r"(bytes)
          : "memory");
    }
#else
    for (int i = threadIdx.x * 4; i < bytes / 4; i += kThreads * 4) {
      *reinterpret_cast<float4*>(state + i) = *reinterpret_cast<const float4*>(s + i);
    }
#endif
  }
  // The copy engine has read the state: shared memory may be used again, or given up.
  __device__ void stored() const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
  }

  __device__ void step(const DeltaMix& op, const Vectors& x) {
    constexpr int K = kParts * 32;
    const int lane = threadIdx.x % kLanes * 4;
    const auto part = [&](const float* vector, int j) {
      return *reinterpret_cast<const float4*>(vector + j * 32 + lane);
    };
    const float k_scale = head_scale(op.qk_norm, x.k, K);
    const float q_scale = head_scale(op.qk_norm, x.q, K) / sqrtf(float(K));
    for (int first = threadIdx.x / kLanes; first < op.value_dim; first += kRows * kGroups) {
      float4 held[kRows][kParts];
      float recalled[kRows] = {}, answer[kRows] = {};
      const auto at_row = [&](int r, int j) {
        return reinterpret_cast<float4*>(s + (first + r * kGroups) * K + j * 32 + lane);
      };
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float4 decay = part(x.decay, j), erase = part(x.erase, j);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (first + r * kGroups < op.value_dim) held[r][j] = times(*at_row(r, j), decay);
          recalled[r] += dot(held[r][j], erase);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float all = k_scale * sum_over_lanes<kLanes>(recalled[r]);
        const bool valid = first + r * kGroups < op.value_dim;
        recalled[r] = valid ? (x.v[first + r * kGroups] - all) * k_scale : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float4 k = part(x.k, j), q = part(x.q, j);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          held[r][j] = plus(held[r][j], recalled[r], k);
          answer[r] += dot(held[r][j], q);
          if (first + r * kGroups < op.value_dim) *at_row(r, j) = held[r][j];
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        answer[r] = sum_over_lanes<kLanes>(answer[r]) * q_scale;
        const bool valid = first + r * kGroups < op.value_dim;
        if (valid && lane == 0) x.out[first + r * kGroups] = answer[r];
      }
    }
  }
};

// The state of one head where it lies, for sizes that do not fit shared memory.
struct StreamedState {
  float* s = nullptr;
  bool zero = false;

  __device__ void open(float*, uint64_t*, const DeltaMix&) {}
  __device__ void load(float* state, bool fresh) {
    s = state;
    zero = fresh;
  }
  __device__ void wait(bool) const {}
  __device__ void publish() const {}
  __device__ void store(float*) const {}
  __device__ void stored() const {}
  __device__ void step(const DeltaMix& op, const Vectors& x) {
    const int K = op.key_dim, lane = threadIdx.x % kLanes;
    const float k_scale = head_scale(op.qk_norm, x.k, K);
    const float q_scale = head_scale(op.qk_norm, x.q, K) / sqrtf(float(K));
    // Every lane goes through the same number of rows: the sums need all lanes of a warp.
    for (int first = 0; first < op.value_dim; first += kGroups) {
      const int v = first + threadIdx.x / kLanes;
      const bool valid = v < op.value_dim;
      float* row = s + int64_t(v) * K;
      float recalled = 0, answer = 0;
      if (valid && !zero) {
#pragma unroll 8
        for (int i = lane; i < K; i += kLanes) recalled += row[i] * x.decay[i] * x.erase[i];
      }
      recalled = sum_over_lanes<kLanes>(recalled) * k_scale;
      if (valid) {
        const float u = (x.v[v] - recalled) * k_scale;
#pragma unroll 8
        for (int i = lane; i < K; i += kLanes) {
          const float next = (zero ? 0.0f : row[i] * x.decay[i]) + u * x.k[i];
          row[i] = next;
          answer += next * x.q[i];
        }
      }
      answer = sum_over_lanes<kLanes>(answer) * q_scale;
      if (valid && lane == 0) x.out[v] = answer;
    }
    zero = false;
  }
};

template <typename State, int kWidth>
__global__ __launch_bounds__(kThreads, 3) void delta_mix_kernel(
    const __grid_constant__ DeltaMix op, bool fresh_state, int state_floats,
    int row_tokens_most) {
  extern __shared__ float4 shared[];
  __shared__ uint64_t barrier;
  float* const space = reinterpret_cast<float*>(shared);
  const Vectors x = vectors(op, space + state_floats);
  const int row = blockIdx.y, group = op.value_heads / op.key_heads;
  let_successor_start();
  const Slot slot = op.rows.slot[row];
  const int begin = op.rows.begin[row], tokens = op.rows.begin[row + 1] - begin;
  // The same answer in every thread of the block.
  if (slot == kPadding || tokens == 0 || tokens > row_tokens_most) {
    wait_for_predecessor();
    return;
  }
  const int64_t all_keys = int64_t(op.key_heads) * op.key_dim;
  Place place{.key_head = int(blockIdx.x),
              .value_head = int(blockIdx.x) * group,
              .decay_head = 0,
              .token = 0,
              .begin = begin,
              .fresh = op.rows.first[row] == 0,
              .history = op.history.data == nullptr ? nullptr : at(op.history, slot),
              .channels = 2 * all_keys + int64_t(op.value_heads) * op.value_dim};
  State held;
  held.open(space, &barrier, op);
  if (!fresh_state) wait_for_predecessor();
  for (int i = 0; i < group; ++i, ++place.value_head) {
    float* state =
        at(op.state, slot) + int64_t(place.value_head) * op.value_dim * op.key_dim;
    held.load(state, place.fresh);
    place.decay_head = place.value_head * op.decay_heads / op.value_heads;
    if (fresh_state && i == 0) wait_for_predecessor();
    for (place.token = 0; place.token < tokens; ++place.token) {
      const Late late = late_factors(op, place, threadIdx.x);
      const bool last = place.token + 1 == tokens;
      prepare<kWidth>(op, place, x, last, i + 1 == group);
      __syncthreads();  // the token's vectors are there, and the copy's barrier
      if (place.token == 0) held.wait(place.fresh);
      held.step(op, x);
      held.publish();
      __syncthreads();  // the head's answer is there, and the vectors may be overwritten
      if (last) held.store(state);
      finish(op, place, x, late);
    }
    if (i + 1 < group) {
      held.stored();
      __syncthreads();  // the state has left shared memory
    }
  }
  if (kWidth == 0 && op.conv_width > 1) remember(op, place, tokens);
  held.stored();
}

// Of a head's state in shared memory; larger ones stay where they are.
constexpr int kHeldMost = 128 * 1024;

template <typename State, int kWidth>
void start(const DeltaMix& op, Context& context, int state_floats) {
  const auto kernel = delta_mix_kernel<State, kWidth>;
  const size_t shared =
      size_t(state_floats + 4 * op.key_dim + 2 * op.value_dim) * sizeof(float);
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  launch(context,
         {.grid = dim3(op.key_heads, op.rows.count), .block = dim3(kThreads), .shared = shared},
         kernel, op, context.fresh_state, state_floats, context.row_tokens_most);
}

template <typename State>
void start(const DeltaMix& op, Context& context, int state_floats) {
  const auto aligned = [](const float* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (op.conv_width == 4 && aligned(op.conv_q) && aligned(op.conv_k) && aligned(op.conv_v)) {
    start<State, 4>(op, context, state_floats);
  } else {
    start<State, 0>(op, context, state_floats);
  }
}

}  // namespace

void run(const DeltaMix& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.value_heads % op.key_heads == 0);
  WEIR_CHECK(op.rows.count <= 65535);
  WEIR_CHECK((4 * op.key_dim + 2 * op.value_dim) * sizeof(float) <= 48 * 1024);
  context.row_tokens_most = INT_MAX;
  const int longest = op.rows.tokens - op.rows.count + 1;  // at most, if no row is empty
  if (longest > kStepTokensMost && run_chunks(op, context)) {
    if (op.rows.count == 1) return;
    context.row_tokens_most = kStepTokensMost;
  }
  const bool aligned =
      op.state.stride % 4 == 0 && reinterpret_cast<uintptr_t>(op.state.data) % 16 == 0;
  const int floats = op.key_dim * op.value_dim;
  const bool fits = aligned && floats * int(sizeof(float)) <= kHeldMost;
  switch (fits ? op.key_dim : 0) {
    case 32: return start<HeldState<1>>(op, context, floats);
    case 64: return start<HeldState<2>>(op, context, floats);
    case 128: return start<HeldState<4>>(op, context, floats);
    default: return start<StreamedState>(op, context, 0);
  }
}

}  // namespace weir::cuda
