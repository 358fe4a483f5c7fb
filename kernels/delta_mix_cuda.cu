#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

// One block of 256 threads per (key head, row) runs the mixer over the row's tokens, for each of
// the key head's value heads in turn. Eight neighbouring threads share a row of the state: thread
// l of them holds the elements 4 l + 32 j .. + 3, so that a row is read in 128-byte lines.
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
  int key_head, value_head;
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

// The convolution's value for channel c of `in` at the block's token. `past` is that channel's
// column of the history.
template <int kWidth>
__device__ float convolve(const Acts& in, const Place& place, int64_t c, const float* taps,
                          const float* bias, const float* past, int width_any) {
  const int width = kWidth > 0 ? kWidth : width_any;
  const float* now = at(in, place.begin + place.token) + c;
  if (taps == nullptr) return *now;
  float sum = bias != nullptr ? bias[c] : 0.0f;
#pragma unroll
  for (int j = 0; j < (kWidth > 0 ? kWidth : width_any); ++j) {
    const int back = width - 1 - j;  // tokens ago
    float x = 0;
    if (back <= place.token) {
      x = now[-back * in.stride];
    } else if (!place.fresh) {
      x = past[(place.token + j) * place.channels];
    }
    sum += taps[c * width + j] * x;
  }
  return sum;
}

__device__ float convolve(const DeltaMix& op, const Acts& in, const Place& place, int64_t c,
                          const float* taps, const float* bias, int64_t channel) {
  const float* past = place.history + channel;
  if (op.conv_width == 4) return convolve<4>(in, place, c, taps, bias, past, 4);
  return convolve<0>(in, place, c, op.conv_width == 0 ? nullptr : taps, bias, past, op.conv_width);
}

// exp(g) of key channel i.
__device__ float decay_of(const DeltaMix& op, const Place& place, int i) {
  if (op.decay == Decay::None) return 1.0f;
  const int head = int(int64_t(place.value_head) * op.decay_heads / op.value_heads);
  const int64_t at_in = op.decay == Decay::PerHead ? head : int64_t(head) * op.key_dim + i;
  const float x = at(op.decay_in, place.begin + place.token)[at_in] + op.dt_bias[at_in];
  const float a = op.decay_a[head];
  if (op.lower_bound < 0) return expf(op.lower_bound * sigmoid(a * x));
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  return expf(-a * softplus);
}

// Fills q, k, decay, erase and v for the block's token.
__device__ void prepare(const DeltaMix& op, const Place& place, const Vectors& s) {
  const int K = op.key_dim, V = op.value_dim;
  const int64_t token = place.begin + place.token, all_keys = int64_t(op.key_heads) * K;
  const int64_t key0 = int64_t(place.key_head) * K, value0 = int64_t(place.value_head) * V;
  const float beta = op.beta_scale * (op.beta.data != nullptr
                                          ? sigmoid(at(op.beta, token)[place.value_head])
                                          : 1.0f);
  for (int i = threadIdx.x; i < 2 * K + V; i += kThreads) {
    if (i < K) {
      const float q = convolve(op, op.q, place, key0 + i, op.conv_q, op.conv_q_bias, key0 + i);
      s.q[i] = apply(op.qk_activation, q);
    } else if (i < 2 * K) {
      const int j = i - K;
      const float raw = convolve(op, op.k, place, key0 + j, op.conv_k, op.conv_k_bias,
                                 all_keys + key0 + j);
      const float k = apply(op.qk_activation, raw);
      const bool gated = op.erase.data != nullptr;
      s.k[j] = k;
      s.decay[j] = decay_of(op, place, j);
      s.erase[j] = k * (gated ? op.beta_scale * sigmoid(at(op.erase, token)[key0 + j]) : beta);
    } else {
      const int j = i - 2 * K;
      const float raw = convolve(op, op.v, place, value0 + j, op.conv_v, op.conv_v_bias,
                                 2 * all_keys + value0 + j);
      const bool gated = op.write.data != nullptr;
      s.v[j] = apply(Activation::Silu, raw) *
               (gated ? sigmoid(at(op.write, token)[value0 + j]) : beta);
    }
  }
}

// What normalises a head's q or k: every warp finds it for itself.
__device__ float head_scale(QkNorm norm, const float* x, int K) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < K; i += 32) sum += norm == QkNorm::L2 ? x[i] * x[i] : x[i];
  sum = sum_over_lanes(sum);
  return norm == QkNorm::L2 ? 1.0f / sqrtf(sum + 1e-6f) : 1.0f / sum;
}

// out = rms(o) * norm_weight [* gate_act(gate)].
__device__ void finish(const DeltaMix& op, const Place& place, const Vectors& s) {
  const int V = op.value_dim;
  const int64_t token = place.begin + place.token, value0 = int64_t(place.value_head) * V;
  float sum = 0;
  for (int i = threadIdx.x % 32; i < V; i += 32) sum += s.out[i] * s.out[i];
  const float scale = 1.0f / sqrtf(sum_over_lanes(sum) / float(V) + op.norm_eps);
  for (int i = threadIdx.x; i < V; i += kThreads) {
    float out = s.out[i] * scale * op.norm_weight[i];
    if (op.gate.data != nullptr) {
      out *= apply(op.gate_activation, at(op.gate, token)[value0 + i]);
    }
    at(op.out, token)[value0 + i] = out;
  }
}

// The last conv_width - 1 inputs become the history. Each channel is read and written by the
// thread that convolved it, oldest entry first, so no entry is lost.
__device__ void remember(const DeltaMix& op, const Place& place, int tokens) {
  const int K = op.key_dim, V = op.value_dim, kept = op.conv_width - 1;
  const int group = op.value_heads / op.key_heads;
  const int64_t all_keys = int64_t(op.key_heads) * K, key0 = int64_t(place.key_head) * K;
  const auto shift = [&](const Acts& in, int64_t c, int64_t channel) {
    for (int i = 0; i < kept; ++i) {
      const int from = tokens - kept + i;
      float x = 0;
      if (from >= 0) {
        x = at(in, place.begin + from)[c];
      } else if (!place.fresh) {
        x = place.history[(i + tokens) * place.channels + channel];
      }
      place.history[i * place.channels + channel] = x;
    }
  };
  for (int i = threadIdx.x; i < 2 * K + V; i += kThreads) {
    if (i < K) {
      shift(op.q, key0 + i, key0 + i);
    } else if (i < 2 * K) {
      shift(op.k, key0 + i - K, all_keys + key0 + i - K);
    } else {
      for (int j = 0; j < group; ++j) {
        const int64_t c = (int64_t(place.key_head) * group + j) * V + i - 2 * K;
        shift(op.v, c, 2 * all_keys + c);
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

// The state of one head in registers: kRows rows of kParts * 32 elements for each group of lanes.
template <int kParts, int kRows>
struct HeldState {
  float4 s[kRows][kParts];

  __device__ static int row(int r) { return r * kGroups + threadIdx.x / kLanes; }
  __device__ static int column(int j) { return j * 32 + int(threadIdx.x % kLanes) * 4; }

  __device__ void load(const float* state, bool fresh) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const auto* from =
            reinterpret_cast<const float4*>(state + row(r) * (kParts * 32) + column(j));
        s[r][j] = fresh ? float4{0, 0, 0, 0} : __ldcs(from);
      }
    }
  }
  __device__ void store(float* state) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        __stcs(reinterpret_cast<float4*>(state + row(r) * (kParts * 32) + column(j)), s[r][j]);
      }
    }
  }
  __device__ void step(const DeltaMix& op, const Vectors& x) {
    const auto part = [](const float* vector, int j) {
      return *reinterpret_cast<const float4*>(vector + column(j));
    };
    float recalled[kRows] = {}, answer[kRows] = {};
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const float4 decay = part(x.decay, j), erase = part(x.erase, j);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        s[r][j] = times(s[r][j], decay);
        recalled[r] += dot(s[r][j], erase);
      }
    }
    const float k_scale = head_scale(op.qk_norm, x.k, kParts * 32);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      recalled[r] = (x.v[row(r)] - k_scale * sum_over_lanes<kLanes>(recalled[r])) * k_scale;
    }
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const float4 k = part(x.k, j), q = part(x.q, j);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        s[r][j] = plus(s[r][j], recalled[r], k);
        answer[r] += dot(s[r][j], q);
      }
    }
    const float q_scale = head_scale(op.qk_norm, x.q, kParts * 32) / sqrtf(float(kParts * 32));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      answer[r] = sum_over_lanes<kLanes>(answer[r]) * q_scale;
      if (threadIdx.x % kLanes == 0) x.out[row(r)] = answer[r];
    }
  }
};

// The state of one head where it lies, for sizes that do not fit the registers.
struct StreamedState {
  float* s = nullptr;
  bool zero = false;

  __device__ void load(float* state, bool fresh) {
    s = state;
    zero = fresh;
  }
  __device__ void store(float*) const {}
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

template <typename State>
__global__ __launch_bounds__(kThreads, 2) void delta_mix_kernel(
    const __grid_constant__ DeltaMix op, bool fresh_state) {
  extern __shared__ float4 shared[];
  const Vectors x = vectors(op, reinterpret_cast<float*>(shared));
  const int row = blockIdx.y, group = op.value_heads / op.key_heads;
  let_successor_start();
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding) {  // the same answer in every thread of the block
    wait_for_predecessor();
    return;
  }
  const int begin = op.rows.begin[row], tokens = op.rows.begin[row + 1] - begin;
  const int64_t all_keys = int64_t(op.key_heads) * op.key_dim;
  Place place{.key_head = int(blockIdx.x),
              .value_head = int(blockIdx.x) * group,
              .token = 0,
              .begin = begin,
              .fresh = op.rows.first[row] == 0,
              .history = op.history.data == nullptr ? nullptr : at(op.history, slot),
              .channels = 2 * all_keys + int64_t(op.value_heads) * op.value_dim};
  if (!fresh_state) wait_for_predecessor();
  bool waited = !fresh_state;
  for (int i = 0; i < group; ++i, ++place.value_head) {
    float* state =
        at(op.state, slot) + int64_t(place.value_head) * op.value_dim * op.key_dim;
    State held;
    held.load(state, place.fresh);
    if (!waited) wait_for_predecessor();
    waited = true;
    for (place.token = 0; place.token < tokens; ++place.token) {
      prepare(op, place, x);
      __syncthreads();  // the token's vectors are there
      held.step(op, x);
      __syncthreads();  // the head's answer is there, and the vectors may be overwritten
      finish(op, place, x);
    }
    held.store(state);
  }
  if (op.conv_width > 1 && tokens > 0) remember(op, place, tokens);
}

template <typename State>
void start(const DeltaMix& op, Context& context) {
  const size_t shared = size_t(4 * op.key_dim + 2 * op.value_dim) * sizeof(float);
  launch(context,
         {.grid = dim3(op.key_heads, op.rows.count), .block = dim3(kThreads), .shared = shared},
         delta_mix_kernel<State>, op, context.fresh_state);
}

}  // namespace

void run(const DeltaMix& op, Context& context) {
  if (op.rows.count == 0) return;
  WEIR_CHECK(op.value_heads % op.key_heads == 0);
  WEIR_CHECK(op.rows.count <= 65535);
  WEIR_CHECK((4 * op.key_dim + 2 * op.value_dim) * sizeof(float) <= 48 * 1024);
  const bool aligned =
      op.state.stride % 4 == 0 && reinterpret_cast<uintptr_t>(op.state.data) % 16 == 0;
  const int K = aligned ? op.key_dim : 0, V = op.value_dim;
  if (K == 32 && V == 32) return start<HeldState<1, 1>>(op, context);
  if (K == 32 && V == 64) return start<HeldState<1, 2>>(op, context);
  if (K == 64 && V == 64) return start<HeldState<2, 2>>(op, context);
  if (K == 64 && V == 128) return start<HeldState<2, 4>>(op, context);
  if (K == 128 && V == 128) return start<HeldState<4, 4>>(op, context);
  start<StreamedState>(op, context);
}

}  // namespace weir::cuda
